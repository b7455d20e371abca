"""Histograms with fixed edges: cheap to fill, exact to export."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["COUNTS", "MILLISECONDS", "Histogram", "HistogramSnapshot"]

MILLISECONDS = tuple(m * 10.0**e for e in range(-2, 4) for m in (1.0, 2.0, 5.0))
COUNTS = tuple(float(2**i) for i in range(15))


@dataclass(frozen=True)
class HistogramSnapshot:
    """A histogram at one moment.

    Attributes:
        edges: upper edges, inclusive, ascending; one more bucket holds what lies above the last.
        counts: values in each bucket; one more than edges.
        total: sum of all values.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean of the values; NaN when there are none."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """The upper edge of the bucket that holds this quantile; inf above the last, NaN without values."""
        wanted, seen = share * self.count, 0
        for edge, count in zip((*self.edges, math.inf), self.counts, strict=True):
            seen += count
            if count and seen >= wanted:
                return edge
        return math.nan


class Histogram:
    """Counts values into buckets (previous edge, edge]. Its owner locks."""

    __slots__ = ("_counts", "_edges", "_total")

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = tuple(edges)
        self._counts = [0] * (len(self._edges) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._edges, value)] += 1
        self._total += value

    def add_all(self, values: Sequence[float]) -> None:
        """Count many values."""
        edges, counts = self._edges, self._counts
        for value in values:
            counts[bisect_left(edges, value)] += 1
        self._total += sum(values)

    def snapshot(self) -> HistogramSnapshot:
        """Return a copy."""
        return HistogramSnapshot(self._edges, tuple(self._counts), self._total)
