"""Policies that switch the whole server to another subnet when the arrival rate changes."""

from __future__ import annotations

import math

import numpy as np

from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.fronts import batch_limits, largest_within
from subnetact.serving.scheduling.checks import check_slo
from subnetact.serving.scheduling.context import Context

WINDOW_MS = 1000.0
"""The window over which the arrival rate is measured, and the least time between two switches, ms."""


class ModelSwitching:
    """Runs the most accurate subnet whose sustainable throughput covers the recent arrival rate.

    A batch size is sustainable if twice its latency is within the SLO, because a request that has just
    missed a batch waits for that batch and runs in the next one. The sustainable throughput of a subnet is
    the greatest batch size / latency over its sustainable batch sizes. The batch is the largest one that
    finishes within the slack, as for `Fixed`.

    Args:
        table: the latency table.
        slo_ms: the usual time from arrival to deadline, ms.

    Attributes:
        subnet: the subnet that runs now. Before the first decision, None.

    Raises:
        PolicyError: an argument is out of range, or the SLO is below the fastest option.
        TableError: the accuracy of a subnet is not known.

    Source:
        Model-Switching (HotCloud'20, section 4).
    """

    def __init__(self, table: LatencyTable, slo_ms: float) -> None:
        self.table = table
        self.slo_ms = check_slo(slo_ms, table)
        runs: list[int] = np.flatnonzero(~np.isnan(table.latency_ms).all(axis=1)).tolist()
        self._limits = {i: batch_limits(table, i) for i in runs}
        self._rates = {
            i: max((size / ms for ms, size in zip(*limits, strict=True) if 2 * ms <= slo_ms), default=0.0)
            for i, limits in self._limits.items()
        }
        self._by_accuracy = sorted(self._limits, key=lambda i: (-table.accuracy[i], -self._rates[i]))
        self.reset()

    def reset(self) -> None:
        """Forget the current subnet and the time of the last switch."""
        self.subnet: int | None = None
        self._switched_ms = -math.inf

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size) for the idle worker; see `Policy.decide`."""
        if context.now_ms - self._switched_ms >= WINDOW_MS:
            wanted = self._wanted(context)
            if wanted != self.subnet:
                self.subnet, self._switched_ms = wanted, context.now_ms
        subnet = self.subnet if self.subnet is not None else self._wanted(context)
        return subnet, largest_within(self._limits[subnet], context.slack_ms)

    def retabled(self, table: LatencyTable) -> ModelSwitching:
        """Return the same policy for other latencies of the same subnets and batch sizes."""
        made = ModelSwitching(table, self.slo_ms)
        made.subnet, made._switched_ms = self.subnet, self._switched_ms
        return made

    def _wanted(self, context: Context) -> int:
        rate = context.arrivals.rate_per_ms(context.now_ms, WINDOW_MS)
        workers = sum(1 for free in context.free_at_ms if free < math.inf)
        enough = (i for i in self._by_accuracy if self._rates[i] * workers >= rate)
        return next(enough, max(self._by_accuracy, key=self._rates.__getitem__))
