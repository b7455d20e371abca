"""Gives the latencies that batches really take back to the policy and the dispatcher."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from threading import Lock, RLock
from typing import Any, TypeAlias

import numpy as np

from subnetact.errors import SubnetActError
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.corrections import Corrections
from subnetact.serving.live.rate_limited_log import RateLimitedLog
from subnetact.serving.scheduling.dispatch import Dispatcher
from subnetact.serving.scheduling.request import Job

Clock: TypeAlias = Callable[[], float]
_LEAST_CHANGE = math.log(1.05)
_LEAST_PAUSE_MS = 200.0
_PAUSE_OVER_COST = 50.0


class Learner:
    """Keeps the corrections, and makes the policy anew if they changed by more than 5 %.

    The policy plans with the latency of a slow batch. The dispatcher uses the typical latency to book workers
    and to tell whether a request has expired. The policy is made anew by its method `retabled(table)`; a
    policy without this method keeps its table. A thread of its own calls `refresh`, so that no request waits
    for planning.

    `tables` are the profiles of every input shape, the largest last; the corrections are those of the last
    one, and what a batch of another shape teaches is applied in proportion. `lock` is held by every thread
    that uses the dispatcher. Without `learn`, the corrections are only collected. `dropping` is set if
    requests were dropped since the last refresh; `replanned` counts the exchanges of latencies.
    """

    def __init__(
        self, tables: Sequence[LatencyTable], dispatcher: Dispatcher, lock: Lock, clock_ms: Clock, learn: bool
    ) -> None:
        table = tables[-1]
        self.corrections, self._repeated = Corrections(table), RateLimitedLog(logging.getLogger(__name__))
        self.dropping = False
        self.replanned = 0
        self._refreshing = RLock()  # the planner and a client may refresh at the same time
        self._tables, self._table, self._dispatcher = list(tables), table, dispatcher
        self._lock, self._clock_ms, self._learn = lock, clock_ms, learn
        self._applied = np.ones((2, *table.latency_ms.shape))  # ratios of the typical and of the slow batch
        self._seen = 0, 0
        self._limits: dict[int, int] = {}  # those that the policy plans with
        self._next_ms = 0.0

    def observe(self, job: Job, took_ms: float) -> None:
        """Learn from a part of a job that ran, before the job advances. The caller holds the lock."""
        own = self._tables[job.shape]
        column = own.pad_index[job.size]
        if own is not self._table:
            took_ms *= float(self._table.latency_ms[job.subnet, column] / own.latency_ms[job.subnet, column])
        self.corrections.observe(job.subnet, job.size, took_ms)

    def refresh(self, at_once: bool = False) -> bool:
        """Apply what was learned, if it differs by more than 5 % from what is applied; return whether it did.

        It does nothing if the last time is not long ago, unless `at_once`.
        """
        with self._refreshing:
            started = self._clock_ms()
            if started < self._next_ms and not at_once:
                return False
            self._next_ms = started + _LEAST_PAUSE_MS
            learned, dropping = (self.corrections.batches, self.corrections.loads), self.dropping
            self.dropping, limits = False, dict(self._dispatcher.limits)
            if dropping and learned == self._seen:
                self.corrections.relax()
            elif learned == self._seen and limits == self._limits:
                return False
            self._seen = learned
            self.corrections.drift()
            now = self.corrections.snapshot()
            ratios = np.array([now.mean, now.planned]) if self._learn else np.ones_like(self._applied)
            change = float(np.abs(np.log(ratios / self._applied)).max())
            changed = change >= _LEAST_CHANGE or limits != self._limits
            if changed:
                self._limits = limits
                plans = [self._plan(shape, *ratios) for shape in range(len(self._tables))]
                with self._lock:  # for the exchange only: every client and worker waits for this lock
                    self._dispatcher.plans = plans
                    self.replanned += 1
                self._applied = ratios
            self._next_ms += _PAUSE_OVER_COST * (self._clock_ms() - started)
            return changed

    def _plan(self, shape: int, typical: Any, slow: Any) -> Any:
        """Return what the dispatcher adopts for one input shape."""
        policy: Any = self._dispatcher.plans[shape].policy
        if hasattr(policy, "retabled"):
            try:
                policy = policy.retabled(self._corrected(self._tables[shape], slow))
            except Exception as error:  # for example, no subnet is within the SLO any more
                text = "the policy cannot plan with what was learned, and keeps its plan: %s"
                unexpected = None if isinstance(error, SubnetActError) else error
                self._repeated.log(logging.WARNING, text, error, error=unexpected)
        return self._dispatcher.plan(policy, self._corrected(self._tables[shape], typical))

    def _corrected(self, table: LatencyTable, ratios: Any) -> LatencyTable:
        cells = table.latency_ms * ratios
        for subnet, most in list(self._dispatcher.limits.items()):
            cells[subnet, np.array(table.batch_sizes) > max(most, table.batch_sizes[0])] = np.nan
        return LatencyTable(table.subnets, table.accuracy, table.batch_sizes, cells)
