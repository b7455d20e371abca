"""The space of the slimmable families: one width multiplier out of a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ofa_adapters.notation import plain
from subnetact.errors import SpecError
from subnetact.space import (
    Axis,
    AxisValues,
    Slot,
    SubnetSpace,
)

__all__ = ["width_space"]


def width_space(family: str, multipliers: Sequence[float], sizes: Mapping[str, Sequence[int]]) -> SubnetSpace:
    """Return the space of a list of widths, in the notation `{"width_mult": 0.5}` or bare `0.5`.

    Args:
        family: the space's name.
        multipliers: in the order of the checkpoint.
        sizes: dimension -> its size for every multiplier; `position` is added, which counts from 1.

    Raises:
        ValueError: the multipliers are not distinct and positive.
    """
    listed = list(multipliers)
    if not listed or len(set(listed)) != len(listed) or min(listed) <= 0:
        raise SpecError(f"{family}: width multipliers are distinct and positive, got {listed}")

    layout = SlimmableLayout(family, tuple(listed), {name: tuple(widths) for name, widths in sizes.items()})
    axis = Axis("width", (Slot("network", tuple(sorted(listed))),))
    return SubnetSpace(family, [axis], layout.resolve, layout.parse, layout.format)


@dataclass(frozen=True)
class SlimmableLayout:
    family: str
    listed: tuple[float, ...]
    sizes: Mapping[str, tuple[int, ...]]

    def resolve(self, values: AxisValues) -> dict[str, int]:
        position = self.listed.index(values["width"][0])
        return {"position": position + 1, **{name: widths[position] for name, widths in self.sizes.items()}}

    def parse(self, config: Any) -> dict[str, Any]:
        if isinstance(config, Mapping) and set(config) != {"width_mult"}:
            got = sorted(map(str, config))
            raise SpecError(f"{self.family}: a configuration has exactly the key width_mult; got {got}")
        return {"width": plain(config["width_mult"] if isinstance(config, Mapping) else config)}

    def format(self, values: AxisValues) -> dict[str, Any]:
        return {"width_mult": values["width"][0]}
