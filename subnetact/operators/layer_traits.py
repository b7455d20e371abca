"""LayerTraits: everything the library knows of a class of layers, in one table that all rooms read.

A layer that is not in the table stays as it is in every subnet, unless an operator is named for it. To make
another class of layers elastic, write its operator (`base.py` has an example) and add a line to the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn


@dataclass(frozen=True)
class LayerTraits:
    """What the library knows of one class of layers.

    Attributes:
        kind: what the layer is. The operator that slices it by default names this kind in `slices`.
        axes: parameter or buffer -> the part of the operator that each of its first axes belongs to. Further
            axes belong to none.
        sizes: part -> the attribute of the layer that holds its size.
        reads: the part that a narrowed input concerns.
        mixes: whether the layer multiplies by a weight, or looks it up: every output channel is computed from
            all input channels, or from those of its group.
        fresh: whether the output is a new tensor, which a following operation may overwrite.
        finite: whether finite inputs give finite outputs, unless they overflow.
        transparent: whether the layer may lie on the shortcut of a residual block.
        reads_children: whether the forward reads the weights of its submodules itself.
    """

    kind: str = "unknown"
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    reads: str = ""
    mixes: bool = False
    fresh: bool = False
    finite: bool = False
    transparent: bool = False
    reads_children: bool = False


def _matrix(kind: str, out: str, in_: str, inputs_first: bool = False) -> LayerTraits:
    axes = {"weight": ("in_", "out") if inputs_first else ("out", "in_"), "bias": ("out",)}
    sizes = {"out": out, "in_": in_}
    return LayerTraits(kind, axes, sizes, reads="in_", mixes=True, fresh=True, finite=True)


def _norm_of_channels(kind: str, part: str) -> LayerTraits:
    axes = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (part,))
    return LayerTraits(kind, axes, {part: "num_features"}, reads=part, fresh=True, finite=True)


CHANNEL_NORM = "channel norm"
"""The kind of norms that treat each channel by itself, with frozen statistics or those of one image."""
_UNKNOWN = LayerTraits()
_CONTAINER = LayerTraits("container")
_TRANSPOSED = _matrix("transposed convolution", "out_channels", "in_channels", inputs_first=True)
_BATCH_NORM = _norm_of_channels("batch norm", "channels")
_CHANNEL_NORM = _norm_of_channels(CHANNEL_NORM, "features")
_PER_WIDTH_NORM = replace(_BATCH_NORM, kind="per-width batch norm")
_NORM = LayerTraits("norm", {"weight": ("features",), "bias": ("features",)}, reads="features", finite=True)
_ACTIVATION = LayerTraits("activation", finite=True)
_PLAIN_ACTIVATION = LayerTraits("activation", finite=True, transparent=True)
_POOL = LayerTraits("pool", finite=True)
_RESHAPE = LayerTraits("reshape", finite=True)
_IN_PROJECTION = {"in_proj_weight": ("out", "in_"), "in_proj_bias": ("out",)}

_TRAITS: dict[type[nn.Module] | str, LayerTraits] = {
    nn.Linear: _matrix("linear", "out_features", "in_features"),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _matrix("convolution", "out_channels", "in_channels")),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _TRANSPOSED),
    "transformers.pytorch_utils.Conv1D": _matrix("linear", "nf", "nx", inputs_first=True),
    nn.Embedding: _matrix("embedding", "embedding_dim", "num_embeddings", inputs_first=True),
    nn.MultiheadAttention: LayerTraits(
        "attention", _IN_PROJECTION, reads="in_", mixes=True, fresh=True, reads_children=True
    ),
    nn.TransformerEncoderLayer: LayerTraits(reads_children=True),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _BATCH_NORM),
    "subnetact.operators.per_width_norm.PerWidthBatchNorm2d": _PER_WIDTH_NORM,
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), replace(_NORM, transparent=True)),
    nn.GroupNorm: replace(_NORM, sizes={"features": "num_channels"}),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _CHANNEL_NORM),
    "torchvision.ops.misc.FrozenBatchNorm2d": replace(_CHANNEL_NORM, sizes={}),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU), _PLAIN_ACTIVATION),
    **dict.fromkeys((nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh), _ACTIVATION),
    **dict.fromkeys((nn.LeakyReLU, nn.PReLU, nn.ELU, nn.Mish, nn.Softmax), _ACTIVATION),
    **dict.fromkeys((nn.Identity, nn.Dropout), LayerTraits("identity", finite=True, transparent=True)),
    nn.Dropout2d: LayerTraits("identity", finite=True),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), _POOL),
    **dict.fromkeys((nn.Flatten, nn.Upsample, nn.ZeroPad2d, nn.PixelShuffle), _RESHAPE),
    **dict.fromkeys((nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict), _CONTAINER),
    **dict.fromkeys((nn.ParameterList, nn.ParameterDict), _CONTAINER),
}
"""The one table: class of layers, or its full name if the class is of an optional package -> its traits."""


def traits_of(layer: nn.Module | type[nn.Module], derived: bool = True) -> LayerTraits:
    """Return the traits of a layer, or of a class, which may be `derived` from one in the table."""
    given: Any = layer if isinstance(layer, type) else type(layer)
    for cls in given.__mro__ if derived else (given,):
        found = _TRAITS.get(cls) or _TRAITS.get(f"{cls.__module__}.{cls.__qualname__}")
        if found is not None:
            # A class that is derived from nn.Module alone may be anything, and not a container.
            return _UNKNOWN if cls is nn.Module and given is not nn.Module else found
    return _UNKNOWN


def is_batch_norm(layer: nn.Module) -> bool:
    """Tell whether a layer is a BatchNorm with one set of statistics."""
    return traits_of(layer).kind == _BATCH_NORM.kind


def norm_features(layer: nn.Module) -> int:
    """Return how many features a norm scales, also one of an unknown class; 0 for other layers."""
    kind, own = traits_of(layer).kind, dict(layer.named_parameters(recurse=False))
    norm = kind == _NORM.kind or (kind == _UNKNOWN.kind and own.keys() == {"weight"})
    return next(iter(own.values())).shape[0] if norm and {p.dim() for p in own.values()} == {1} else 0


def register_layer(cls: type[nn.Module], traits: LayerTraits) -> None:
    """Add a class of layers to the table, or replace what the table says of it.

    Args:
        cls: the class; classes derived from it have the same traits.
        traits: its axes and the rest. An operator that names their `kind` in `slices` slices such layers.
    """
    _TRAITS[cls] = traits
