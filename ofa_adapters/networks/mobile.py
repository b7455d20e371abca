"""What the mobile families share: the inverted residual block, the network around it, and the layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import Built, Names, Shapes
from ofa_adapters.layout import Activation, Layout, block_axis, conv_norm, multiplier
from subnetact.operators import Elastic, ElasticKernel, KernelConv2d, LayerSelect, SubnetNorm, WeightSlice
from subnetact.space import Axis, AxisValues, Slot, make_divisible
from subnetact.spec import Value


class MBConv(nn.Module):
    """An inverted residual block; learned matrices make smaller kernels if `matrices`, crops otherwise.

    It has a residual connection if its input and output are alike, unless `residual` is false.
    """

    def __init__(
        self,
        in_: int,
        mid: int | None,
        out: int,
        kernels: Sequence[int],
        stride: int,
        activation: Activation,
        bn: Mapping[str, Any],
        squeeze: int | None = None,
        matrices: bool = False,
        residual: bool = True,
    ) -> None:
        super().__init__()
        self.expand_conv, self.expand_bn = conv_bn(in_, mid, bn)
        width = in_ if mid is None else mid
        self.depth_conv = KernelConv2d(width, kernels, stride, matrices and len(kernels) > 1)
        self.depth_bn = nn.BatchNorm2d(width, **bn)
        self.squeeze_reduce = None if squeeze is None else nn.Conv2d(width, squeeze, 1)
        self.squeeze_expand = None if squeeze is None else nn.Conv2d(squeeze, width, 1)
        self.project_conv, self.project_bn = conv_bn(width, out, bn)
        self.activation = activation
        self.residual = residual and stride == 1 and in_ == out

    def transform(self, x: Tensor) -> Tensor:
        """Map (N, in_, H, W) to (N, out, H / stride, W / stride), without the residual connection."""
        if self.expand_conv is not None and self.expand_bn is not None:
            x = self.activation(self.expand_bn(self.expand_conv(x)))
        x = self.activation(self.depth_bn(self.depth_conv(x)))
        if self.squeeze_reduce is not None and self.squeeze_expand is not None:
            squeezed = F.relu(self.squeeze_reduce(x.mean((2, 3), keepdim=True)))
            x = x * F.hardsigmoid(self.squeeze_expand(squeezed))
        return self.project_bn(self.project_conv(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_, H, W) to (N, out, H / stride, W / stride)."""
        return x + self.transform(x) if self.residual else self.transform(x)


