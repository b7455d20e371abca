"""FLEX: preempt a running batch when a waiting one is worth much more (Shepherd, NSDI'23, section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.fixed_subnet import batch_limits, largest_within
from subnetact.serving.scheduling.checks import check_accuracy
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.frontier import cheapest

__all__ = ["Flex", "RunningBatch"]


class RunningBatch(NamedTuple):
    """A batch on a worker, as `preempt` sees it: k requests, expected to end at `free_at_ms`."""

    worker: int
    subnet: int
    k: int
    started_ms: float
    free_at_ms: float


class Flex:
    """The largest batch that meets the most urgent deadline; a waiting batch may preempt a running one.

    The worth of a batch is its number of requests (each met request counts one, Shepherd's goodput). When
    all workers are busy and the batch that could be formed now is worth `factor` times the least worthy
    running one, that one is preempted: its work is lost and its requests wait again, or (an option of the
    simulator) it is resumed later. A waiting batch never preempts when it could as well wait for the
    running one to end.

    Args:
        table: the profile.
        subnet: the subnet that serves; None = the cheapest.
        factor: Shepherd's lambda, > 1; the paper proves a bound for 3.03 and uses it.

    Raises:
        PolicyError: an argument out of range.
    """

    def __init__(self, table: LatencyTable, subnet: int | None = None, factor: float = 3.03) -> None:
        if not (math.isfinite(factor) and factor > 1):
            raise PolicyError(f"factor: {factor} must be finite and > 1")
        if subnet is not None and not 0 <= subnet < len(table.subnets):
            raise PolicyError(f"subnet: {subnet} is not in the table; choose 0 to {len(table.subnets) - 1}")
        self.table = check_accuracy(table)
        self.subnet = cheapest(table) if subnet is None else subnet
        self.factor = float(factor)
        self._limits, self._sizes = batch_limits(table, self.subnet)

    def decide(self, context: Context) -> tuple[int, int]:
        """Answer (subnet, batch size)."""
        return self.subnet, largest_within(self._limits, self._sizes, context.slack_ms)

    def retabled(self, table: LatencyTable) -> Flex:
        """The same policy for other latencies of the same subnets and batch sizes."""
        return Flex(table, self.subnet, self.factor)

    def preempt(self, context: Context, running: Sequence[RunningBatch]) -> int | None:
        """The worker whose batch shall make way for one formed now; None for no one.

        Args:
            context: as for `decide`, when no worker is idle.
            running: what every busy worker runs, at least one.
        """
        size = largest_within(self._limits, self._sizes, context.slack_ms)
        worth = min(size, context.queued)
        takes = self._limits[self._sizes.index(size)]
        if takes > context.slack_ms:
            return None
        victim = min(running, key=lambda batch: (batch.k, -batch.free_at_ms, batch.worker))
        soonest = min(batch.free_at_ms for batch in running)
        if soonest + takes <= context.now_ms + context.slack_ms or worth < self.factor * victim.k:
            return None
        return victim.worker
