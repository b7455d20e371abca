"""The inverted residual block and the search space that the mobile families share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.notation import upstream_config
from subnetact.operators import (
    Elastic,
    ElasticKernel,
    KernelConv2d,
    LayerSelect,
    SubnetNorm,
    WeightSlice,
)
from subnetact.space import (
    Axis,
    AxisValues,
    Slot,
    SubnetSpace,
    UsedWhen,
    make_divisible,
)
from subnetact.spec import Value

__all__ = ["MBConv", "MobileLayout", "MobileStage", "block_elastic", "rename"]

Activation: TypeAlias = Callable[[Tensor], Tensor]


class MBConv(nn.Module):
    """An inverted residual block: 1x1 expansion, depthwise convolution, squeeze-excitation, 1x1 projection.

    Args:
        in_: input channels.
        mid: channels of the depthwise convolution. If None, there is no expansion.
        out: output channels.
        kernels: kernel sizes of the depthwise convolution, ascending.
        stride: stride of the depthwise convolution.
        activation: activation after the expansion and after the depthwise convolution.
        bn: arguments of every BatchNorm.
        squeeze: channels of the squeeze-excitation. If None, there is none.
        residual: whether the input is added to the output.
        matrices: whether smaller kernels are made by learned matrices. If false, they are centre crops.
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
        residual: bool = False,
        matrices: bool = False,
    ) -> None:
        super().__init__()
        self.expand_conv = None if mid is None else nn.Conv2d(in_, mid, 1, bias=False)
        self.expand_bn = None if mid is None else nn.BatchNorm2d(mid, **bn)
        width = in_ if mid is None else mid
        self.depth_conv = KernelConv2d(width, kernels, stride, matrices and len(kernels) > 1)
        self.depth_bn = nn.BatchNorm2d(width, **bn)
        self.squeeze_reduce = None if squeeze is None else nn.Conv2d(width, squeeze, 1)
        self.squeeze_expand = None if squeeze is None else nn.Conv2d(squeeze, width, 1)
        self.project_conv = nn.Conv2d(width, out, 1, bias=False)
        self.project_bn = nn.BatchNorm2d(out, **bn)
        self.activation = activation
        self.residual = residual

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


@dataclass(frozen=True)
class MobileStage:
    """One elastic stage.

    Attributes:
        width: output channels.
        stride: stride of the first block.
        activation: activation in the blocks.
        squeeze: whether the blocks have squeeze-excitation.
        longest: largest number of blocks. If None, only the depth choices limit the number.
    """

    width: int
    stride: int
    activation: Activation
    squeeze: bool = False
    longest: int | None = None


