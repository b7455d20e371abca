"""Feeds what batches really took back into the policy and the dispatcher, off the request path."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from threading import Lock, RLock
from typing import Any

import numpy as np

from subnetact.errors import SubnetActError
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.corrections import Corrections
from subnetact.serving.live.jobs import Job
from subnetact.serving.live.requests import Request
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.scheduling.dispatch import Dispatcher

__all__ = ["Learner"]

_log = logging.getLogger(__name__)
_MOVED = math.log(1.05)
_LEAST_PAUSE_MS = 200.0
_COST_SHARE = 50.0


class Learner:
    """Keeps the corrections, and remakes the policy when they moved by more than 5 %.

    The policy plans with a slow batch's latency, the dispatcher books workers and tells the hopeless with
    the typical one. A policy is remade by its method `retabled(table)`; one without it keeps its table.

    Args:
        table: the profile.
        policy: the policy as it was given.
        dispatcher: gets the corrected latencies.
        lock: held by whoever uses the dispatcher.
        clock_ms: the time.
        learn: whether corrections are used, or only kept.
    """

    def __init__(
        self,
        table: LatencyTable,
        policy: Policy,
        dispatcher: Dispatcher[Request],
        lock: Lock,
        clock_ms: Callable[[], float],
        learn: bool,
    ) -> None:
        self.corrections = Corrections(table)
        #: set when a request is dropped
        self.starving = False
        #: how often the policy and the dispatcher were given other latencies
        self.replanned = 0
        self._turn = RLock()  # the supervisor and a client may ask at the same time
        self._table = table
        self._policy = policy
        self._dispatcher = dispatcher
        self._lock = lock
        self._clock_ms = clock_ms
        self._learn = learn
        self._observe: Any = getattr(policy, "observe", None)
        self._used = np.zeros(table.latency_ms.shape), np.zeros(table.latency_ms.shape)
        self._said: deque[tuple[str, tuple[object, ...], Exception | None]] = deque()
        self._batches = 0
        self._seen = 0, 0
        self._limits_changed = False
        self._next_ms = 0.0

    def observe(self, job: Job, took_ms: float) -> None:
        """Learn from a part that ran. Called under the lock."""
        self._batches += 1
        self.corrections.observe(job.subnet, job.size, took_ms)
        if self._observe is not None:
            try:
                profiled_ms = float(self._table.latency_ms[job.subnet, self._table.pad_index[job.size]])
                self._observe(job.subnet, job.size, profiled_ms, took_ms)
            except Exception as error:
                self._said.append(("the policy's observe(...) raised; it is not called again", (), error))
                self._observe = None

    def limit(self, subnet: int, size: int, count: int) -> int:
        """A batch of `size`, `count` of them requests, ran out of memory; the largest from now on.

        Called under the lock.
        """
        smaller = [b for b in self._table.batch_sizes if b <= size // 2]
        most = smaller[-1] if smaller else max(1, count // 2)
        limits = self._dispatcher.limits
        limits[subnet] = most = min(most, limits.get(subnet, most))
        self._limits_changed = True
        said = "subnet %s ran out of memory at batch size %d; it gets %d from now on"
        self._said.append((said, (subnet, size, most), None))
        return most

    def report(self) -> None:
        """Log what there is to say: not under the lock, for a handler may take its time."""
        with self._turn:
            while self._said:
                text, arguments, error = self._said.popleft()
                _log.log(logging.ERROR if error else logging.WARNING, text, *arguments, exc_info=error)

    def refresh(self, at_once: bool = False) -> bool:
        """Apply what was learned, if it moved by more than 5 % since it was last applied.

        Args:
            at_once: whether to do so even if the last time is not long enough ago.

        Returns:
            Whether the policy and the dispatcher were given other latencies.
        """
        self.report()
        with self._turn:
            return self._refresh(at_once)

    def _refresh(self, at_once: bool) -> bool:
        started = self._clock_ms()
        if started < self._next_ms and not at_once:
            return False
        self._next_ms = started + _LEAST_PAUSE_MS
        learned, starving = (self._batches, self.corrections.loads), self.starving
        self.starving = False
        if starving and learned == self._seen:
            self.corrections.relax()
        elif learned == self._seen and not self._limits_changed:
            return False
        self._seen = learned
        self.corrections.drift()
        if not self._learn and not self._limits_changed:
            return False
        applied = self._apply()
        self._next_ms += _COST_SHARE * (self._clock_ms() - started)
        return applied

    def _apply(self) -> bool:
        now = self.corrections.snapshot()
        ones = np.ones(now.mean.shape)
        ratios = (now.mean, now.planned) if self._learn else (ones, ones)
        logs = np.log(ratios[0]), np.log(ratios[1])
        moved = max(float(np.abs(new - old).max()) for new, old in zip(logs, self._used, strict=True))
        if moved < _MOVED and not self._limits_changed:
            return False
        self._limits_changed = False
        expected = self._corrected(ratios[0])
        policy = self._policy
        retabled: Any = getattr(policy, "retabled", None)
        if retabled is not None:
            try:
                policy = retabled(self._corrected(ratios[1]))
            except SubnetActError as error:  # every option is beyond the SLO now, for example
                _log.warning("the policy cannot plan with what was learned, and keeps its plan: %s", error)
        with self._lock:
            self._dispatcher.adopt(policy, expected)
            self.replanned += 1
        self._policy, self._used = policy, logs
        return True

    def _corrected(self, ratios: Any) -> LatencyTable:
        cells = self._table.latency_ms * ratios
        table = self._table
        for subnet, most in list(self._dispatcher.limits.items()):
            least = max(most, table.batch_sizes[0])
            cells[subnet, [size > least for size in table.batch_sizes]] = np.nan
        return LatencyTable.from_arrays(table.subnets, table.accuracy, table.batch_sizes, cells)
