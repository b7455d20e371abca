"""OFA-ResNet50: a ResNet-50D of elastic depth, width and expansion.

Source: Once-for-All (Cai et al., ICLR 2020); mit-han-lab/once-for-all,
ofa/imagenet_classification/elastic_nn/networks/ofa_resnets.py.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import Family, Keys
from ofa_adapters.features import ARCH_ENCODER_SIZES, resnet_features
from ofa_adapters.notation import choices, upstream_config
from subnetact.errors import IllegalChoice
from subnetact.operators import (
    Elastic,
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

STAGE_WIDTHS = (256, 512, 1024, 2048)
STAGE_STRIDES = (1, 2, 2, 2)
BASE_DEPTHS = (2, 2, 4, 2)
STEM_WIDTH = 64


class ConvBnRelu(nn.Module):
    """3x3 convolution, BatchNorm and ReLU.

    Args:
        in_: input channels.
        out: output channels.
        stride: stride of the convolution.
        bn: arguments of the BatchNorm.
        residual: whether the input is added to the output.
    """

    def __init__(self, in_: int, out: int, stride: int, bn: Mapping[str, float], residual: bool = False):
        super().__init__()
        self.conv = nn.Conv2d(in_, out, 3, stride, 1, bias=False)
        self.bn = nn.BatchNorm2d(out, **bn)  # type: ignore[arg-type]
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_, H, W) to (N, out, H / stride, W / stride)."""
        y = F.relu(self.bn(self.conv(x)))
        return x + y if self.residual else y


class Bottleneck(nn.Module):
    """A bottleneck of 1x1, 3x3 and 1x1 convolutions with a residual connection.

    Args:
        in_: input channels.
        mid: channels of the 3x3 convolution.
        out: output channels.
        stride: stride of the first block of a stage, whose shortcut is average pooling and a 1x1 convolution.
            If None, the shortcut is the identity.
        bn: arguments of every BatchNorm.
    """

    def __init__(self, in_: int, mid: int, out: int, stride: int | None, bn: Mapping[str, float]):
        super().__init__()
        self.conv1 = nn.Conv2d(in_, mid, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(mid, **bn)  # type: ignore[arg-type]
        self.conv2 = nn.Conv2d(mid, mid, 3, stride or 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(mid, **bn)  # type: ignore[arg-type]
        self.conv3 = nn.Conv2d(mid, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out, **bn)  # type: ignore[arg-type]
        self.downsample = None
        if stride is not None:
            pool = nn.AvgPool2d(stride, stride, ceil_mode=True)
            conv = nn.Conv2d(in_, out, 1, bias=False)
            norm = nn.BatchNorm2d(out, **bn)  # type: ignore[arg-type]
            self.downsample = nn.Sequential(OrderedDict(pool=pool, conv=conv, bn=norm))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_, H, W) to (N, out, H / stride, W / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)) + shortcut)