class MobileNet(nn.Module):
    """The full network; `widths` are those of the stem, of the last block and of the last convolution."""

    # With another convolution, of `final` channels, the last one comes after the mean and has no BatchNorm.

    def __init__(
        self,
        blocks: Sequence[MBConv],
        widths: tuple[int, int, int],
        final: int | None,
        activations: tuple[Activation, Activation],
        n_classes: int,
        bn: Mapping[str, Any],
        dropout: float = 0.0,
        stride: int = 2,
        resize: nn.Module | None = None,
    ) -> None:
        super().__init__()
        first, last, mixed = widths
        self.resize = resize
        self.first_conv, self.first_bn = conv_bn(3, first, bn, 3, stride)
        self.blocks = nn.Sequential(*blocks)
        self.final_conv, self.final_bn = conv_bn(last, final, bn)
        self.mix_conv = nn.Conv2d(final or last, mixed, 1, bias=False)
        self.mix_bn = nn.BatchNorm2d(mixed, **bn) if final is None else None
        self.dropout = nn.Dropout(float(dropout))
        self.classifier = nn.Linear(mixed, n_classes)
        self.first_activation, self.head_activation = activations

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, n_classes)."""
        if self.resize is not None:
            x = self.resize(x)
        x = self.blocks(self.first_activation(self.first_bn(self.first_conv(x))))
        act = self.head_activation
        if self.final_conv is not None and self.final_bn is not None:
            x = act(self.final_bn(self.final_conv(x))).mean((2, 3), keepdim=True)
            x = act(self.mix_conv(x)).flatten(1)
        elif self.mix_bn is not None:
            x = act(self.mix_bn(self.mix_conv(x))).mean((2, 3))
        return self.classifier(self.dropout(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class MobileStage:
    """One elastic stage; only its first block has the stride. `longest` limits the number of blocks."""

    stride: int
    activation: Activation
    squeeze: bool = False
    longest: int | None = None


@dataclass(frozen=True)
class MobileLayout(Layout):
    """A fixed first block, then elastic stages; `widths` run from the stem to the 1x1 convolutions.

    Attributes:
        first_residual: whether the fixed first block has a residual connection.
        activations: those of the stem, of the fixed first block, and of the 1x1 convolutions.
    """

    widths: tuple[int, ...]
    kernels: tuple[int, ...]
    expands: tuple[float, ...]
    depths: tuple[int, ...]

    keys: ClassVar = {"ks": "kernel", "e": "expand", "d": "depth"}
    ignored = ("image_size", "r")
    stages: ClassVar[tuple[MobileStage, ...]]
    first_residual: ClassVar[bool]
    activations: ClassVar[tuple[Activation, Activation, Activation]]

    @property
    def blocks(self) -> list[tuple[int, int, int]]:
        """The stage, the position in the stage and the input channels of every block slot, in order."""
        lengths = [min(self.depths[-1], stage.longest or self.depths[-1]) for stage in self.stages]
        return [
            (stage, position, self.widths[2 + stage if position else 1 + stage])
            for stage, length in enumerate(lengths)
            for position in range(length)
        ]

    def sizes(self, values: AxisValues) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for i, (stage, position, in_) in enumerate(self.blocks):
            kept = position < values["depth"][stage]
            mid = make_divisible(round(in_ * values["expand"][i])) if kept else 0
            sizes[f"block{i}.keep"] = int(kept)
            sizes[f"block{i}.mid"] = mid
            sizes[f"block{i}.squeeze"] = make_divisible(mid // 4) if kept else 0
            sizes[f"block{i}.kernel"] = values["kernel"][i] if kept else 0
        return sizes

    def axes(self) -> list[Axis]:
        depth = []
        for s, stage in enumerate(self.stages):
            legal = tuple(d for d in self.depths if d <= (stage.longest or d)) or (stage.longest or 1,)
            clipped: dict[Value, Value] = {d: legal[-1] for d in self.depths if d > legal[-1]}
            depth.append(Slot(f"stage{s + 1}", legal, aliases=clipped))

        depths = Axis("depth", tuple(depth))
        places = [(stage, position + 1) for stage, position, _ in self.blocks]
        kernel = block_axis("kernel", self.kernels, depths, places)
        return [depths, kernel, block_axis("expand", self.expands, depths, places)]

    def build(
        self, n_classes: int, bn_param: tuple[float, float], dropout: float, kernel_transform_mode: int | None
    ) -> Built:
        """Return what a family's `build` returns."""
        learned = kernel_transform_mode is not None
        bn = {"momentum": bn_param[0], "eps": bn_param[1]}
        stem, first, *_ = self.widths
        stem_act, first_act, head_act = self.activations
        blocks = [MBConv(stem, None, first, (3,), 1, first_act, bn, residual=self.first_residual)]
        full = self.largest()
        for i, (s, position, in_) in enumerate(self.blocks):
            out, stage = self.widths[2 + s], self.stages[s]
            mid, squeeze = full[f"block{i}.mid"], full[f"block{i}.squeeze"] if stage.squeeze else None
            depthwise = self.kernels, 1 if position else stage.stride, stage.activation
            blocks.append(MBConv(in_, mid, out, *depthwise, bn, squeeze, learned))
        last, *final, mixed = self.widths[1 + len(self.stages) :]
        ends = (stem, last, mixed), final[0] if final else None, (stem_act, head_act)
        return self.built(MobileNet(blocks, *ends, n_classes, bn, dropout))

    def elastic(self) -> dict[str, Elastic]:
        names = {str(i + 1): f"block{i}.keep" for i in range(len(self.blocks))}
        elastic = {"blocks": LayerSelect.on(**names)}
        for i in range(len(self.blocks)):
            elastic |= mbconv_elastic(f"blocks.{i + 1}", f"block{i}")
        return elastic


