"""The layout of the slimmable families: one width multiplier out of a list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ofa_adapters.layout import Layout
from subnetact.errors import SpecError
from subnetact.space import Axis, AxisValues

__all__ = ["WidthLayout"]


@dataclass(frozen=True)
class WidthLayout(Layout):
    """Width multipliers in the order of the checkpoint; a family defines what one of them means.

    A configuration is `{"width_mult": 0.5}`, or the number alone. The dimension `position` is the position of
    the multiplier in the list, which counts from 1.
    """

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

    def listed(self) -> dict[str, list[int]]:
        """Return the sizes of every other dimension for all multipliers."""
        rows = [self.widths(multiplier) for multiplier in self.multipliers]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def axes(self) -> list[Axis]:
        return [Axis.uniform("width", ["network"], sorted(self.multipliers))]

    def sizes(self, values: AxisValues) -> dict[str, int]:
        (multiplier,) = values["width"]
        return {"position": self.multipliers.index(multiplier) + 1, **self.widths(multiplier)}
