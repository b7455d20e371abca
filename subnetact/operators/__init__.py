"""Elastic operators: modules that hold full-size parameters and slice any subnet's part out of them.

Every operator has one slicing rule, which views, training and exports share. `insert_` puts operators into
a network as a description says: `{"conv1": WeightSlice.on(out="width")}`.

Which file answers which question:

- `base.py`: what every operator does (`Operator`), and one entry of a description (`Elastic`).
- `weight_slice.py`: convolutions, grouped ones included, and linear layers.
- `subnet_norm.py`: BatchNorm, whose statistics belong to the subnet; `per_width_norm.py`: US-Nets' BatchNorm.
- `layer_norm_slice.py`: LayerNorm; `parameter_slice.py`: own parameters, and plain numbers such as heads.
- `layer_select.py`: which layers of a stack are kept; `switch.py`: one of several modules.
- `elastic_kernel.py`: depthwise convolutions whose kernel size is a choice.
- `view_module.py`: how the modules of a zero-copy view are made; `tensor_version.py`: whether a tensor has
  changed in place.
"""

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
