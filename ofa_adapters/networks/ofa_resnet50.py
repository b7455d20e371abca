"""OFA-ResNet50: a ResNet-50D of elastic depth, width and expansion.

Source: Once-for-All (Cai et al., ICLR 2020); mit-han-lab/once-for-all,
ofa/imagenet_classification/elastic_nn/networks/ofa_resnets.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import Built, Family
from ofa_adapters.features import resnet_features
from ofa_adapters.layout import Layout, block_axis, choices, conv_norm, multiplier
from ofa_adapters.networks.mobile import KINDS, ONCE_FOR_ALL, conv_bn
from subnetact.errors import IllegalChoice
from subnetact.operators import Elastic, LayerSelect, WeightSlice
from subnetact.space import Axis, AxisValues, Slot, make_divisible

STAGE_WIDTHS = (256, 512, 1024, 2048)
STAGE_STRIDES = (1, 2, 2, 2)
BASE_DEPTHS = (2, 2, 4, 2)
STEM_WIDTH = 64


class ConvBnRelu(nn.Module):
    """3x3 convolution, BatchNorm and ReLU, with or without a residual connection."""

    def __init__(self, in_: int, out: int, stride: int, bn: Mapping[str, Any], residual: bool = False):
        super().__init__()
        self.conv, self.bn = conv_bn(in_, out, bn, 3, stride)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_, H, W) to (N, out, H / stride, W / stride)."""
        y = F.relu(self.bn(self.conv(x)))
        return x + y if self.residual else y


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3, 1x1; the first of a stage has a stride, which is pooling if `pooled`."""

    def __init__(
        self, in_: int, mid: int, out: int, stride: int | None, bn: Mapping[str, Any], pooled: bool = False
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv_bn(in_, mid, bn)
        self.conv2, self.bn2 = conv_bn(mid, mid, bn, 3, stride or 1)
        self.conv3, self.bn3 = conv_bn(mid, out, bn)
        self.downsample = None
        if stride is not None:
            parts: OrderedDict[str, nn.Module] = OrderedDict()
            if pooled:
                parts["pool"] = nn.AvgPool2d(stride, stride, ceil_mode=True)
            parts["conv"], parts["bn"] = conv_bn(in_, out, bn, stride=1 if pooled else stride)
            self.downsample = nn.Sequential(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_, H, W) to (N, out, H / stride, W / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)) + shortcut)


class ResNet(nn.Module):
    """The full network: stem, stages of bottlenecks, global average pooling, linear classifier."""

    def __init__(
        self, stem: nn.Sequential, blocks: Sequence[Bottleneck], width: int, n_classes: int, dropout: float
    ) -> None:
        super().__init__()
        self.input_stem = stem
        self.max_pooling = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(float(dropout))
        self.classifier = nn.Linear(width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, n_classes)."""
        x = self.blocks(self.max_pooling(self.input_stem(x)))
        return self.classifier(self.dropout(x.mean(3).mean(2)))  # type: ignore[no-any-return]


def bottleneck_elastic(block: str, before: str, mid: str, out: str, first: bool) -> dict[str, Elastic]:
    """Return the entries of a Bottleneck; `first` tells whether it is the first of its stage."""
    elastic: dict[str, Elastic] = {}
    for i, ends in enumerate(((before, mid), (mid, mid), (mid, out)), 1):
        elastic |= conv_norm(f"{block}.conv{i}", f"{block}.bn{i}", *ends)
    if first:
        elastic |= conv_norm(f"{block}.downsample.conv", f"{block}.downsample.bn", before, out)
    return elastic


