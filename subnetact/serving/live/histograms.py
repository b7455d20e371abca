"""Histograms with fixed bucket edges, for the counters of a batcher."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["COUNTS", "MILLISECONDS", "Histogram", "HistogramSnapshot"]

#: edges for times: 0.01, 0.02, 0.05, 0.1 ... 5000 ms
MILLISECONDS = tuple(m * 10.0**e for e in range(-2, 4) for m in (1.0, 2.0, 5.0))
#: edges for counts: 1, 2, 4 ... 16384
COUNTS = tuple(float(2**i) for i in range(15))


@dataclass(frozen=True)
class HistogramSnapshot:
    """The state of a histogram at one moment.

    Attributes:
        edges: upper edges of the buckets, inclusive and ascending. One more bucket has no upper edge.
        counts: number of values in each bucket; one more entry than `edges`.
        total: sum of all values.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean of the values; NaN without values."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """Return the upper edge of the bucket that holds the quantile `share`, 0 to 1; NaN without values."""
        for edge, seen in zip((*self.edges, math.inf), accumulate(self.counts), strict=True):
            if seen and seen >= share * self.count:
                return edge
        return math.nan


class Histogram:
    """Counts values in buckets (previous edge, edge], whose upper edges ascend. The owner holds the lock."""

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
        """Count several values."""
        edges, counts = self._edges, self._counts
        for value in values:
            counts[bisect_left(edges, value)] += 1
        self._total += sum(values)

    def snapshot(self) -> HistogramSnapshot:
        """Return a copy that does not change any more."""
        return HistogramSnapshot(self._edges, tuple(self._counts), self._total)
