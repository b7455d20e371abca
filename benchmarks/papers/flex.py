"""Flex: a waiting batch may preempt a running one that holds far fewer requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.fronts import batch_limits, largest_within
from subnetact.serving.scheduling.checks import check_accuracy
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.frontier import cheapest_from
from subnetact.serving.scheduling.request import Job

__all__ = ["Flex"]


class Flex:
    """Runs one subnet; a waiting batch may preempt a running one that holds far fewer requests.

    The batch is the largest one that meets the deadline of the most urgent request. If all workers are busy
    and the batch that could be formed now holds at least `factor` times as many requests as the smallest
    running batch, that batch is suspended; in the paper its work is lost. A waiting batch does not preempt
    if it meets its deadline after the running batch that ends first.

    Args:
        table: the latency table.
        subnet: index of the subnet that serves. If None, the one with the least time per request.
        factor: the factor above, > 1. It is called lambda in the paper, which proves a bound for 3.03.

    Raises:
        PolicyError: an argument is out of range.
        TableError: the accuracy of a subnet is not known.

    Source:
        The algorithm FLEX of Shepherd (NSDI'23, section 4.2).
    """

    def __init__(self, table: LatencyTable, subnet: int | None = None, factor: float = 3.03) -> None:
        if not (math.isfinite(factor) and factor > 1):
            raise PolicyError(f"factor: {factor} must be finite and > 1")
        if subnet is not None and not 0 <= subnet < len(table.subnets):
            raise PolicyError(f"subnet: {subnet} is not in the table; choose 0 to {len(table.subnets) - 1}")
        self.table = check_accuracy(table)
        self.subnet = cheapest_from(table, [0.0])[0] if subnet is None else subnet
        self.factor = float(factor)
        self._limits = batch_limits(table, self.subnet)

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size) for the idle worker; see `Policy.decide`."""
        return self.subnet, largest_within(self._limits, context.slack_ms)

    def retabled(self, table: LatencyTable) -> Flex:
        """Return the same policy for other latencies of the same subnets and batch sizes."""
        return Flex(table, self.subnet, self.factor)

    def preempt(self, context: Context, running: Sequence[Job]) -> int | None:
        """Choose the running batch that a batch formed now replaces.

        Args:
            context: the state of the server, as for `decide`, while no worker is idle.
            running: the batch of every busy worker; at least one.

        Returns:
            The worker whose batch is preempted, or None if no batch is.
        """
        size = largest_within(self._limits, context.slack_ms)
        worth = min(size, context.queued)
        takes = self._limits[0][self._limits[1].index(size)]
        if takes > context.slack_ms:
            return None
        ends = context.free_at_ms
        k, _, victim = min((len(job.part), -ends[job.worker], job.worker) for job in running)
        soonest = min(ends[job.worker] for job in running)
        if soonest + takes <= context.now_ms + context.slack_ms or worth < self.factor * k:
            return None
        return victim
