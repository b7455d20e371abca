"""The Pareto-optimal subnets of every batch size, for policies that choose by slack."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from copy import copy
from operator import attrgetter
from typing import TypeVar

from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.recent import Recent
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.floors import Floors
from subnetact.serving.scheduling.frontier import (
    Option,
    cheapest_from,
    largest_batches,
    pareto_of_batch,
)

__all__ = ["KEPT_FLOORS", "BatchFronts", "FrontsByFloor"]

Fronts = TypeVar("Fronts", bound="BatchFronts")
KEPT_FLOORS = 32
"""A policy keeps what it has planned for at most this many floors."""


class BatchFronts:
    """The Pareto-optimal subnets of every batch size, by ascending latency.

    Args:
        table: the latency table.

    Attributes:
        options: for each batch size, its Pareto-optimal subnets.
        latencies: for each batch size, the latencies of those subnets, ms.
        cheapest: the subnet with the least time per request.
        last_resort: (that subnet, its largest batch size), which runs if nothing finishes in time.
    """

    def __init__(self, table: LatencyTable) -> None:
        columns = range(len(table.batch_sizes))
        self.options: list[list[Option]] = [pareto_of_batch(table, column) for column in columns]
        self.latencies = [[option.latency_ms for option in front] for front in self.options]
        self.sizes = table.batch_sizes
        self.pad = table.pad_index
        self.floors = Floors(table)
        self._cheapest = cheapest_from(table, self.floors.accuracies)
        self._largest = largest_batches(table)
        self._run_last(self._cheapest[0])

    def meeting(self: Fronts, floor: float) -> Fronts:
        """Return the fronts of the subnets that meet a floor: the upper part of every front.

        Args:
            floor: minimum accuracy, percent.

        Raises:
            PolicyError: no subnet meets it.
        """
        made = copy(self)
        starts = [bisect_left(front, floor, key=attrgetter("accuracy")) for front in self.options]
        made.options = [front[start:] for front, start in zip(self.options, starts, strict=True)]
        made.latencies = [front[start:] for front, start in zip(self.latencies, starts, strict=True)]
        made._run_last(self._cheapest[self.floors.at(floor)])
        return made

    def _run_last(self, subnet: int) -> None:
        self.cheapest = subnet
        self.last_resort = subnet, self._largest[subnet]

    def column_for(self, queued: int) -> int:
        """Return the column of the profiled batch size that `queued` requests round up to."""
        return self.pad[queued] if queued < len(self.pad) else len(self.sizes) - 1

    def most_accurate(self, column: int, within_ms: float) -> Option | None:
        """Return the most accurate subnet whose batch of that column takes at most `within_ms`, if any."""
        at = bisect_right(self.latencies[column], within_ms)
        return self.options[column][at - 1] if at else None

    def largest_batch(self, column: int, within_ms: float) -> Option | None:
        """Return the largest batch that takes at most `within_ms`, on the most accurate such subnet.

        Args:
            column: the column of the largest batch size to consider.
            within_ms: the time.

        Returns:
            The option, or None if no batch finishes in time.
        """
        while column >= 0:
            option = self.most_accurate(column, within_ms)
            if option is not None:
                return option
            column -= 1
        return None


class FrontsByFloor:
    """The fronts of the subnets that meet a floor; those of the last few floors are kept.

    Args:
        table: the latency table.
    """

    def __init__(self, table: LatencyTable) -> None:
        self._all = BatchFronts(table)
        self._made = Recent(self._all.meeting, KEPT_FLOORS)

    def __call__(self, context: Context) -> BatchFronts:
        """Return the fronts for the floor of the most urgent request.

        Raises:
            PolicyError: no subnet meets that floor.
        """
        return self._made(floor) if (floor := self._all.floors(context.floor)) else self._all
