"""The two greedy extremes that SuperServe (NSDI'25, section 6.5) compares SlackFit with."""

from __future__ import annotations

from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.batch_fronts import FrontsByFloor
from subnetact.serving.policies.fixed_subnet import batch_limits, largest_within
from subnetact.serving.scheduling.checks import check_accuracy
from subnetact.serving.scheduling.context import Context

__all__ = ["MaxAcc", "MaxBatch"]


class MaxBatch:
    """The largest batch that the cheapest subnet finishes within the slack, then the most accurate subnet.

    The batch is at most the profiled size that the queue rounds up to. When nothing fits: the cheapest
    subnet and the largest batch.
    """

    def __init__(self, table: LatencyTable) -> None:
        self.table = check_accuracy(table)
        self._fronts = FrontsByFloor(table)
        self._limits: dict[int, tuple[list[float], list[int]]] = {}

    def decide(self, context: Context) -> tuple[int, int]:
        """Answer (subnet, batch size)."""
        fronts = self._fronts(context)
        small = fronts.cheapest
        limits, sizes = self._limits.get(small) or self._limits.setdefault(
            small, batch_limits(self.table, small)
        )
        size = largest_within(limits, sizes, context.slack_ms)
        column = min(fronts.pad[size], fronts.column_for(context.queued))
        option = fronts.most_accurate(column, context.slack_ms)
        return (option.subnet, option.batch_size) if option else fronts.last_resort

    def retabled(self, table: LatencyTable) -> MaxBatch:
        """The same policy for other latencies of the same subnets and batch sizes."""
        return MaxBatch(table)


class MaxAcc:
    """The most accurate subnet that finishes one request within the slack, then its largest batch in time.

    When nothing fits: the cheapest subnet and the largest batch.
    """

    def __init__(self, table: LatencyTable) -> None:
        self.table = check_accuracy(table)
        self._fronts = FrontsByFloor(table)
        self._limits: dict[int, tuple[list[float], list[int]]] = {}

    def decide(self, context: Context) -> tuple[int, int]:
        """Answer (subnet, batch size)."""
        fronts = self._fronts(context)
        option = fronts.most_accurate(0, context.slack_ms)
        if option is None:
            return fronts.last_resort
        subnet = option.subnet
        limits, sizes = self._limits.get(subnet) or self._limits.setdefault(
            subnet, batch_limits(self.table, subnet)
        )
        return subnet, largest_within(limits, sizes, context.slack_ms)

    def retabled(self, table: LatencyTable) -> MaxAcc:
        """The same policy for other latencies of the same subnets and batch sizes."""
        return MaxAcc(table)
