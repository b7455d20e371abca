"""Elastic operators: modules that hold full-size parameters and make any subnet's part of them."""

from subnetact.operators.base import Elastic, Operator
from subnetact.operators.layer_select import LayerSelect
from subnetact.operators.subnet_norm import CollectingNorm, SubnetNorm
from subnetact.operators.weight_slice import WeightSlice

__all__ = ["CollectingNorm", "Elastic", "LayerSelect", "Operator", "SubnetNorm", "WeightSlice"]
