"""Histograms with fixed bucket edges, for the counters of a batcher."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

#: edges for times: 0.01, 0.02, 0.05, 0.1 ... 5000 ms
MILLISECONDS = tuple(m * 10.0**e for e in range(-2, 4) for m in (1.0, 2.0, 5.0))
#: edges for counts: 1, 2, 4 ... 16384
COUNTS = tuple(float(2**i) for i in range(15))


@dataclass(slots=True)
class Histogram:
    """Counts values in buckets.

    Attributes:
        edges: upper edges of the buckets, inclusive and ascending. One more bucket has no upper edge.
        counts: number of values in each bucket; one more entry than `edges`.
        total: sum of all values.
    """

    edges: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.edges) + 1)

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean of the values; NaN without any."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """Return the upper edge of the bucket that holds the quantile `share`, 0 to 1; NaN without values."""
        for edge, seen in zip((*self.edges, math.inf), accumulate(self.counts), strict=True):
            if seen and seen >= share * self.count:
                return edge
        return math.nan

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    def add_all(self, values: Sequence[float]) -> None:
        """Count several values."""
        edges, counts = self.edges, self.counts
        for value in values:
            counts[bisect_left(edges, value)] += 1
        self.total += sum(values)

    def snapshot(self) -> Histogram:
        """Return a copy, which does not change any more."""
        return Histogram(self.edges, self.counts.copy(), self.total)
