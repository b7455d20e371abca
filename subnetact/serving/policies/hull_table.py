"""The table as HullFit shops in it: hulls of accuracy over time, per request and per batch."""

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
    """Look-ups over the subnets of at least `floor` percent.

    Points are the vertices of the upper concave hull of (time per request, accuracy), from cheap to
    accurate. `prices[i]` is the price of time, percent per ms, at which vertex i is the best buy.

    Attributes:
        taus: time per request of each point, ms.
        values: accuracy of each point, percent.
        batch_ms: latency of each point's most efficient batch.
        cheap: the subnet of the first point.
        cheap_row: its latency per batch size, ms; inf where it cannot run.
        full_ms: its latency at its largest batch size.
        full_size: that batch size.
        fastest_ms: the least latency of any cell of the table.
        least_ms: the least latency of any cell of each column; inf where nothing runs.
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
            raise PolicyError(f"floor: no subnet that can run reaches {floor} %")
        self.taus = [tau for tau, _, _ in hull]
        self.values = [accuracy for _, accuracy, _ in hull]
        self.batch_ms = [per_request[i][0] * per_request[i][1] for _, _, i in hull]
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(hull)]
        self.prices = [0.0]
        if slopes:
            between = [math.sqrt(steep * flat) for steep, flat in pairwise(slopes)]
            self.prices = [1.5 * slopes[0], *between, 0.25 * slopes[-1]]
        self._falls = [-slope for slope in slopes]

        self.sizes = table.batch_sizes
        self.pad = table.pad_index
        self.cheap = hull[0][2]
        row = table.latency_ms[self.cheap].tolist()
        self.cheap_row = [math.inf if math.isnan(latency) else latency for latency in row]
        self.full_ms, self.full_size = next(
            (latency, size)
            for latency, size in zip(self.cheap_row[::-1], self.sizes[::-1], strict=True)
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
        """Column of the profiled batch size that `queued` requests round up to."""
        return self.pad[queued] if queued < len(self.pad) else len(self.sizes) - 1

    def point_at(self, price: float) -> int:
        """The point that is worth most when a ms costs `price` percent."""
        return bisect_right(self._falls, -price)

    def drain_ms(self, k: int) -> float:
        """Latency of the cheapest subnet on k requests, ms."""
        return self.cheap_row[self.pad[k]]

    def best(self, column: int, k: int, price: float, limit_ms: float, luxury_ms: float) -> Option | None:
        """The subnet with the greatest k * accuracy - price * latency at one batch size.

        Args:
            column: of the batch size.
            k: requests in the batch.
            price: of time, percent per ms.
            limit_ms: every subnet must be this fast.
            luxury_ms: every subnet but the cheapest must be this fast, too.
        """
        within = limit_ms if limit_ms < luxury_ms else luxury_ms
        hull = self._hulls[column]
        if not hull:
            return None
        free_choice = hull[bisect_right(self._hull_falls[column], -price / k)]
        if free_choice.latency_ms <= within:
            return free_choice
        at = bisect_right(self._front_ms[column], within) - 1
        if at >= 0:
            nearest = self._fronts[column][at]
            vertex = hull[bisect_right(self._hull_ms[column], within) - 1]
            gain = k * (nearest.accuracy - vertex.accuracy) - price * (nearest.latency_ms - vertex.latency_ms)
            return nearest if gain > 0 else vertex
        latency = self.cheap_row[column]
        if latency <= limit_ms:
            return Option(latency, self.values[0], self.cheap, self.sizes[column])
        return None

    def rescue(self, slack_ms: float) -> tuple[int, int]:
        """The cheapest subnet with the largest batch within the slack; with the largest of all if none is."""
        for latency, size in zip(self.cheap_row[::-1], self.sizes[::-1], strict=True):
            if latency <= slack_ms:
                return self.cheap, size
        return self.cheap, self.full_size
