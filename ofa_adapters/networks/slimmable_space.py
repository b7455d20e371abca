"""The search space of the slimmable families: one width multiplier out of a list."""

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
    """Return the search space of a list of width multipliers.

    A configuration is `{"width_mult": 0.5}`, or the number alone.

    Args:
        family: name of the search space.
        multipliers: the width multipliers, in the order of the checkpoint.
        sizes: for every dimension, its size for each multiplier. The space adds the dimension `position`, the
            position of the multiplier in the list, which counts from 1.

    Returns:
        The search space.

    Raises:
        SpecError: the multipliers are not distinct and positive.
    """
    listed = list(multipliers)
    if not listed or len(set(listed)) != len(listed) or min(listed) <= 0:
        raise SpecError(f"{family}: width multipliers are distinct and positive, got {listed}")

    layout = SlimmableLayout(family, tuple(listed), {name: tuple(widths) for name, widths in sizes.items()})
    axis = Axis("width", (Slot("network", tuple(sorted(listed))),))
    return SubnetSpace(family, [axis], layout.resolve, layout.parse, layout.format)


@dataclass(frozen=True)
class SlimmableLayout:
    """What a width multiplier means in sizes.

    Attributes:
        family: name of the search space.
        listed: the width multipliers, in the order of the checkpoint.
        sizes: for every dimension, its size for each multiplier.
    """

    family: str
    listed: tuple[float, ...]
    sizes: Mapping[str, tuple[int, ...]]

    def resolve(self, values: AxisValues) -> dict[str, int]:
        """Return the size of every dimension for the values of the axes."""
        position = self.listed.index(values["width"][0])
        return {"position": position + 1, **{name: widths[position] for name, widths in self.sizes.items()}}

    def parse(self, config: Any) -> dict[str, Any]:
        """Return the values of the axes for a configuration.

        Raises:
            SpecError: a mapping has other keys than `width_mult`.
        """
        if isinstance(config, Mapping) and set(config) != {"width_mult"}:
            got = sorted(map(str, config))
            raise SpecError(f"{self.family}: a configuration has exactly the key width_mult; got {got}")
        return {"width": plain(config["width_mult"] if isinstance(config, Mapping) else config)}

    def format(self, values: AxisValues) -> dict[str, Any]:
        """Return the values of the axes as a configuration."""
        return {"width_mult": values["width"][0]}
