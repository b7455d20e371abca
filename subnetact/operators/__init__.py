"""Elastic operators: modules that hold full-size parameters and slice any subnet's part out of them.

Every operator has one slicing rule, which views, training and exports share. `insert_` puts operators into
a network as a description says: `{"conv1": WeightSlice.on(out="width")}`.

Which file answers which question:

- `base.py`: what every operator does (`Operator`), and one entry of a description (`Elastic`).
- `layer_traits.py`: the one table of what is known of each class of layers; `register_layer` adds to it.
  `operation_traits.py`: the same of functions: activations, sums, reshapes.
  `segments.py`: parts that consist of several segments.
- `vocabulary.py`: what models call their numbers, of heads, neurons and experts for example.
- `layer_select.py`: which layers of a stack are kept, and which of several modules is used;
  `skipped_layer.py`: what is in the places of skipped layers. The other operators have files of their names.
- `lowered_weight.py`: how a convolution or linear layer is sliced, and multiplies, at int8 and bfloat16.
  `kernel_table.py`: what each kind of machine multiplies with at a precision, or why it is refused.
- `view_module.py`: how the modules of a zero-copy view are made; `packed_copy.py`: tensors in memory of their
  own that follow the weights; `tensor_version.py`: whether a tensor has changed in place.

Which operator makes which module elastic:

| module | operator and parts |
|---|---|
| Conv1d to Conv3d, depthwise and grouped ones, ConvTranspose1d to ConvTranspose3d | WeightSlice(out, in_) |
| Linear, `Conv1D` of transformers | WeightSlice(out, in_) |
| a fused layer (`qkv`, `gate_up`), a layer behind a concatenation | WeightSlice(out=Segments(...), in_=...) |
| BatchNorm, LayerNorm and own parameters behind a concatenation | their operators, with Segments(...) |
| Embedding | WeightSlice(out) |
| BatchNorm1d to BatchNorm3d, SyncBatchNorm | SubnetNorm(channels) |
| LayerNorm, RMSNorm and its relatives in transformers and timm, GroupNorm | LayerNormSlice(features) |
| InstanceNorm1d to InstanceNorm3d, FrozenBatchNorm2d of torchvision | LayerNormSlice(features) |
| MultiheadAttention | AttentionSlice(out, in_) |
| parameters of a module itself: `cls_token`, `gamma`; another axis: `"scale.0"` | ElasticAttribute(name) |
| numbers that a forward reads: `num_heads`, `"config.num_attention_heads"` | ElasticAttribute(name) |
| Sequential, ModuleList, other modules with layers that a subnet may skip | LayerSelect(name of a layer) |
| KernelConv2d, SwitchableModule, PerWidthBatchNorm2d | ElasticKernel, ModuleSwitch, PerWidthNorm |
"""

from subnetact.operators.attention_slice import AttentionSlice
from subnetact.operators.base import OWN_SLICERS, Elastic, Operator
from subnetact.operators.elastic_attribute import ElasticAttribute
from subnetact.operators.elastic_kernel import ElasticKernel, KernelConv2d
from subnetact.operators.layer_norm_slice import LayerNormSlice
from subnetact.operators.layer_select import LayerSelect, ModuleSwitch, SwitchableModule
from subnetact.operators.layer_traits import LayerTraits, register_layer
from subnetact.operators.per_width_norm import PerWidthBatchNorm2d, PerWidthNorm
from subnetact.operators.segments import Segments
from subnetact.operators.subnet_norm import CALIBRATION_RULES, SubnetNorm
from subnetact.operators.weight_slice import WeightSlice

for _operator in (WeightSlice, SubnetNorm, PerWidthNorm, LayerNormSlice, AttentionSlice):
    OWN_SLICERS.update(dict.fromkeys(_operator.slices, _operator))

__all__ = [
    "CALIBRATION_RULES",
    "AttentionSlice",
    "Elastic",
    "ElasticAttribute",
    "ElasticKernel",
    "KernelConv2d",
    "LayerNormSlice",
    "LayerSelect",
    "LayerTraits",
    "ModuleSwitch",
    "Operator",
    "PerWidthBatchNorm2d",
    "PerWidthNorm",
    "Segments",
    "SubnetNorm",
    "SwitchableModule",
    "WeightSlice",
    "register_layer",
]
