"""Slimmable ResNet-50: a ResNet of a few widths, each with its own BatchNorms.

Source: Slimmable Neural Networks (Yu et al., ICLR 2019); JiahuiYu/slimmable_networks, models/s_resnet.py.
Upstream is licensed for non-commercial use (CC-BY-NC-4.0). This package has neither its code nor its weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ofa_adapters.family import CUMULATIVE_UNBIASED, Built, Family, Shapes
from ofa_adapters.layout import Layout, conv_norm, multiplier
from ofa_adapters.networks.ofa_resnet50 import Bottleneck, ResNet, bottleneck_elastic
from subnetact.errors import SpecError
from subnetact.operators import Elastic, ModuleSwitch, SubnetNorm, SwitchableModule, WeightSlice
from subnetact.space import Axis, AxisValues, make_divisible

STEM = 64
STAGES = (64, 128, 256, 512)
STAGE_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks of every stage, by the number of layers of the network."""


@dataclass(frozen=True)
class WidthLayout(Layout):
    """Multipliers in the order of the checkpoint; the dimension `position` counts them from 1."""

    multipliers: tuple[float, ...]

    keys: ClassVar = {"width_mult": "width"}
    single = ("width_mult",)

    def __post_init__(self) -> None:
        listed = list(self.multipliers)
        if not listed or len(set(listed)) != len(listed) or min(listed) <= 0:
            raise SpecError(f"{self.family}: width multipliers are distinct and positive, got {listed}")

    def widths(self, multiplier: float) -> dict[str, int]:
        """Return the size of every other dimension."""
        raise NotImplementedError

    def norm(self, channels: str, full: int, widths: Sequence[int]) -> tuple[nn.Module, Elastic]:
        """Return a norm that knows all listed widths, and its entry, for a dimension of channels."""
        raise NotImplementedError

    def axes(self) -> list[Axis]:
        return [Axis.uniform("width", ["network"], sorted(self.multipliers))]

    def sizes(self, values: AxisValues) -> dict[str, int]:
        (multiplier,) = values["width"]
        return {"position": self.multipliers.index(multiplier) + 1, **self.widths(multiplier)}

    def built(self, network: nn.Module) -> Built:
        """Return what a family's `build` returns, for a full network with ordinary BatchNorms."""
        _, space, elastic = super().built(network)
        sizes = [self.widths(multiplier) for multiplier in self.multipliers]
        replaced: dict[str, Elastic] = {}
        for path, entry in elastic.items():
            if entry.operator is SubnetNorm:
                channels, plain = entry.dimensions()["channels"], network.get_submodule(path)
                widths = [row[channels] for row in sizes]
                norm, replaced[path] = self.norm(channels, plain.get_parameter("weight").numel(), widths)
                network.set_submodule(path, norm)
        return network, space, {**elastic, **replaced}


