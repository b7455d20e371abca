"""The Pareto-optimal subnets of every batch size, for policies that choose by slack."""

from __future__ import annotations

from bisect import bisect_right

from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import unreachable
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.frontier import (
    Option,
    cheapest,
    largest_batch,
    pareto_of_batch,
)

__all__ = ["BatchFronts", "FrontsByFloor"]


class BatchFronts:
    """The Pareto-optimal subnets of every batch size, by ascending latency.

    Args:
        table: the latency table.
        floor: minimum accuracy, percent; less accurate subnets are left out.

    Attributes:
        options: for each batch size, its Pareto-optimal subnets.
        latencies: for each batch size, the latencies of those subnets, ms.
        cheapest: the subnet with the least time per request.
        last_resort: (that subnet, its largest batch size), which runs if nothing finishes in time.
    """

    def __init__(self, table: LatencyTable, floor: float = 0.0) -> None:
        columns = range(len(table.batch_sizes))
        self.options: list[list[Option]] = [pareto_of_batch(table, column, floor) for column in columns]
        self.latencies = [[option.latency_ms for option in front] for front in self.options]
        self.sizes = table.batch_sizes
        self.pad = table.pad_index
        self.cheapest = cheapest(table, floor)
        self.last_resort = self.cheapest, largest_batch(table, self.cheapest)

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
    """Makes the fronts of each floor once; floors that demand the same subnets share them.

    Args:
        table: the latency table.
    """

    def __init__(self, table: LatencyTable) -> None:
        self._table = table
        self._accuracies = sorted(set(table.accuracy))
        self._made: dict[float, BatchFronts] = {}

    def __call__(self, context: Context) -> BatchFronts:
        """Return the fronts for the floor of the most urgent request.

        Raises:
            PolicyError: no subnet meets that floor.
        """
        floor = context.floor
        made = self._made.get(floor)
        return made if made is not None else self._make(floor)

    def _make(self, floor: float) -> BatchFronts:
        demanded = next((accuracy for accuracy in self._accuracies if accuracy >= floor), None)
        if demanded is None:
            raise unreachable(floor, self._accuracies[-1])
        made = self._made.get(demanded) or BatchFronts(self._table, demanded)
        self._made[demanded] = self._made[floor] = made
        return made
