"""Look-ups shared by the policies that choose by the slack of the most urgent request."""

from __future__ import annotations

from bisect import bisect_right

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.frontier import (
    Option,
    cheapest,
    largest_batch,
    pareto_of_batch,
)

__all__ = ["BatchFronts", "FrontsByFloor"]


class BatchFronts:
    """The Pareto-optimal subnets of every batch size, from least to most latency."""

    def __init__(self, table: LatencyTable, floor: float = 0.0) -> None:
        columns = range(len(table.batch_sizes))
        self.options: list[list[Option]] = [pareto_of_batch(table, column, floor) for column in columns]
        self.latencies = [[option.latency_ms for option in front] for front in self.options]
        self.sizes = table.batch_sizes
        self.pad = table.pad_index
        self.cheapest = cheapest(table, floor)
        self.last_resort = self.cheapest, largest_batch(table, self.cheapest)

    def column_for(self, queued: int) -> int:
        """Column of the profiled batch size that `queued` requests round up to."""
        return self.pad[queued] if queued < len(self.pad) else len(self.sizes) - 1

    def most_accurate(self, column: int, within_ms: float) -> Option | None:
        """The most accurate subnet that finishes one batch of that column in time."""
        at = bisect_right(self.latencies[column], within_ms)
        return self.options[column][at - 1] if at else None

    def largest_batch(self, column: int, within_ms: float) -> Option | None:
        """The largest batch up to `column` that fits in time, on the most accurate such subnet."""
        while column >= 0:
            option = self.most_accurate(column, within_ms)
            if option is not None:
                return option
            column -= 1
        return None


class FrontsByFloor:
    """Prepared look-ups for each accuracy floor that was seen; floors share them between two accuracies."""

    def __init__(self, table: LatencyTable) -> None:
        self._table = table
        self._levels = sorted(set(table.accuracy))
        self._made: dict[float, BatchFronts] = {}

    def __call__(self, context: Context) -> BatchFronts:
        """The look-ups for the floor of the most urgent request."""
        floor = context.floor
        made = self._made.get(floor)
        return made if made is not None else self._make(floor)

    def _make(self, floor: float) -> BatchFronts:
        level = next((level for level in self._levels if level >= floor), None)
        if level is None:
            raise PolicyError(f"floor: no subnet reaches {floor} %; the best has {self._levels[-1]} %")
        made = self._made.get(level) or BatchFronts(self._table, level)
        self._made[level] = self._made[floor] = made
        return made
