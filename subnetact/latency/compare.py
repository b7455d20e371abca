"""Comparing two latency tables: is a profile reproducible, is one device faster than another?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from subnetact.latency.arrays import Floats

SHOWN = 10
"""The number of cells that a report lists."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `LatencyTable.compare`, over the subnets and batch sizes that both tables have.

    Attributes:
        subnets: the readable keys.
        batch_sizes: ascending.
        ratios: latency of the second table divided by that of the first, shape (subnets, batch sizes); NaN
            if one of them has none.
        statistic: the name of the compared statistic, or "latency".
        only_first: the number of cells that have a latency in the first table alone.
        only_second: the number of cells that have a latency in the second table alone.
        differing: the facts of the two stamps that differ, key -> (first, second).
    """

    subnets: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    ratios: Floats
    statistic: str
    only_first: int
    only_second: int
    differing: Mapping[str, tuple[Any, Any]]

    def within(self, tolerance_percent: float) -> bool:
        """Tell whether both tables have the same cells, and no latencies differ by more than a tolerance.

        Args:
            tolerance_percent: the largest difference that is allowed, percent of the faster latency.
        """
        return not self.outside(tolerance_percent) and not self.only_first and not self.only_second

    def outside(self, tolerance_percent: float) -> list[tuple[str, int, float]]:
        """Return (subnet, batch size, ratio) of the cells that differ by more than a tolerance, worst first.

        Args:
            tolerance_percent: the largest difference that is allowed, percent of the faster latency.
        """
        apart = _apart(self.ratios)
        cells = sorted(np.argwhere(apart > tolerance_percent), key=lambda cell: -apart[tuple(cell)])
        return [(self.subnets[i], self.batch_sizes[j], float(self.ratios[i, j])) for i, j in cells]

    def report(self, tolerance_percent: float) -> str:
        """Return lines of text: the median and worst ratio, cells that differ, and facts that differ.

        Args:
            tolerance_percent: cells that differ by more than this are listed, ten at most.
        """
        outside = self.outside(tolerance_percent)
        cells = int(np.isfinite(self.ratios).sum())
        key, size, worst = self.outside(-1.0)[0]
        median = float(np.nanmedian(self.ratios))
        lines = [
            f"{self.statistic} of {cells} cells ({len(self.subnets)} subnets, batch sizes "
            f"{', '.join(map(str, self.batch_sizes))}): median ratio {median:.4f}, worst {worst:.4f} "
            f"at batch size {size} of {key}",
            f"{len(outside)} of {cells} cells differ by more than {tolerance_percent:g} %; divided by the "
            f"median ratio, the most different cell is still {np.nanmax(_apart(self.ratios / median)):.1f} % "
            "off",
        ]
        lines += [f"  {ratio:8.4f}  batch {size:<4} {key}" for key, size, ratio in outside[:SHOWN]]
        if self.only_first or self.only_second:
            lines.append(f"only in the first: {self.only_first} cells; in the second: {self.only_second}")
        if self.differing:
            lines.append("the tables differ in (first, second):")
        lines += [f"  {name}: {a!r}, {b!r}" for name, (a, b) in self.differing.items()]
        return "\n".join(lines)


def _apart(ratios: Floats) -> Floats:
    """Return by how much the slower table exceeds the faster one, percent."""
    return 100.0 * (np.maximum(ratios, 1.0 / ratios) - 1.0)
