"""Two latency tables beside each other: is a profile reproducible, is one machine faster than another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import TableError

if TYPE_CHECKING:
    from subnetact.latency.table import LatencyTable

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """What `LatencyTable.compare` finds, over the subnets and batch sizes that both tables have.

    Attributes:
        subnets: readable keys.
        batch_sizes: ascending.
        ratios: latency of the second table over that of the first, shape (subnets, batch sizes); NaN where
            one of them has none.
        statistic: what was compared.
        only_first: how many cells have a latency in the first table alone.
        only_second: how many have one in the second alone.
        differing: facts of the two stamps that differ, key -> (first, second).
    """

    subnets: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    ratios: npt.NDArray[np.float64]
    statistic: str
    only_first: int
    only_second: int
    differing: Mapping[str, tuple[Any, Any]]

    @property
    def differences(self) -> npt.NDArray[np.float64]:
        """How far apart the two are, percent of the faster one, shape (subnets, batch sizes)."""
        with np.errstate(divide="ignore"):
            apart: npt.NDArray[np.float64] = 100.0 * (np.maximum(self.ratios, 1.0 / self.ratios) - 1.0)
        return apart

    @property
    def worst(self) -> tuple[str, int, float]:
        """(subnet, batch size, ratio) of the cell furthest apart."""
        i, j = np.unravel_index(int(np.nanargmax(self.differences)), self.ratios.shape)
        return self.subnets[i], self.batch_sizes[j], float(self.ratios[i, j])

    @property
    def median(self) -> float:
        """The median ratio."""
        return float(np.nanmedian(self.ratios))

    @property
    def unevenness(self) -> float:
        """How far the cell furthest from the median ratio is from it, percent.

        What remains where one machine was faster than the other in all cells alike.
        """
        relative = self.ratios / self.median
        return float(100.0 * (np.nanmax(np.maximum(relative, 1.0 / relative)) - 1.0))

    def within(self, tolerance_percent: float) -> bool:
        """Tell whether both have the same cells, all of them within a tolerance."""
        return not self.outside(tolerance_percent) and not self.only_first and not self.only_second

    def outside(self, tolerance_percent: float) -> list[tuple[str, int, float]]:
        """(subnet, batch size, ratio) of the cells further apart than a tolerance, the furthest first."""
        differences = np.where(np.isnan(self.ratios), -math.inf, self.differences)
        found = [
            (float(differences[i, j]), self.subnets[i], self.batch_sizes[j], float(self.ratios[i, j]))
            for i, j in np.argwhere(differences > tolerance_percent)
        ]
        return [(key, size, ratio) for _, key, size, ratio in sorted(found, reverse=True)]

    def report(self, tolerance_percent: float, shown: int = 10) -> str:
        """The comparison in a few lines."""
        outside = self.outside(tolerance_percent)
        cells = int(np.isfinite(self.ratios).sum())
        key, size, ratio = self.worst
        lines = [
            f"{self.statistic} of {cells} cells ({len(self.subnets)} subnets, batch sizes "
            f"{', '.join(map(str, self.batch_sizes))}): median ratio {self.median:.4f}, worst {ratio:.4f} "
            f"at batch size {size} of {key}",
            f"{len(outside)} of {cells} cells differ by more than {tolerance_percent:g} %; around the median "
            f"ratio they differ by at most {self.unevenness:.1f} %",
        ]
        lines += [f"  {ratio:8.4f}  batch {size:<4} {key}" for key, size, ratio in outside[:shown]]
        if self.only_first or self.only_second:
            lines.append(f"only in the first: {self.only_first} cells; in the second: {self.only_second}")
        lines += [f"  {name}: {a!r}, {b!r}" for name, (a, b) in self.differing.items()]
        return "\n".join(lines)


def compare(first: LatencyTable, second: LatencyTable, statistic: str | None = None) -> Comparison:
    """See `LatencyTable.compare`."""
    keys = tuple(key for key in first.subnets if key in set(second.subnets))
    sizes = tuple(size for size in first.batch_sizes if size in set(second.batch_sizes))
    if not keys or not sizes:
        raise TableError(
            "the tables have no cell in common; compare tables of the same subnets and batch sizes "
            f"({first!r} and {second!r})"
        )
    cells = [
        _cells(table, statistic)[
            np.ix_([table.subnets.index(k) for k in keys], [table.batch_sizes.index(b) for b in sizes])
        ]
        for table in (first, second)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = cells[1] / cells[0]
    ratios[~(np.isfinite(ratios) & (ratios > 0))] = np.nan
    both = int(np.isfinite(ratios).sum())
    if not both:
        raise TableError("the tables have no measured cell in common; profile the same subnets on both")
    return Comparison(
        keys,
        sizes,
        ratios,
        statistic or "latency",
        int(np.isfinite(_cells(first, statistic)).sum()) - both,
        int(np.isfinite(_cells(second, statistic)).sum()) - both,
        differing_facts(first.stamp, second.stamp),
    )


def differing_facts(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Facts that differ between two stamps, key -> (first, second); the time of measuring aside."""
    keys = [*first, *(key for key in second if key not in first)]
    return {
        key: (first.get(key), second.get(key))
        for key in keys
        if key not in ("measured", "merged_from") and first.get(key) != second.get(key)
    }


def _cells(table: LatencyTable, statistic: str | None) -> npt.NDArray[np.float64]:
    if statistic is None:
        return table.latency_ms
    if statistic not in table.statistics:
        known = ", ".join(table.statistics) or "none"
        raise TableError(f"statistic: the table has no {statistic!r}; it has {known}")
    return table.statistics[statistic]
