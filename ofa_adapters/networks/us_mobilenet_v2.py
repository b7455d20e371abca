"""Universally slimmable MobileNetV2: BatchNorms have one weight and bias, and statistics per width.

Source: Universally Slimmable Networks (Yu and Huang, ICCV 2019); JiahuiYu/slimmable_networks,
models/us_mobilenet_v2.py.
Upstream's code and checkpoints are licensed for non-commercial use (CC-BY-NC-4.0). This package contains
neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import CUMULATIVE_UNBIASED, Family, Keys
from ofa_adapters.networks.slimmable_space import width_space
from subnetact.errors import SpecError
from subnetact.operators import (
    Elastic,
    PerWidthBatchNorm2d,
    PerWidthNorm,
    WeightSlice,
)
from subnetact.space import SubnetSpace, make_divisible

STEM = 32
TAIL = 1280
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, width, number of blocks and stride of every stage of MobileNetV2."""


class InvertedResidual(nn.Module):
    """1x1 expansion, depthwise 3x3 convolution, 1x1 projection; a residual connection if the shape stays.

    Args:
        mid: channels of the depthwise convolution for every listed width.
        out: output channels for every listed width.
        full: input, middle and output channels of the full network.
        stride: stride of the depthwise convolution.
        expand: whether the block has an expansion.
    """

    def __init__(
        self,
        mid: Sequence[int],
        out: Sequence[int],
        full: tuple[int, int, int],
        stride: int,
        expand: bool,
    ) -> None:
        super().__init__()
        full_in, full_mid, full_out = full
        self.expand_conv = nn.Conv2d(full_in, full_mid, 1, bias=False) if expand else None
        self.expand_norm = PerWidthBatchNorm2d(full_mid, mid) if expand else None
        self.depth_conv = nn.Conv2d(full_mid, full_mid, 3, stride, 1, groups=full_mid, bias=False)
        self.depth_norm = PerWidthBatchNorm2d(full_mid, mid)
        self.project_conv = nn.Conv2d(full_mid, full_out, 1, bias=False)
        self.project_norm = PerWidthBatchNorm2d(full_out, out)
        self.residual = stride == 1 and full_in == full_out

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_, H, W) to (N, out, H / stride, W / stride)."""
        y = x
        if self.expand_conv is not None and self.expand_norm is not None:
            y = F.relu6(self.expand_norm(self.expand_conv(y)))
        y = F.relu6(self.depth_norm(self.depth_conv(y)))
        y = self.project_norm(self.project_conv(y))
        return x + y if self.residual else y  # type: ignore[no-any-return]


class SlimmableMobileNetV2(nn.Module):
    """The full network: stem, inverted residual blocks, a 1x1 convolution, pooling, linear classifier.

    The last convolution has the same output channels and BatchNorm at every width.
    """

    def __init__(
        self,
        stem: Sequence[int],
        full_stem: int,
        blocks: Sequence[InvertedResidual],
        widths: tuple[int, int],
        classes: int,
    ) -> None:
        super().__init__()
        self.stem_conv = nn.Conv2d(3, full_stem, 3, 2, 1, bias=False)
        self.stem_norm = PerWidthBatchNorm2d(full_stem, stem)
        self.blocks = nn.Sequential(*blocks)
        last, tail = widths
        self.tail_conv = nn.Conv2d(last, tail, 1, bias=False)
        self.tail_bn = nn.BatchNorm2d(tail)
        self.classifier = nn.Linear(tail, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, num_classes)."""
        x = self.blocks(F.relu6(self.stem_norm(self.stem_conv(x))))
        x = F.relu6(self.tail_bn(self.tail_conv(x))).mean((2, 3))
        return self.classifier(x)  # type: ignore[no-any-return]


PUBLISHED_WIDTHS = tuple(round(0.35 + 0.025 * i, 3) for i in range(27))
"""The width multipliers whose statistics are in the published checkpoint: 0.35 to 1.0 in steps of 0.025."""