@dataclass(frozen=True)
class MobileLayout:
    """What the choices of a mobile supernet mean in sizes: elastic stages after a fixed first block.

    Attributes:
        family: name of the search space.
        first: channels before the first elastic stage.
        stages: the elastic stages, in order.
        kernels: kernel size choices per block slot, ascending.
        expands: expansion ratio choices per block slot, ascending.
        depths: depth choices per stage, ascending.
        fixed_kernels: kernel size of every block slot. If None, kernels are an axis of the space.
        tied: the expansion ratio for every depth. If None, expansions are an axis of the space.
    """

    family: str
    first: int
    stages: tuple[MobileStage, ...]
    kernels: tuple[int, ...]
    expands: tuple[float, ...]
    depths: tuple[int, ...]
    fixed_kernels: tuple[int, ...] | None = None
    tied: Mapping[int, float] | None = None

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The stage and the position in the stage of every block slot, in order."""
        lengths = [min(self.depths[-1], stage.longest or self.depths[-1]) for stage in self.stages]
        return [(stage, position) for stage, length in enumerate(lengths) for position in range(length)]

    def width_before(self, index: int) -> int:
        """Return the input channels of a block slot."""
        stage, position = self.blocks[index]
        return self.stages[stage].width if position else self.stages[stage - 1].width if stage else self.first

    def sizes(self, values: AxisValues) -> dict[str, int]:
        """Return the size of every dimension for the values of the axes."""
        sizes: dict[str, int] = {}
        for i, (stage, position) in enumerate(self.blocks):
            depth: Any = values["depth"][stage]
            kept = position < depth
            ratio: Any = (self.tied[depth] if kept else None) if self.tied else values["expand"][i]
            kernel: Any = self.fixed_kernels[i] if self.fixed_kernels else values["kernel"][i]
            mid = 0 if ratio is None else make_divisible(round(self.width_before(i) * ratio))
            sizes[f"block{i}.keep"] = int(kept)
            sizes[f"block{i}.mid"] = mid
            sizes[f"block{i}.squeeze"] = make_divisible(mid // 4) if mid else 0
            sizes[f"block{i}.kernel"] = kernel if kept and kernel else 0
        return sizes

    def space(self) -> SubnetSpace:
        """Return the search space, which reads and writes upstream's `{"ks", "e", "d"}`.

        `ks` and `e` have one value per block slot, `d` one per stage.
        """
        depth_slots = []
        for s, limits in enumerate(self.stages):
            legal = tuple(d for d in self.depths if d <= (limits.longest or d)) or (limits.longest or 1,)
            clipped: dict[Value, Value] = {d: legal[-1] for d in self.depths if d > legal[-1]}
            depth_slots.append(Slot(f"stage{s + 1}", legal, aliases=clipped))
        axes = [Axis("depth", tuple(depth_slots))]
        free = {"kernel": None if self.fixed_kernels else self.kernels, "expand": self.expands}
        for name, legal_values in free.items():
            if legal_values is None or (name == "expand" and self.tied):
                continue
            slots = []
            for i, (stage, position) in enumerate(self.blocks):
                keeping = tuple(d for d in depth_slots[stage].choices if d > position)  # type: ignore[operator]
                always = keeping == depth_slots[stage].choices
                when = None if always else UsedWhen("depth", stage, keeping)
                slots.append(Slot(f"block{i}", legal_values, when))
            axes.append(Axis(name, tuple(slots)))
        return SubnetSpace(self.family, axes, self.sizes, self.parse, self.format)

    def parse(self, config: Any) -> dict[str, Any]:
        """Return the values of the axes for an upstream configuration; a scalar counts for every slot.

        Raises:
            SpecError: a key is missing or unknown.
        """
        given = upstream_config(self.family, config, ("ks", "e", "d"))
        return {"kernel": given["ks"], "expand": given["e"], "depth": given["d"]}

    def format(self, values: AxisValues) -> dict[str, Any]:
        """Return the values of the axes as an upstream configuration."""
        names = {"ks": "kernel", "e": "expand", "d": "depth"}
        return {short: list(values[name]) for short, name in names.items()}

    def network_blocks(self, bn: Mapping[str, Any], matrices: bool) -> list[MBConv]:
        """Return the elastic blocks at full size, in order.

        Args:
            bn: arguments of every BatchNorm.
            matrices: whether smaller kernels are made by learned matrices.
        """
        blocks = []
        widest = self.expands[-1]
        for i, (stage, position) in enumerate(self.blocks):
            in_, out = self.width_before(i), self.stages[stage]
            mid = make_divisible(round(in_ * widest))
            stride = out.stride if position == 0 else 1
            blocks.append(
                MBConv(
                    in_,
                    mid,
                    out.width,
                    self.kernels,
                    stride,
                    out.activation,
                    bn,
                    make_divisible(mid // 4) if out.squeeze else None,
                    stride == 1 and in_ == out.width,
                    matrices,
                )
            )
        return blocks

    def elastic(self) -> dict[str, Elastic]:
        """Return the elastic description of the network's `blocks`, whose first block is fixed."""
        names = {str(i + 1): f"block{i}.keep" for i in range(len(self.blocks))}
        elastic = {"blocks": LayerSelect.on(**names)}
        for i, (stage, _) in enumerate(self.blocks):
            elastic.update(block_elastic(f"blocks.{i + 1}", f"block{i}", self.stages[stage].squeeze))
        return elastic


def block_elastic(path: str, block: str, squeeze: bool) -> dict[str, Elastic]:
    """Return the elastic description of an MBConv whose input and output channels are fixed.

    Args:
        path: path of the block in the network.
        block: prefix of the block's dimensions in the space.
        squeeze: whether the block has squeeze-excitation.
    """
    mid, squeezed = f"{block}.mid", f"{block}.squeeze"
    elastic = {
        "expand_conv": WeightSlice.on(out=mid),
        "expand_bn": SubnetNorm.on(channels=mid),
        "depth_conv": ElasticKernel.on(channels=mid, kernel=f"{block}.kernel"),
        "depth_bn": SubnetNorm.on(channels=mid),
        "project_conv": WeightSlice.on(in_=mid),
    }
    if squeeze:
        elastic["squeeze_reduce"] = WeightSlice.on(in_=mid, out=squeezed)
        elastic["squeeze_expand"] = WeightSlice.on(in_=squeezed, out=mid)
    return {f"{path}.{name}": entry for name, entry in elastic.items()}


_PARTS = {"inverted_bottleneck": "expand", "depth_conv": "depth", "point_linear": "project"}
_LAYERS = {"first_conv": "first", "final_expand_layer": "final", "feature_mix_layer": "mix"}


def rename(key: str) -> str:
    """Return the plain network's name for a name in an upstream network (dynamic, extracted, old)."""
    key = re.sub(r"^(blocks\.\d+)\.(?:mobile_inverted_conv|conv)\.", r"\1.", key)
    key = re.sub(r"\.(conv|bn|linear)(?:\.\1)+\.", r".\1.", key)
    for theirs, ours in _PARTS.items():
        key = re.sub(rf"^(blocks\.\d+)\.{theirs}\.(conv|bn)\.", rf"\1.{ours}_\2.", key)
    key = re.sub(r"^(blocks\.\d+)\.depth_conv\.se\.fc\.(reduce|expand)\.", r"\1.squeeze_\2.", key)
    for theirs, ours in _LAYERS.items():
        key = re.sub(rf"^{theirs}\.(conv|bn)\.", rf"{ours}_\1.", key)
    return key.replace("classifier.linear.", "classifier.")
