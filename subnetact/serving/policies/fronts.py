"""The best subnet within a time: the Pareto-optimal subnets of every batch size, for all policies."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import pairwise
from operator import attrgetter

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.floors import Floors
from subnetact.serving.scheduling.frontier import (
    Option,
    cheapest_from,
    hull_of_front,
    largest_batches,
    pareto_of_batch,
)

Limits = tuple[list[float], list[int]]
_accuracy = attrgetter("accuracy")


class Fronts:
    """The Pareto-optimal subnets of every batch size, by ascending latency and accuracy.

    A floor is a minimum accuracy, percent; 0 accepts any subnet.
    """

    def __init__(self, table: LatencyTable) -> None:
        self.options = [pareto_of_batch(table, column) for column in range(len(table.batch_sizes))]
        self.latencies = [[option.latency_ms for option in front] for front in self.options]
        self.sizes, self._pad = table.batch_sizes, table.pad_index
        self.floors = Floors(table)
        self._cheapest = cheapest_from(table, self.floors.accuracies)
        self._largest = largest_batches(table)

    def column_for(self, queued: int) -> int:
        """Return the column of the profiled batch size that `queued` requests round up to."""
        return self._pad[queued] if queued < len(self._pad) else len(self.sizes) - 1

    def cheapest(self, floor: float) -> int:
        """Return the subnet with the least time per request of those that meet a floor."""
        return self._cheapest[self.floors.at(floor)]

    def last_resort(self, floor: float) -> tuple[int, int]:
        """Return (cheapest subnet that meets a floor, its largest batch size), if nothing ends in time."""
        subnet = self.cheapest(floor)
        return subnet, self._largest[subnet]

    def fastest(self, column: int, floor: float = 0.0) -> Option | None:
        """Return the fastest subnet of a column that meets a floor, if any."""
        front = self.options[column]
        at = bisect_left(front, floor, key=_accuracy) if floor > 0.0 else 0
        return front[at] if at < len(front) else None

    def most_accurate(self, column: int, within_ms: float, floor: float = 0.0) -> Option | None:
        """Return the most accurate subnet whose batch of that column takes at most `within_ms`, if any."""
        at = bisect_right(self.latencies[column], within_ms)
        return option if at and (option := self.options[column][at - 1]).accuracy >= floor else None

    def largest_batch(self, column: int, within_ms: float, floor: float = 0.0) -> Option | None:
        """Return the largest batch up to a column that ends within a time, on the most accurate subnet."""
        found = (self.most_accurate(at, within_ms, floor) for at in range(column, -1, -1))
        return next((option for option in found if option is not None), None)

    def priced(
        self, column: int, k: int, price: float, within_ms: float, free_ms: float, floor: float = 0.0
    ) -> Option | None:
        """Return the subnet with the greatest k * accuracy - price * (time beyond `free_ms`), if any.

        The batch has k requests and takes at most `within_ms`; `price` is in percent per ms.
        """
        most = self.most_accurate(column, within_ms, floor)
        if most is None or price <= 0.0 or most.latency_ms <= free_ms:
            return most
        hull, hull_ms, falls = self._hulls[column]
        at = max(bisect_right(falls, -price / k), bisect_right(hull_ms, free_ms))
        if floor > 0.0:
            at = max(at, bisect_left(hull, floor, key=_accuracy))
        vertex = hull[min(at, bisect_right(hull_ms, within_ms) - 1)]
        free = self.most_accurate(column, free_ms, floor)
        lowest = self.fastest(column, floor) if floor > 0.0 else None
        best, most_gain = most, k * most.accuracy - price * (most.latency_ms - free_ms)
        for option in (vertex, lowest, free):
            if option is not None and option.accuracy >= floor:
                gain = k * option.accuracy - price * max(option.latency_ms - free_ms, 0.0)
                if gain >= most_gain - 1e-9:
                    best, most_gain = option, gain
        return best

    @cached_property
    def _hulls(self) -> list[tuple[list[Option], list[float], list[float]]]:
        """For each batch size: the upper concave hull of its front, its latencies, its slopes times -1."""
        found = []
        for front in self.options:
            hull = hull_of_front(front)
            falls = [(a.accuracy - b.accuracy) / (b.latency_ms - a.latency_ms) for a, b in pairwise(hull)]
            found.append((hull, [option.latency_ms for option in hull], falls))
        return found


def batch_limits(table: LatencyTable, subnet: int) -> Limits:
    """Return (latencies in ms, batch sizes) of a subnet, ascending, without sizes that a larger one beats."""
    limits: list[float] = []
    sizes: list[int] = []
    latencies = table.latency_ms[subnet].tolist()
    for latency, size in zip(reversed(latencies), reversed(table.batch_sizes), strict=True):
        if not math.isnan(latency) and (not limits or latency < limits[-1]):
            limits.append(latency)
            sizes.append(size)
    if not limits:
        raise PolicyError(f"subnet {table.subnets[subnet]!r} runs at no batch size (all NaN); choose another")
    return limits[::-1], sizes[::-1]


def largest_within(limits: Limits, within_ms: float) -> int:
    """Return the largest batch size that ends within a time, or the largest of all if none does."""
    return limits[1][bisect_right(limits[0], within_ms) - 1]
