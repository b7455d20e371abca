"""Elastic operators: modules that hold full-size parameters and make any subnet's part of them."""

from subnetact.operators.base import Elastic, Operator
from subnetact.operators.collecting import CollectingNorm
from subnetact.operators.elastic_kernel import ElasticKernel, KernelConv2d
from subnetact.operators.layer_select import LayerSelect
from subnetact.operators.listed_norm import ListedBatchNorm2d, ListedNorm
from subnetact.operators.norm_slice import NormSlice
from subnetact.operators.parameter_slice import ParameterSlice, Setting
from subnetact.operators.subnet_norm import CALIBRATION_RULES, SubnetNorm
from subnetact.operators.switch import Alternatives, Switch
from subnetact.operators.weight_slice import WeightSlice

__all__ = [
    "CALIBRATION_RULES",
    "Alternatives",
    "CollectingNorm",
    "Elastic",
    "ElasticKernel",
    "KernelConv2d",
    "LayerSelect",
    "ListedBatchNorm2d",
    "ListedNorm",
    "NormSlice",
    "Operator",
    "ParameterSlice",
    "Setting",
    "SubnetNorm",
    "Switch",
    "WeightSlice",
]