def build(
    num_classes: int = 1000,
    input_size: int = 224,  # noqa: ARG001
    width_mult_list: Sequence[float] = PUBLISHED_WIDTHS,
    width_mult_range: Sequence[float] = (0.35, 1.0),
) -> tuple[nn.Module, SubnetSpace, dict[str, Elastic]]:
    """Build the full network, its search space and its elastic description.

    The arguments are those of upstream's `Model` and its flags.

    Args:
        num_classes: number of classes.
        input_size: ignored; the network takes any input size.
        width_mult_list: the width multipliers, relative to the full network, in the order of the checkpoint's
            statistics.
        width_mult_range: the trained range of widths; its last entry is the multiplier of the full network.

    Returns:
        The plain network at full size, its search space, and its elastic description.

    Raises:
        SpecError: the width multipliers are not distinct, positive and at most 1, or one of them rounds up to
            more channels than the full network has.
    """
    top = width_mult_range[-1]
    if max(width_mult_list, default=0) > 1:
        raise SpecError(
            f"us_mobilenet_v2: widths are relative to the largest, at most 1, got {width_mult_list}"
        )
    sizes: dict[str, list[int]] = {}

    def dimension(name: str, full: int, ratio: int = 1) -> list[int]:
        widths = [make_divisible(full * w / ratio, minimum=1) * ratio for w in width_mult_list]
        if max(widths) > full:
            raise SpecError(
                f"us_mobilenet_v2: a width of {width_mult_list[widths.index(max(widths))]} rounds {full} "
                f"channels up to {max(widths)}; list larger widths or build a wider network"
            )
        sizes[name] = widths
        return widths

    full_in = full_stem = make_divisible(STEM * top, minimum=1)
    stem = dimension("stem", full_in)
    elastic = {
        "stem_conv": WeightSlice.on(out="stem"),
        "stem_norm": PerWidthNorm.on(channels="stem", position="position"),
    }
    blocks: list[InvertedResidual] = []
    before = "stem"
    for expansion, base, length, stride in STAGES:
        full_out = make_divisible(base * top, minimum=1)
        for position in range(length):
            i, full_mid = len(blocks), full_in * expansion
            mid, out = f"block{i}.mid", f"block{i}.out"
            mids, outs = dimension(mid, full_mid, expansion), dimension(out, full_out)
            full = (full_in, full_mid, full_out)
            blocks.append(InvertedResidual(mids, outs, full, 1 if position else stride, expansion != 1))
            parts = {
                "depth_conv": WeightSlice.on(out=mid),
                "depth_norm": PerWidthNorm.on(channels=mid, position="position"),
                "project_conv": WeightSlice.on(in_=mid, out=out),
                "project_norm": PerWidthNorm.on(channels=out, position="position"),
            }
            if expansion != 1:
                parts["expand_conv"] = WeightSlice.on(in_=before, out=mid)
                parts["expand_norm"] = PerWidthNorm.on(channels=mid, position="position")
            elastic.update({f"blocks.{i}.{name}": entry for name, entry in parts.items()})
            before, full_in = out, full_out
    elastic["tail_conv"] = WeightSlice.on(in_=before)
    tail = make_divisible(TAIL * top, minimum=1) if top > 1 else TAIL
    network = SlimmableMobileNetV2(stem, full_stem, blocks, (full_in, tail), num_classes)
    return network, width_space("us_mobilenet_v2", width_mult_list, sizes), elastic


_PARTS = ("expand_conv", "expand_norm", "depth_conv", "depth_norm", "project_conv", "project_norm")
_INDICES = ("0", "1", "3", "4", "6", "7")
_BODY = dict(zip(_INDICES, _PARTS, strict=True))
_FIRST_BODY = dict(zip(_INDICES[:4], _PARTS[2:], strict=True))
_LAYERS = {"0.0.": "stem_conv.", "0.1.": "stem_norm.", "18.0.": "tail_conv.", "18.1.": "tail_bn."}


def rename(key: str) -> str:
    """Return the plain network's name for a name in upstream's state_dict."""
    key = key.replace("classifier.0.", "classifier.")
    key = re.sub(r"\.bn\.(\d+)\.(running_mean|running_var|num_batches_tracked)$", r".\2_\1", key)
    rest = key.removeprefix("features.")
    for theirs, ours in _LAYERS.items():
        if rest != key and rest.startswith(theirs):
            return ours + rest.removeprefix(theirs)
    found = re.match(r"features\.(\d+)\.body\.(\d+)\.(.*)", key)
    names = _FIRST_BODY if found and found[1] == "1" else _BODY
    if found and found[2] in names:
        return f"blocks.{int(found[1]) - 1}.{names[found[2]]}.{found[3]}"
    return key


def recognises(keys: Keys) -> bool:
    """Return whether the names are those of a US-MobileNetV2, whose norms have one weight for all widths."""
    return keys.some(r"^features\.\d+\.body\.1\.bn\.0\.running_mean$") and not keys.some(r"\.bn\.0\.weight$")


FAMILY = Family(
    build,
    rename,
    source="JiahuiYu/slimmable_networks",
    licence="CC-BY-NC-4.0",
    recognises=recognises,
    checkpoints=("us_mobilenet_v2_calibrated.pt",),
    calibration=CUMULATIVE_UNBIASED,
    listed_statistics=True,
)
