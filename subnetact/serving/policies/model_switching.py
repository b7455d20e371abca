"""Policies that switch the whole server to another model now and then."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.fixed_subnet import batch_limits, largest_within
from subnetact.serving.scheduling.checks import check_count, check_margin, check_slo
from subnetact.serving.scheduling.context import Context

__all__ = ["Coarse", "ModelSwitching"]


class ModelSwitching:
    """The most accurate subnet whose sustainable throughput covers the recent rate (HotCloud'20, section 4).

    The rate is that of the last window; the subnet changes at most once a period. A batch size is
    sustainable when a request that just missed a batch can wait for it and run in the next, twice its
    latency within the SLO. Batches are the largest within the slack, as for `Fixed`.

    The paper's <replicas, threads> configurations are rows of the table: give each (model, threads) its own
    row, and its number of replicas in `replicas`; a row then uses only that many workers.

    Args:
        table: the profile.
        slo_ms: the usual time a request is given.
        window_ms: over which the rate is measured.
        period_ms: least time between two switches.
        replicas: workers each row may use; None = all of them for every row.

    Raises:
        PolicyError: an argument out of range, or an SLO below the fastest option.
    """

    switch_ms = 0.0

    def __init__(
        self,
        table: LatencyTable,
        slo_ms: float,
        window_ms: float = 1000.0,
        period_ms: float = 1000.0,
        replicas: Sequence[int] | None = None,
    ) -> None:
        self.table = table
        self.slo_ms = check_slo(slo_ms, table)
        if not (math.isfinite(window_ms) and window_ms > 0):
            raise PolicyError(f"window_ms: {window_ms} must be finite and > 0")
        self.window_ms = float(window_ms)
        self.period_ms = check_margin(period_ms, "period_ms")
        rows = range(len(table.subnets))
        if replicas is not None and len(replicas) != len(rows):
            raise PolicyError(
                f"replicas: {len(replicas)} values for {len(rows)} rows of the table; give one a row"
            )
        self._given_replicas = replicas
        self._replicas = [
            math.inf if replicas is None else check_count(replicas[i], "replicas") for i in rows
        ]
        self._limits: dict[int, tuple[list[float], list[int]]] = {}
        self._rates = [0.0 for _ in rows]
        for i in rows:
            if np.isnan(table.latency_ms[i]).all():
                continue
            self._limits[i] = batch_limits(table, i)
            sustained = [
                size / latency
                for latency, size in zip(*self._limits[i], strict=True)
                if 2 * latency <= slo_ms
            ]
            self._rates[i] = max(sustained, default=0.0)
        self._by_accuracy = sorted(self._limits, key=lambda i: (-table.accuracy[i], -self._rates[i]))
        self.reset()

    def reset(self) -> None:
        """Forget the current subnet."""
        self.subnet: int | None = None
        self._switched_ms = -math.inf

    def decide(self, context: Context) -> tuple[int, int] | None:
        """Answer (subnet, batch size); None for a worker that the current configuration leaves out."""
        if context.now_ms - self._switched_ms >= self.period_ms:
            wanted = self._wanted(context)
            if wanted != self.subnet:
                self.subnet, self._switched_ms = wanted, context.now_ms
        subnet = self.subnet if self.subnet is not None else self._wanted(context)
        if context.worker >= self._replicas[subnet]:
            return None
        limits, sizes = self._limits[subnet]
        return subnet, largest_within(limits, sizes, context.slack_ms)

    def retabled(self, table: LatencyTable) -> ModelSwitching:
        """The same policy for other latencies of the same subnets and batch sizes."""
        made = ModelSwitching(table, self.slo_ms, self.window_ms, self.period_ms, self._given_replicas)
        made.switch_ms = self.switch_ms
        made.subnet, made._switched_ms = self.subnet, self._switched_ms
        return made

    def _wanted(self, context: Context) -> int:
        rate = context.arrivals.rate_per_ms(context.now_ms, self.window_ms)
        workers = sum(1 for free in context.free_at_ms if free < math.inf)
        for subnet in self._by_accuracy:
            if self._rates[subnet] * min(self._replicas[subnet], workers) >= rate:
                return subnet
        return max(self._by_accuracy, key=lambda i: self._rates[i] * min(self._replicas[i], workers))


class Coarse(ModelSwitching):
    """Model switching by servers that must load the model first (SuperServe, NSDI'25, Fig. 1).

    As `ModelSwitching`, and every worker that changes its subnet loses `delay_ms`.
    """

    def __init__(
        self,
        table: LatencyTable,
        slo_ms: float,
        delay_ms: float = 100.0,
        window_ms: float = 1000.0,
        period_ms: float = 1000.0,
    ) -> None:
        super().__init__(table, slo_ms, window_ms, period_ms)
        self.switch_ms = check_margin(delay_ms, "delay_ms")