@dataclass(frozen=True)
class SlimmableResNetLayout(WidthLayout):
    """Stages of the given numbers of blocks; every width has BatchNorms of its own."""

    lengths: tuple[int, ...]

    family = "slimmable_resnet50"

    @property
    def blocks(self) -> list[tuple[str, int, bool]]:
        """For every block the dimension of its input, its stage, and whether it is the stage's first."""
        return [
            (f"stage{s}" if position else f"stage{s - 1}" if s else "stem", s, position == 0)
            for s, length in enumerate(self.lengths)
            for position in range(length)
        ]

    def widths(self, multiplier: float) -> dict[str, int]:
        stages = [int(base * multiplier * 4) for base in STAGES]
        sizes = {"stem": int(STEM * multiplier), **{f"stage{s}": width for s, width in enumerate(stages)}}
        return sizes | {f"mid{s}": width // 4 for s, width in enumerate(stages)}

    def elastic(self) -> dict[str, Elastic]:
        elastic = conv_norm("input_stem.conv", "input_stem.bn", None, "stem")
        for i, (before, s, first) in enumerate(self.blocks):
            elastic |= bottleneck_elastic(f"blocks.{i}", before, f"mid{s}", f"stage{s}", first)
        return {**elastic, "classifier": WeightSlice.on(in_=f"stage{len(STAGES) - 1}")}

    def norm(self, channels: str, full: int, widths: Sequence[int]) -> tuple[nn.Module, Elastic]:  # noqa: ARG002
        norms = SwitchableModule(*map(nn.BatchNorm2d, widths), default=widths.index(max(widths)))
        return norms, ModuleSwitch.on(choice="position")


def build(
    num_classes: int = 1000,
    input_size: int = 224,  # noqa: ARG001
    width_mult_list: Sequence[float] = (0.25, 0.5, 0.75, 1.0),
    depth: int = 50,
) -> Built:
    """Build the family with the arguments of upstream's `Model` and its flags.

    Args:
        width_mult_list: the trained width multipliers, in the order of the checkpoint's BatchNorms.
        depth: number of layers: 50, 101 or 152.
    """
    if depth not in STAGE_BLOCKS:
        raise SpecError(f"slimmable_resnet50: depth {depth} is not known; choose from {sorted(STAGE_BLOCKS)}")
    layout = SlimmableResNetLayout(tuple(width_mult_list), STAGE_BLOCKS[depth])
    full = layout.widths(max(width_mult_list))
    stem = OrderedDict[str, nn.Module](
        conv=nn.Conv2d(3, full["stem"], 7, 2, 3, bias=False), bn=nn.BatchNorm2d(full["stem"]), relu=nn.ReLU()
    )
    blocks = []
    for before, s, first in layout.blocks:
        stride = (2 if s else 1) if first else None
        blocks.append(Bottleneck(full[before], full[f"mid{s}"], full[f"stage{s}"], stride, {}))
    width = full[f"stage{len(STAGES) - 1}"]
    return layout.built(ResNet(nn.Sequential(stem), blocks, width, num_classes, dropout=0))


def listed(
    shapes: Shapes, norm: str, what: str, unit: int, width: Callable[[float], int] = make_divisible
) -> list[float]:
    """Return the multipliers of the BatchNorms that a checkpoint lists per width, `unit` wide at 1."""
    widths = [shapes.size(f"{norm}.{i}.{what}") for i in range(shapes.layers(norm))]
    return [multiplier(size, unit, width) for size in widths]


FAMILY = Family(
    build,
    names=(
        ("features.0.0", "input_stem.conv"),
        ("features.0.1.bn", "input_stem.bn"),
        *((f"features.#+1.body.{3 * i}", f"blocks.#.conv{i + 1}") for i in range(3)),
        *((f"features.#+1.body.{3 * i + 1}.bn", f"blocks.#.bn{i + 1}") for i in range(3)),
        ("features.#+1.shortcut.0", "blocks.#.downsample.conv"),
        ("features.#+1.shortcut.1.bn", "blocks.#.downsample.bn"),
        ("classifier.0", "classifier"),
    ),
    source="JiahuiYu/slimmable_networks",
    licence="CC-BY-NC-4.0",
    recognises=lambda keys: keys.have(r"^features\.1\.shortcut\.", r"\.bn\.0\.weight$"),
    checkpoints=("s_resnet50_0.25_0.5_0.75_1.0.pt",),
    shown={
        "num_classes": lambda shapes, _: shapes.size("classifier.weight"),
        "width_mult_list": lambda shapes, _: listed(
            shapes, f"features.{shapes.layers('blocks')}.body.7.bn", "weight", 4 * STAGES[-1], int
        ),
        "depth": lambda shapes, _: {sum(b): d for d, b in STAGE_BLOCKS.items()}.get(shapes.layers("blocks")),
    },
    calibration=CUMULATIVE_UNBIASED,
    listed_statistics=True,
)
