"""LayerTraits: everything the library knows of a class of layers, in one table that all rooms read.

A layer that is not in the table stays as it is in every subnet, unless an operator is named for it. To make
another class of layers elastic, write its operator (`base.py` has an example) and add a line to the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from subnetact.operators.operation_traits import BY_CALL
from subnetact.operators.view_module import module_class


@dataclass(frozen=True)
class LayerTraits:
    """What the library knows of one class of layers.

    Attributes:
        kind: what the layer is, in the words of `Operator.slices`.
        axes: parameter or buffer -> the part of the operator that each of its first axes belongs to. Further
            axes belong to none.
        sizes: part -> the attribute of the layer that holds its size.
        reads: the part that a narrowed input concerns.
        mixes: whether the layer multiplies by a weight, or looks it up: every output channel is computed from
            all input channels, or from those of its group.
        finite: whether finite inputs give finite outputs, unless they overflow.
        transparent: whether the layer may lie on the shortcut of a residual block.
        reads_children: whether the forward reads the weights of its submodules itself.
        operator: what slices the layer if a description names no other operator. If None, it is the one of
            the library for this kind.
    """

    kind: str = "unknown"
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    reads: str = ""
    mixes: bool = False
    finite: bool = False
    transparent: bool = False
    reads_children: bool = False
    operator: Any = None


def _matrix(kind: str, out: str, in_: str, inputs_first: bool = False) -> LayerTraits:
    axes = {"weight": ("in_", "out") if inputs_first else ("out", "in_"), "bias": ("out",)}
    sizes = {"out": out, "in_": in_}
    return LayerTraits(kind, axes, sizes, reads="in_", mixes=True, finite=True)


def _norm_of_channels(kind: str, part: str) -> LayerTraits:
    axes = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (part,))
    return LayerTraits(kind, axes, {part: "num_features"}, reads=part, finite=True)


CHANNEL_NORM = "channel norm"
"""The kind of norms that treat each channel by itself, with frozen statistics or those of one image."""
_UNKNOWN = LayerTraits()
_CONTAINER = LayerTraits("container")
_TRANSPOSED = _matrix("transposed convolution", "out_channels", "in_channels", inputs_first=True)
_BATCH_NORM = _norm_of_channels("batch norm", "channels")
_CHANNEL_NORM = _norm_of_channels(CHANNEL_NORM, "features")
_PER_WIDTH_NORM = replace(_BATCH_NORM, kind="per-width batch norm")
_NORM = LayerTraits("norm", {"weight": ("features",), "bias": ("features",)}, reads="features", finite=True)
_IN_PROJECTION = {"in_proj_weight": ("out", "in_"), "in_proj_bias": ("out",)}

_TRAITS: dict[type[nn.Module] | str, LayerTraits] = {
    **{
        call: LayerTraits(operation.kind, finite=operation.finite, transparent=operation.transparent)
        for call, operation in BY_CALL.items()
        if isinstance(call, type) and issubclass(call, nn.Module)
    },
    nn.Linear: _matrix("linear", "out_features", "in_features"),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _matrix("convolution", "out_channels", "in_channels")),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _TRANSPOSED),
    "transformers.pytorch_utils.Conv1D": _matrix("linear", "nf", "nx", inputs_first=True),
    nn.Embedding: _matrix("embedding", "embedding_dim", "num_embeddings", inputs_first=True),
    nn.MultiheadAttention: LayerTraits(
        "attention", _IN_PROJECTION, reads="in_", mixes=True, reads_children=True
    ),
    nn.TransformerEncoderLayer: LayerTraits(reads_children=True),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _BATCH_NORM),
    "subnetact.operators.per_width_norm.PerWidthBatchNorm2d": _PER_WIDTH_NORM,
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), replace(_NORM, transparent=True)),
    nn.GroupNorm: replace(_NORM, sizes={"features": "num_channels"}),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _CHANNEL_NORM),
    "torchvision.ops.misc.FrozenBatchNorm2d": replace(_CHANNEL_NORM, sizes={}),
    **dict.fromkeys((nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict), _CONTAINER),
    **dict.fromkeys((nn.ParameterList, nn.ParameterDict), _CONTAINER),
}
"""The one table: class of layers, or its full name if the class is of an optional package -> its traits."""


def _entry(cls: Any) -> tuple[type[nn.Module], LayerTraits]:
    """Return the class in the table from which a class has its traits, and what the table says of it."""
    named = (
        (base, _TRAITS.get(base) or _TRAITS.get(f"{base.__module__}.{base.__qualname__}"))
        for base in cls.__mro__
    )
    return next(((base, traits) for base, traits in named if traits is not None), (nn.Module, _UNKNOWN))


def traits_of(layer: nn.Module | type[nn.Module]) -> LayerTraits:
    """Return the traits of a layer, or of a class of layers, which may be derived from one in the table."""
    cls: Any = layer if isinstance(layer, type) else type(layer)
    base, traits = _entry(cls)
    # A class that is derived from nn.Module alone may be anything, and not a container.
    return _UNKNOWN if base is nn.Module and cls is not nn.Module else traits


def runs_as(layer: nn.Module, cls: type[nn.Module] | None = None) -> bool:
    """Tell whether a layer runs the forward of a class, by default of that from which it has its traits."""
    own, base = type(layer), cls or _entry(type(layer))[0]
    parts = ("forward", "_conv_forward")
    return all(getattr(own, part, None) is getattr(base, part, None) for part in parts)


def is_layer(module: nn.Module, derived: bool = True) -> bool:
    """Tell whether a module is a layer of PyTorch, or of a class that is `derived` from one."""
    cls = module_class(module)
    classes = cls.__mro__ if derived else (cls,)
    of_torch = (base for base in classes if base.__module__.startswith("torch.nn."))
    return any(_TRAITS.get(base) is not _CONTAINER for base in of_torch)


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
        traits: its axes and the rest, and the `operator` that slices such layers.
    """
    _TRAITS[cls] = traits