@dataclass(frozen=True)
class ResNet50Layout(Layout):
    """The depths add blocks to every stage; the expansions are ratios of middle to output channels."""

    depths: tuple[int, ...]
    expands: tuple[float, ...]
    widths: tuple[float, ...]

    family = "ofa_resnet50"
    keys: ClassVar = {"d": "depth", "e": "expand", "w": "width"}
    ignored = ("image_size", "r")

    @property
    def blocks(self) -> list[tuple[int, int, int]]:
        """The stage, the position in the stage, and the smallest depth that keeps it, for every block."""
        return [
            (stage, position, position - base + 1)
            for stage, base in enumerate(BASE_DEPTHS)
            for position in range(base + self.depths[-1])
        ]

    def axes(self) -> list[Axis]:
        ends = tuple(dict.fromkeys((self.depths[0], self.depths[-1])))
        stem = Slot("stem", ends, aliases=dict.fromkeys(self.depths[1:-1], ends[0]))
        stages = [f"stage{s + 1}" for s in range(len(STAGE_WIDTHS))]
        depth = Axis("depth", (stem, *(Slot(name, self.depths) for name in stages)))
        places = [(1 + stage, needed) for stage, _, needed in self.blocks]
        width = Axis.uniform("width", ["stem.mid", "stem.out", *stages], self.widths)
        return [depth, block_axis("expand", self.expands, depth, places), width]

    def sizes(self, values: AxisValues) -> dict[str, int]:
        depth, expand, width = (values[axis] for axis in ("depth", "expand", "width"))
        stages = [make_divisible(base * w) for base, w in zip(STAGE_WIDTHS, width[2:], strict=True)]
        sizes = {
            "stem.mid": make_divisible(make_divisible(STEM_WIDTH * width[0]) // 2),
            "stem.out": make_divisible(STEM_WIDTH * width[1]),
            "stem.keep": int(depth[0] == self.depths[-1]),
        }
        sizes.update({f"stage{stage + 1}": out for stage, out in enumerate(stages)})
        for i, (stage, _, needed) in enumerate(self.blocks):
            ratio = expand[i]
            sizes[f"block{i}.mid"] = 0 if ratio is None else make_divisible(round(stages[stage] * ratio))
            sizes[f"block{i}.keep"] = int(depth[1 + stage] >= needed)
        return sizes

    def parse(self, config: Any) -> dict[str, Any]:
        """Return the values of the axes; upstream's `w` has indices into the width multipliers."""
        values = super().parse(config)
        w = values["width"]
        return {**values, "width": [self._width(i) for i in w] if isinstance(w, list) else self._width(w)}

    def _width(self, index: Any) -> float:
        if isinstance(index, bool) or not hasattr(index, "__index__") or not 0 <= index < len(self.widths):
            raise IllegalChoice(
                f"ofa_resnet50: w: {index!r} is not an index into the width multipliers "
                f"{', '.join(map(str, self.widths))}; choose from 0..{len(self.widths) - 1}"
            )
        return float(self.widths[index])

    def format(self, values: AxisValues) -> dict[str, Any]:
        return {**super().format(values), "w": [self.widths.index(w) for w in values["width"]]}

    def elastic(self) -> dict[str, Elastic]:
        mid, before = "stem.mid", "stem.out"
        elastic = {
            "input_stem": LayerSelect.on(**{"1": "stem.keep"}),
            "blocks": LayerSelect.on(**{str(i): f"block{i}.keep" for i in range(len(self.blocks))}),
            "classifier": WeightSlice.on(in_=f"stage{len(STAGE_WIDTHS)}"),
            **conv_norm("input_stem.0.conv", "input_stem.0.bn", None, mid),
            **conv_norm("input_stem.1.conv", "input_stem.1.bn", mid, mid),
            **conv_norm("input_stem.2.conv", "input_stem.2.bn", mid, before),
        }
        for i, (stage, position, _) in enumerate(self.blocks):
            out = f"stage{stage + 1}"
            elastic |= bottleneck_elastic(f"blocks.{i}", before, f"block{i}.mid", out, position == 0)
            before = out
        return elastic


def build(
    n_classes: int = 1000,
    bn_param: tuple[float, float] = (0.1, 1e-5),
    dropout_rate: float = 0,
    depth_list: int | Sequence[int] = (0, 1, 2),
    expand_ratio_list: float | Sequence[float] = (0.2, 0.25, 0.35),
    width_mult_list: float | Sequence[float] = (0.65, 0.8, 1.0),
) -> Built:
    """Build the family with the arguments of upstream's `OFAResNets`.

    Args:
        depth_list: numbers of additional blocks per stage.
        expand_ratio_list: ratios of middle to output channels per block.
        width_mult_list: width multipliers of the stem and of every stage.
    """
    layout = ResNet50Layout(choices(depth_list), choices(expand_ratio_list), choices(width_mult_list))
    full = layout.largest()
    bn = {"momentum": bn_param[0], "eps": bn_param[1]}
    mid, before = full["stem.mid"], full["stem.out"]
    stem = nn.Sequential(
        ConvBnRelu(3, mid, 2, bn), ConvBnRelu(mid, mid, 1, bn, residual=True), ConvBnRelu(mid, before, 1, bn)
    )
    blocks = []
    for i, (stage, position, _) in enumerate(layout.blocks):
        out = full[f"stage{stage + 1}"]
        stride = None if position else STAGE_STRIDES[stage]
        blocks.append(Bottleneck(before, full[f"block{i}.mid"], out, stride, bn, pooled=True))
        before = out
    return layout.built(ResNet(stem, blocks, before, n_classes, dropout_rate))


OUT, MID = "classifier.weight", r"blocks.\d+.conv1.weight"

FAMILY = Family(
    build,
    names=(
        *((f"input_stem.{i}.{kind}.{kind}", f"input_stem.{i}.{kind}") for i in (0, 2) for kind in KINDS),
        *((f"input_stem.1.conv.{kind}.{kind}", f"input_stem.1.{kind}") for kind in KINDS),
        *((f"blocks.#.conv{i}.{kind}.{kind}", f"blocks.#.{kind}{i}") for i in (1, 2, 3) for kind in KINDS),
        *((f"blocks.#.downsample.{kind}.{kind}", f"blocks.#.downsample.{kind}") for kind in KINDS),
        ("classifier.linear.linear", "classifier"),
    ),
    **ONCE_FOR_ALL,
    shown={
        "n_classes": lambda shapes, _: shapes.size(OUT),
        "depth_list": lambda shapes, _: (shapes.layers("blocks") - sum(BASE_DEPTHS)) // len(BASE_DEPTHS),
        "expand_ratio_list": lambda shapes, _: round(shapes.size(MID) / shapes.size(OUT, 1), 2),
        "width_mult_list": lambda shapes, _: multiplier(shapes.size(OUT, 1), STAGE_WIDTHS[-1]),
    },
    recognises=lambda keys: keys.have(r"^input_stem\.\d"),
    checkpoints=("ofa_resnet50_d0-1-2_e0.2-0.25-0.35_w0.65-0.8-1.0",),
    encodings={"arch_encoder": resnet_features},
)