def mbconv_elastic(
    path: str, block: str, in_: str | None = None, out: str | None = None, kernel: bool = True
) -> dict[str, Elastic]:
    """Return the entries of all parts that an MBConv can have; its own dimensions start with `block`."""
    mid, squeezed = f"{block}.mid", f"{block}.squeeze"
    return {
        **conv_norm(f"{path}.expand_conv", f"{path}.expand_bn", in_, mid),
        f"{path}.depth_conv": ElasticKernel.on(channels=mid, kernel=f"{block}.kernel" if kernel else None),
        f"{path}.depth_bn": SubnetNorm.on(channels=mid),
        f"{path}.squeeze_reduce": WeightSlice.on(in_=mid, out=squeezed),
        f"{path}.squeeze_expand": WeightSlice.on(in_=squeezed, out=mid),
        **conv_norm(f"{path}.project_conv", f"{path}.project_bn", mid, out),
    }


def _kernels(shapes: Shapes, given: Mapping[str, Any]) -> list[int] | None:
    if given.get("kernel_transform_mode", 1) is None:
        return None  # Smaller kernels are crops of the largest, and nothing tells their sizes.
    smaller = {int(at[1]) for key in shapes if (at := re.search(r"\.\dto(\d)_matrix$", key))}
    return sorted({*smaller, shapes.size(r"blocks.\d+.depth_conv.weight", 2)})


def mobile_shown(width: str) -> dict[str, Callable[[Shapes, Mapping[str, Any]], Any]]:
    """Return the arguments that the tensors show; `width` is the name of that of the width multiplier."""
    mid = r"blocks.\d+.expand_conv.weight"
    return {
        "n_classes": lambda shapes, _: shapes.size("classifier.weight"),
        width: lambda shapes, _: multiplier(shapes.size("mix_conv.weight"), 1280),
        "ks_list": _kernels,
        "expand_ratio_list": lambda shapes, _: round(shapes.size(mid) / shapes.size(mid, 1), 1),
        "depth_list": lambda shapes, _: (shapes.layers("blocks") - 1) // 5,  # and one of ProxylessNAS
    }


def block_names(block: str, inside: str, kind: str) -> Names:
    """Return the names in a block; `kind` is how upstream names the convolution or BatchNorm of a layer."""
    layers = (("inverted_bottleneck", "expand"), ("depth_conv", "depth"), ("point_linear", "project"))
    path, parts = f"{block}.{inside}", [(*layer, k) for layer in layers for k in KINDS]
    return (
        *((f"{path}.{name}.{kind.format(k)}", f"{block}.{own}_{k}") for name, own, k in parts),
        (f"{path}.depth_conv.conv.#to#_matrix", f"{block}.depth_conv.#to#_matrix"),
        *((f"{path}.depth_conv.se.fc.{way}", f"{block}.squeeze_{way}") for way in ("reduce", "expand")),
    )


def mobile_names(inside: str) -> Names:
    """Return the names in upstream's dynamic networks, whose blocks hold their convolutions in `inside`."""
    layers = {"first_conv": "first", "final_expand_layer": "final", "feature_mix_layer": "mix"}
    return (
        *block_names("blocks.0", inside, "{0}"),  # The first block is not elastic.
        *block_names("blocks.#", inside, "{0}.{0}"),
        *((f"{layer}.{k}", f"{own}_{k}") for layer, own in layers.items() for k in KINDS),
        ("classifier.linear", "classifier"),
    )


def conv_bn(in_: int, out: int | None, bn: Any, kernel: int = 1, stride: int = 1) -> tuple[Any, Any]:
    """Return a convolution that a stride of 1 keeps the size of, and its BatchNorm; None without outputs."""
    if out is None:
        return None, None
    return nn.Conv2d(in_, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out, **bn)


KINDS = ("conv", "bn")
SPELLINGS = (
    (r"\.(conv|bn|linear)(?:\.\1)+(?=\.|$)", r".\1"),
    (r"^(blocks\.[^.]+)\.mobile_inverted_conv(?=\.)", r"\1.conv"),
)
"""Extracted networks name each layer once, and old ones the inside of a block in another way."""
ONCE_FOR_ALL: Any = {"spellings": SPELLINGS, "source": "mit-han-lab/once-for-all", "licence": "MIT"}
"""What all families of Once-for-All have in common."""
MOBILE: Any = {**ONCE_FOR_ALL, "shown": mobile_shown("width_mult")}
"""What its mobile families have in common."""
