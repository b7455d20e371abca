"""Universally slimmable MobileNetV2: BatchNorms have one weight and bias, and statistics per width.

Source: Universally Slimmable Networks (Yu and Huang, ICCV 2019); JiahuiYu/slimmable_networks,
models/us_mobilenet_v2.py.
Upstream is licensed for non-commercial use (CC-BY-NC-4.0). This package has neither its code nor its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from ofa_adapters.family import CUMULATIVE_UNBIASED, Built, Family
from ofa_adapters.layout import conv_norm, multiplier
from ofa_adapters.networks.mobile import MBConv, MobileNet, mbconv_elastic
from ofa_adapters.networks.slimmable_resnet50 import WidthLayout, listed
from subnetact.errors import SpecError
from subnetact.operators import Elastic, PerWidthBatchNorm2d, PerWidthNorm, WeightSlice
from subnetact.space import make_divisible

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


@dataclass(frozen=True)
class SlimmableMobileNetLayout(WidthLayout):
    """Multipliers relative to the full network, which is `top` times as wide as a MobileNetV2."""

    top: float

    family = "us_mobilenet_v2"

    @property
    def blocks(self) -> list[tuple[str, int, int, int]]:
        """The dimension of the input, the expansion, the width in a MobileNetV2 and the stride of blocks."""
        found: list[tuple[str, int, int, int]] = []
        for expansion, base, length, stride in STAGES:
            for position in range(length):
                before = f"block{len(found) - 1}.out" if found else "stem"
                found.append((before, expansion, base, 1 if position else stride))
        return found

    def widths(self, multiplier: float) -> dict[str, int]:
        in_, sizes = STEM, {"stem": self._width(multiplier, STEM)}
        for i, (_, expansion, base, _) in enumerate(self.blocks):
            sizes[f"block{i}.mid"] = self._width(multiplier, in_, expansion)
            sizes[f"block{i}.out"] = self._width(multiplier, base)
            in_ = base
        return sizes

    def _width(self, multiplier: float, base: int, ratio: int = 1) -> int:
        full = make_divisible(base * self.top, minimum=1) * ratio
        width = make_divisible(full * multiplier / ratio, minimum=1) * ratio
        if width > full:
            raise SpecError(
                f"us_mobilenet_v2: a width of {multiplier} rounds {full} channels up to {width}; list larger "
                "widths or build a wider network"
            )
        return width

    def elastic(self) -> dict[str, Elastic]:
        elastic = conv_norm("first_conv", "first_bn", None, "stem")
        for i, (before, *_) in enumerate(self.blocks):
            out = f"block{i}.out"
            elastic |= mbconv_elastic(f"blocks.{i}", f"block{i}", before, out, kernel=False)
            elastic["mix_conv"] = WeightSlice.on(in_=out)
        return elastic

    def norm(self, channels: str, full: int, widths: Sequence[int]) -> tuple[nn.Module, Elastic]:
        return PerWidthBatchNorm2d(full, widths), PerWidthNorm.on(channels=channels, position="position")


PUBLISHED_WIDTHS = tuple(round(0.35 + 0.025 * i, 3) for i in range(27))
"""The width multipliers whose statistics are in the published checkpoint: 0.35 to 1.0 in steps of 0.025."""


def build(
    num_classes: int = 1000,
    input_size: int = 224,  # noqa: ARG001
    width_mult_list: Sequence[float] = PUBLISHED_WIDTHS,
    width_mult_range: Sequence[float] = (0.35, 1.0),
) -> Built:
    """Build the family with the arguments of upstream's `Model` and its flags.

    Args:
        width_mult_list: the width multipliers, relative to the full network, in the order of the checkpoint's
            statistics.
        width_mult_range: the trained range of widths; its last entry is the multiplier of the full network.
    """
    if max(width_mult_list, default=0) > 1:
        raise SpecError(
            f"us_mobilenet_v2: widths are relative to the largest, at most 1, got {width_mult_list}"
        )
    layout = SlimmableMobileNetLayout(tuple(width_mult_list), width_mult_range[-1])
    full, blocks = layout.widths(1), []
    for i, (before, expansion, _, stride) in enumerate(layout.blocks):
        in_, out = full[before], full[f"block{i}.out"]
        mid = None if expansion == 1 else full[f"block{i}.mid"]
        blocks.append(MBConv(in_, mid, out, (3,), stride, F.relu6, {}))
    tail = make_divisible(TAIL * max(layout.top, 1), minimum=1)  # The same at every width.
    widths = (full["stem"], full[f"block{len(blocks) - 1}.out"], tail)
    return layout.built(MobileNet(blocks, widths, None, (F.relu6, F.relu6), num_classes, {}))


LAST = "features.17.body.7"
"""Upstream's name of the last BatchNorm that is slimmable."""


PARTS = ("expand_conv", "expand_bn", "depth_conv", "depth_bn", "project_conv", "project_bn")

FAMILY = Family(
    build,
    names=(
        ("features.0.0", "first_conv"),
        ("features.0.1", "first_bn"),
        # The first block has no expansion.
        *((f"features.1.body.{i}", f"blocks.0.{part}") for i, part in zip("0134", PARTS[2:], strict=True)),
        *((f"features.#+1.body.{i}", f"blocks.#.{part}") for i, part in zip("013467", PARTS, strict=True)),
        ("features.18.0", "mix_conv"),
        ("features.18.1", "mix_bn"),
        ("classifier.0", "classifier"),
        *((f".bn.#.{what}", f".{what}_#") for what in ("running_mean", "running_var", "num_batches_tracked")),
    ),
    source="JiahuiYu/slimmable_networks",
    licence="CC-BY-NC-4.0",
    recognises=lambda keys: (
        keys.have(r"^features\.\d+\.body\.1\.bn\.0\.running_mean$") and not keys.have(r"\.bn\.0\.weight$")
    ),
    checkpoints=("us_mobilenet_v2_calibrated.pt",),
    shown={
        "num_classes": lambda shapes, _: shapes.size("classifier.weight"),
        "width_mult_list": lambda shapes, _: listed(
            shapes, f"{LAST}.bn", "running_mean", shapes.size(f"{LAST}.weight")
        ),
        "width_mult_range": lambda shapes, _: [
            multiplier(shapes.size(f"{LAST}.{end}"), STAGES[-1][1]) for end in ("bn.0.running_mean", "weight")
        ],
    },
    calibration=CUMULATIVE_UNBIASED,
    listed_statistics=True,
)
