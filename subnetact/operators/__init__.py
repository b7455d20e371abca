"""Elastic operators: modules that hold full-size parameters and make any subnet's part of them."""

from subnetact.operators.base import Elastic, Operator
from subnetact.operators.elastic_kernel import ElasticKernel, KernelConv2d
from subnetact.operators.layer_norm_slice import LayerNormSlice
from subnetact.operators.layer_select import LayerSelect
from subnetact.operators.parameter_slice import ElasticAttribute, ParameterSlice
from subnetact.operators.per_width_norm import PerWidthBatchNorm2d, PerWidthNorm
from subnetact.operators.subnet_norm import CALIBRATION_RULES, SubnetNorm
from subnetact.operators.switch import ModuleSwitch, SwitchableModule
from subnetact.operators.weight_slice import WeightSlice

__all__ = [
    "CALIBRATION_RULES",
    "Elastic",
    "ElasticAttribute",
    "ElasticKernel",
    "KernelConv2d",
    "LayerNormSlice",
    "LayerSelect",
    "ModuleSwitch",
    "Operator",
    "ParameterSlice",
    "PerWidthBatchNorm2d",
    "PerWidthNorm",
    "SubnetNorm",
    "SwitchableModule",
    "WeightSlice",
]