class ResNet50D(nn.Module):
    """The full network: stem, four stages of bottlenecks, global average pooling, linear classifier."""

    def __init__(self, stem: nn.Sequential, blocks: nn.Sequential, classifier: nn.Linear, dropout: float):
        super().__init__()
        self.input_stem = stem
        self.max_pooling = nn.MaxPool2d(3, 2, 1)
        self.blocks = blocks
        self.dropout = nn.Dropout(float(dropout))
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, n_classes)."""
        x = self.blocks(self.max_pooling(self.input_stem(x)))
        return self.classifier(self.dropout(x.mean(3).mean(2)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ResNet50Layout:
    """What the choices of an OFA-ResNet50 supernet mean in sizes.

    Attributes:
        depths: numbers of additional blocks per stage, ascending.
        expands: ratios of middle to output channels per block, ascending.
        widths: width multipliers of the stem and of every stage, ascending.
    """

    depths: tuple[int, ...]
    expands: tuple[float, ...]
    widths: tuple[float, ...]

    @property
    def blocks(self) -> list[tuple[int, int, int]]:
        """The stage, the position in the stage, and the smallest depth that keeps it, for every block."""
        extra = self.depths[-1]
        return [
            (stage, position, position - base + 1)
            for stage, base in enumerate(BASE_DEPTHS)
            for position in range(base + extra)
        ]

    def stem(self, multipliers: Sequence[Any]) -> tuple[int, int]:
        """Return the stem's middle and output channels.

        Args:
            multipliers: width multipliers, of which the first two are the stem's.
        """
        mid = make_divisible(make_divisible(STEM_WIDTH * multipliers[0]) // 2)
        return mid, make_divisible(STEM_WIDTH * multipliers[1])

    def sizes(self, values: AxisValues) -> dict[str, int]:
        """Return the size of every dimension for the values of the axes."""
        depth, expand, width = (values[axis] for axis in ("depth", "expand", "width"))
        mid, out = self.stem(width)
        stages = [make_divisible(base * w) for base, w in zip(STAGE_WIDTHS, width[2:], strict=True)]
        sizes = {"stem.mid": mid, "stem.out": out, "stem.keep": int(depth[0] == self.depths[-1])}
        sizes.update({f"stage{stage + 1}": out for stage, out in enumerate(stages)})
        for i, (stage, _, needed) in enumerate(self.blocks):
            ratio = expand[i]
            sizes[f"block{i}.mid"] = 0 if ratio is None else make_divisible(round(stages[stage] * ratio))
            sizes[f"block{i}.keep"] = int(depth[1 + stage] >= needed)
        return sizes

    def axes(self) -> tuple[Axis, Axis, Axis]:
        """Return the axes `depth`, `expand` and `width`."""
        ends = tuple(dict.fromkeys((self.depths[0], self.depths[-1])))
        skipping: dict[Value, Value] = dict.fromkeys(self.depths[1:-1], ends[0])
        stages = [Slot(f"stage{s + 1}", self.depths) for s in range(len(STAGE_WIDTHS))]
        expand = []
        for i, (stage, _, needed) in enumerate(self.blocks):
            keeping = tuple(depth for depth in self.depths if depth >= needed)
            always = keeping == self.depths
            when = None if always else UsedWhen("depth", 1 + stage, keeping)
            expand.append(Slot(f"block{i}", self.expands, when))
        slots = ["stem.mid", "stem.out", *(slot.name for slot in stages)]
        return (
            Axis("depth", (Slot("stem", ends, aliases=skipping), *stages)),
            Axis("expand", tuple(expand)),
            Axis.uniform("width", slots, self.widths),
        )

    def parse(self, config: Any) -> dict[str, Any]:
        """Return the values of the axes for an upstream configuration.

        Args:
            config: upstream's `{"d", "e", "w"}`, whose `w` has indices into the width multipliers. A scalar
                counts for every slot.

        Returns:
            The values of every axis.

        Raises:
            SpecError: a key is missing or unknown.
            IllegalChoice: an entry of `w` is not such an index.
        """
        given = upstream_config("ofa_resnet50", config, ("d", "e", "w"))
        w = given["w"]
        listed = isinstance(w, Sequence) and not isinstance(w, str)
        width = [self._width(index) for index in w] if listed else self._width(w)
        return {"depth": given["d"], "expand": given["e"], "width": width}

    def _width(self, index: Any) -> float:
        if isinstance(index, bool) or not hasattr(index, "__index__") or not 0 <= index < len(self.widths):
            raise IllegalChoice(
                f"ofa_resnet50: w: {index!r} is not an index into the width multipliers "
                f"{', '.join(map(str, self.widths))}; choose from 0..{len(self.widths) - 1}"
            )
        return float(self.widths[index])

    def format(self, values: AxisValues) -> dict[str, list[Any]]:
        """Return the values of the axes as an upstream configuration."""
        indices = [self.widths.index(w) for w in values["width"]]
        return {"d": list(values["depth"]), "e": list(values["expand"]), "w": indices}


def build(
    n_classes: int = 1000,
    bn_param: tuple[float, float] = (0.1, 1e-5),
    dropout_rate: float = 0,
    depth_list: int | Sequence[int] = (0, 1, 2),
    expand_ratio_list: float | Sequence[float] = (0.2, 0.25, 0.35),
    width_mult_list: float | Sequence[float] = (0.65, 0.8, 1.0),
) -> tuple[nn.Module, SubnetSpace, dict[str, Elastic]]:
    """Build the full network, its search space and its elastic description.

    The arguments are those of upstream's `OFAResNets`.

    Args:
        n_classes: number of classes.
        bn_param: momentum and eps of every BatchNorm.
        dropout_rate: dropout rate before the classifier.
        depth_list: numbers of additional blocks per stage.
        expand_ratio_list: ratios of middle to output channels per block.
        width_mult_list: width multipliers of the stem and of every stage.

    Returns:
        The plain network at full size, its search space, and its elastic description.

    Raises:
        SpecError: a list is empty, or contains something other than finite numbers >= 0.
    """
    layout = ResNet50Layout(choices(depth_list), choices(expand_ratio_list), choices(width_mult_list))
    space = SubnetSpace("ofa_resnet50", layout.axes(), layout.sizes, layout.parse, layout.format)
    full = dict(zip(space.dimensions, space.resolve(space.largest()), strict=True))
    bn = {"momentum": bn_param[0], "eps": bn_param[1]}
    mid, out = full["stem.mid"], full["stem.out"]
    stem = nn.Sequential(
        ConvBnRelu(3, mid, 2, bn), ConvBnRelu(mid, mid, 1, bn, residual=True), ConvBnRelu(mid, out, 1, bn)
    )
    blocks = []
    for i, (stage, position, _) in enumerate(layout.blocks):
        width = full[f"stage{stage + 1}"]
        stride = STAGE_STRIDES[stage] if position == 0 else None
        blocks.append(Bottleneck(out, full[f"block{i}.mid"], width, stride, bn))
        out = width
    classifier = nn.Linear(out, n_classes)
    return ResNet50D(stem, nn.Sequential(*blocks), classifier, dropout_rate), space, _elastic(layout)


def _elastic(layout: ResNet50Layout) -> dict[str, Elastic]:
    elastic = {
        "input_stem": LayerSelect.on(**{"1": "stem.keep"}),
        "blocks": LayerSelect.on(**{str(i): f"block{i}.keep" for i in range(len(layout.blocks))}),
        "classifier": WeightSlice.on(in_="stage4"),
    }
    for i, (in_, out) in enumerate(((None, "stem.mid"), ("stem.mid", "stem.mid"), ("stem.mid", "stem.out"))):
        follows = {"out": out} if in_ is None else {"in_": in_, "out": out}
        elastic[f"input_stem.{i}.conv"] = WeightSlice.on(**follows)
        elastic[f"input_stem.{i}.bn"] = SubnetNorm.on(channels=out)
    before = "stem.out"
    for i, (stage, position, _) in enumerate(layout.blocks):
        mid, out = f"block{i}.mid", f"stage{stage + 1}"
        parts = [("conv1", "bn1", before, mid), ("conv2", "bn2", mid, mid), ("conv3", "bn3", mid, out)]
        if position == 0:
            parts.append(("downsample.conv", "downsample.bn", before, out))
        for conv, norm, in_, width in parts:
            elastic[f"blocks.{i}.{conv}"] = WeightSlice.on(in_=in_, out=width)
            elastic[f"blocks.{i}.{norm}"] = SubnetNorm.on(channels=width)
        before = out
    return elastic


def rename(key: str) -> str:
    """Return the plain network's name for a name in upstream's supernet or in a network extracted from it."""
    key = re.sub(r"\.(conv|bn|linear)(?:\.\1)+\.", r".\1.", key)
    key = re.sub(r"\.conv(\d)\.conv\.", r".conv\1.", key)
    key = re.sub(r"\.conv(\d)\.bn\.", r".bn\1.", key)
    return key.replace(".conv.bn.", ".bn.").replace("classifier.linear.", "classifier.")


def recognises(keys: Keys) -> bool:
    """Return whether the names are those of an OFA-ResNet50 or of a network extracted from one."""
    return keys.some(r"^input_stem\.")


FAMILY = Family(
    build,
    rename,
    source="mit-han-lab/once-for-all",
    licence="MIT",
    recognises=recognises,
    checkpoints=("ofa_resnet50_d0-1-2_e0.2-0.25-0.35_w0.65-0.8-1.0",),
    image_sizes=ARCH_ENCODER_SIZES,
    encodings={"arch_encoder": resnet_features},
)
