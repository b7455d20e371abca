"""Slimmable ResNet-50: a ResNet of a few widths, each with its own BatchNorms.

Source: Slimmable Neural Networks (Yu et al., ICLR 2019); JiahuiYu/slimmable_networks, models/s_resnet.py.
Upstream's code and checkpoints are licensed for non-commercial use (CC-BY-NC-4.0). This package contains
neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import CUMULATIVE_UNBIASED, Built, Family
from ofa_adapters.networks.slimmable_space import WidthLayout
from subnetact.errors import SpecError
from subnetact.operators import Elastic, ModuleSwitch, SwitchableModule, WeightSlice

STEM = 64
STAGES = (64, 128, 256, 512)
LENGTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


class SlimmableBottleneck(nn.Module):
    """A bottleneck of 1x1, 3x3 and 1x1 convolutions; its shortcut has a 1x1 convolution if the shape changes.

    Args:
        in_: input channels for every listed width.
        out: output channels for every listed width.
        stride: stride of the 3x3 convolution.
    """

    def __init__(self, in_: Sequence[int], out: Sequence[int], stride: int) -> None:
        super().__init__()
        mid = [width // 4 for width in out]
        self.conv1, self.norm1 = nn.Conv2d(max(in_), max(mid), 1, bias=False), _norms(mid)
        self.conv2 = nn.Conv2d(max(mid), max(mid), 3, stride, 1, bias=False)
        self.norm2 = _norms(mid)
        self.conv3, self.norm3 = nn.Conv2d(max(mid), max(out), 1, bias=False), _norms(out)
        self.shortcut_conv = self.shortcut_norm = None
        if stride != 1 or list(in_) != list(out):
            self.shortcut_conv = nn.Conv2d(max(in_), max(out), 1, stride, bias=False)
            self.shortcut_norm = _norms(out)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_, H, W) to (N, out, H / stride, W / stride)."""
        shortcut = x
        if self.shortcut_conv is not None and self.shortcut_norm is not None:
            shortcut = self.shortcut_norm(self.shortcut_conv(x))
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return F.relu(self.norm3(self.conv3(x)) + shortcut)


class SlimmableResNet(nn.Module):
    """The full network: 7x7 stem, four stages of bottlenecks, global average pooling, linear classifier."""

    def __init__(self, stem: Sequence[int], blocks: list[SlimmableBottleneck], width: int, classes: int):
        super().__init__()
        self.stem_conv = nn.Conv2d(3, max(stem), 7, 2, 3, bias=False)
        self.stem_norm = _norms(stem)
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, num_classes)."""
        x = F.max_pool2d(F.relu(self.stem_norm(self.stem_conv(x))), 3, 2, 1)
        return self.classifier(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]


def _norms(widths: Sequence[int]) -> SwitchableModule:
    return SwitchableModule(*map(nn.BatchNorm2d, widths), default=list(widths).index(max(widths)))


@dataclass(frozen=True)
class SlimmableResNetLayout(WidthLayout):
    """Stages of the given numbers of blocks."""

    lengths: tuple[int, ...]

    family = "slimmable_resnet50"

    @property
    def blocks(self) -> list[tuple[str, int, int]]:
        """The dimension of the input, the stage and the position in the stage of every block."""
        return [
            (f"stage{s}" if position else f"stage{s - 1}" if s else "stem", s, position)
            for s, length in enumerate(self.lengths)
            for position in range(length)
        ]

    def stride(self, stage: int, position: int) -> int:
        """Return the stride of a block."""
        return 2 if stage and position == 0 else 1

    def widths(self, multiplier: float) -> dict[str, int]:
        stages = [int(base * multiplier * 4) for base in STAGES]
        sizes = {"stem": int(STEM * multiplier), **{f"stage{s}": width for s, width in enumerate(stages)}}
        return sizes | {f"mid{s}": width // 4 for s, width in enumerate(stages)}

    def elastic(self) -> dict[str, Elastic]:
        convs: list[tuple[str, str, str | None, str]] = [("stem_conv", "stem_norm", None, "stem")]
        sizes = self.listed()
        for i, (before, s, position) in enumerate(self.blocks):
            path, out, mid = f"blocks.{i}", f"stage{s}", f"mid{s}"
            convs.append((f"{path}.conv1", f"{path}.norm1", before, mid))
            convs.append((f"{path}.conv2", f"{path}.norm2", mid, mid))
            convs.append((f"{path}.conv3", f"{path}.norm3", mid, out))
            if self.stride(s, position) != 1 or sizes[before] != sizes[out]:
                convs.append((f"{path}.shortcut_conv", f"{path}.shortcut_norm", before, out))
        elastic = {"classifier": WeightSlice.on(in_=f"stage{len(self.lengths) - 1}")}
        for conv, norm, in_, width in convs:
            elastic[conv] = WeightSlice.on(in_=in_, out=width)
            elastic[norm] = ModuleSwitch.on(choice="position")
        return elastic


def build(
    num_classes: int = 1000,
    input_size: int = 224,  # noqa: ARG001
    width_mult_list: Sequence[float] = (0.25, 0.5, 0.75, 1.0),
    depth: int = 50,
) -> Built:
    """Build the family with the arguments of upstream's `Model` and its flags.

    Args:
        num_classes: number of classes.
        input_size: ignored; the network takes any input size.
        width_mult_list: the trained width multipliers, in the order of the checkpoint's BatchNorms.
        depth: number of layers: 50, 101 or 152.
    """
    if depth not in LENGTHS:
        raise SpecError(f"slimmable_resnet50: depth {depth} is not known; choose from {sorted(LENGTHS)}")
    layout = SlimmableResNetLayout(tuple(width_mult_list), LENGTHS[depth])
    sizes = layout.listed()
    blocks = [
        SlimmableBottleneck(sizes[before], sizes[f"stage{s}"], layout.stride(s, position))
        for before, s, position in layout.blocks
    ]
    return layout.built(SlimmableResNet(sizes["stem"], blocks, max(sizes["stage3"]), num_classes))


_BODY = {"0": "conv1", "1": "norm1", "3": "conv2", "4": "norm2", "6": "conv3", "7": "norm3"}
_SHORTCUT = {"0": "shortcut_conv", "1": "shortcut_norm"}


def rename(key: str) -> str:
    """Return the plain network's name for a name in upstream's state_dict."""
    key = key.replace("classifier.0.", "classifier.").replace(".bn.", ".")
    key = re.sub(r"^features\.0\.0\.", "stem_conv.", key)
    key = re.sub(r"^features\.0\.1\.", "stem_norm.", key)
    for kind, names in (("body", _BODY), ("shortcut", _SHORTCUT)):
        found = re.match(rf"features\.(\d+)\.{kind}\.(\d+)\.(.*)", key)
        if found and found[2] in names:
            return f"blocks.{int(found[1]) - 1}.{names[found[2]]}.{found[3]}"
    return key


FAMILY = Family(
    build,
    rename,
    source="JiahuiYu/slimmable_networks",
    licence="CC-BY-NC-4.0",
    recognises=lambda keys: keys.some(r"^features\.1\.shortcut\.") and keys.some(r"\.bn\.0\.weight$"),
    checkpoints=("s_resnet50_0.25_0.5_0.75_1.0.pt",),
    calibration=CUMULATIVE_UNBIASED,
    listed_statistics=True,
)
