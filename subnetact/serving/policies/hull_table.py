"""Concave hulls of accuracy over time, per request and per batch size, as HullFit uses them.

The header of `subnetact.serving.policies.hullfit` explains the method.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise

import numpy as np

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.frontier import (
    Option,
    pareto_of_batch,
    time_per_request,
    upper_hull,
)

__all__ = ["HullTable"]


class HullTable:
    """The hulls of the subnets whose accuracy is at least `floor`.

    The points are the vertices of the upper concave hull of (time per request, accuracy), in ascending
    order of both. `prices[i]` is the price of time at which point i yields the most per request.

    Args:
        table: the latency table.
        floor: minimum accuracy, percent.

    Attributes:
        taus: time per request of each point, ms.
        values: accuracy of each point, percent.
        prices: price of time at each point, percent per ms, descending.
        batch_ms: latency of each point at the batch size that has the least time per request, ms.
        sizes: the batch sizes of the table.
        pad: for each number of requests, the column of the smallest batch size that holds them.
        cheapest: the subnet of the first point, which has the least time per request.
        cheapest_ms: its latency per batch size, ms; inf if it cannot run there.
        full_ms: its latency at its largest batch size, ms.
        full_size: that batch size.
        fastest_ms: the least latency of the table, ms.
        least_ms: the least latency at each batch size, ms; inf if no subnet can run there.

    Raises:
        PolicyError: no subnet that can run reaches `floor`.
    """

    def __init__(self, table: LatencyTable, floor: float = 0.0) -> None:
        per_request = time_per_request(table)
        hull = upper_hull(
            [
                (tau, table.accuracy[i], i)
                for i, (tau, _) in enumerate(per_request)
                if table.accuracy[i] >= floor
            ]
        )
        if not hull:
            raise PolicyError(f"min_accuracy: no subnet that can run reaches {floor} %")
        self.taus = [tau for tau, _, _ in hull]
        self.values = [accuracy for _, accuracy, _ in hull]
        self.batch_ms = [per_request[i][0] * per_request[i][1] for _, _, i in hull]
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(hull)]
        # A point is the best one at every price between the slopes on its two sides; its price is their
        # geometric mean. The first and the last point have one slope each.
        self.prices = [0.0]
        if slopes:
            between = [math.sqrt(steep * flat) for steep, flat in pairwise(slopes)]
            self.prices = [1.5 * slopes[0], *between, 0.25 * slopes[-1]]
        self._falls = [-slope for slope in slopes]  # ascending, as bisection needs

        self.sizes = table.batch_sizes
        self.pad = table.pad_index
        self.cheapest = hull[0][2]
        latencies = table.latency_ms[self.cheapest].tolist()
        self.cheapest_ms = [math.inf if math.isnan(latency) else latency for latency in latencies]
        self.full_ms, self.full_size = next(
            (latency, size)
            for latency, size in zip(self.cheapest_ms[::-1], self.sizes[::-1], strict=True)
            if latency < math.inf
        )
        self.fastest_ms = table.fastest_ms
        self.least_ms = np.where(np.isnan(table.latency_ms), math.inf, table.latency_ms).min(axis=0).tolist()
        self._fronts = [pareto_of_batch(table, column, floor) for column in range(len(self.sizes))]
        self._front_ms = [[option.latency_ms for option in front] for front in self._fronts]
        chains = [
            upper_hull([(option.latency_ms, option.accuracy, j) for j, option in enumerate(front)])
            for front in self._fronts
        ]
        self._hulls = [
            [front[j] for _, _, j in chain] for front, chain in zip(self._fronts, chains, strict=True)
        ]
        self._hull_ms = [[x for x, _, _ in chain] for chain in chains]
        self._hull_falls = [[-(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(chain)] for chain in chains]

    def column_for(self, queued: int) -> int:
        """Return the column of the profiled batch size that `queued` requests round up to."""
        return self.pad[queued] if queued < len(self.pad) else len(self.sizes) - 1

    def point_at(self, price: float) -> int:
        """Return the point with the greatest accuracy - price * time per request.

        Args:
            price: price of time, percent per ms.
        """
        return bisect_right(self._falls, -price)

    def drain_ms(self, k: int) -> float:
        """Return the latency of the cheapest subnet on k requests, ms."""
        return self.cheapest_ms[self.pad[k]]

    def best(
        self, column: int, k: int, price: float, limit_ms: float, surge_limit_ms: float
    ) -> Option | None:
        """Return the subnet with the greatest k * accuracy - price * latency at one batch size.

        Args:
            column: the column of the batch size.
            k: number of requests in the batch.
            price: price of time, percent per ms.
            limit_ms: the longest latency allowed.
            surge_limit_ms: a further limit on the latency of every subnet except the cheapest.

        Returns:
            The subnet at this batch size, or None if none is fast enough.
        """
        within = limit_ms if limit_ms < surge_limit_ms else surge_limit_ms
        hull = self._hulls[column]
        if not hull:
            return None
        unlimited = hull[bisect_right(self._hull_falls[column], -price / k)]
        if unlimited.latency_ms <= within:
            return unlimited
        at = bisect_right(self._front_ms[column], within) - 1
        if at >= 0:
            nearest = self._fronts[column][at]
            vertex = hull[bisect_right(self._hull_ms[column], within) - 1]
            gain = k * (nearest.accuracy - vertex.accuracy) - price * (nearest.latency_ms - vertex.latency_ms)
            return nearest if gain > 0 else vertex
        latency = self.cheapest_ms[column]  # the cheapest subnet need not leave time for a surge
        if latency <= limit_ms:
            return Option(latency, self.values[0], self.cheapest, self.sizes[column])
        return None

    def rescue(self, slack_ms: float) -> tuple[int, int]:
        """Return what runs if no option passes the guards.

        Args:
            slack_ms: the slack of the most urgent request.

        Returns:
            The cheapest subnet with its largest batch that finishes within the slack, or with its largest
            batch of all if none does.
        """
        for latency, size in zip(self.cheapest_ms[::-1], self.sizes[::-1], strict=True):
            if latency <= slack_ms:
                return self.cheapest, size
        return self.cheapest, self.full_size
