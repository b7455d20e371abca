"""What a policy sees when a worker is idle, and the one method it has to answer with."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.queue import EDFQueue

__all__ = ["ArrivalMeter", "Context", "Policy"]

Choice = tuple[int, int]


class ArrivalMeter:
    """Counts arrivals within recent windows.

    Keeps the last `horizon_ms` of arrival times, and at most about twice that.
    """

    __slots__ = ("_horizon_ms", "_limit", "_times", "start_ms", "total")

    def __init__(self, horizon_ms: float = 2000.0) -> None:
        self._times: list[float] = []
        self._horizon_ms = horizon_ms
        self._limit = 8192
        self.start_ms: float | None = None
        self.total = 0

    def extend(self, times_ms: Sequence[float]) -> None:
        """Record arrivals, in time order."""
        if self.start_ms is None:
            self.start_ms = times_ms[0]
        self._times.extend(times_ms)
        self.total += len(times_ms)
        if len(self._times) > self._limit:
            self._trim()

    def append(self, time_ms: float) -> None:
        """Record one arrival."""
        if self.start_ms is None:
            self.start_ms = time_ms
        self._times.append(time_ms)
        self.total += 1
        if len(self._times) > self._limit:
            self._trim()

    def count(self, since_ms: float, until_ms: float) -> int:
        """Arrivals in (since_ms, until_ms]."""
        times = self._times
        if times and times[-1] <= until_ms:
            return len(times) - bisect_right(times, since_ms)
        return bisect_right(times, until_ms) - bisect_right(times, since_ms)

    def rate_per_ms(self, now_ms: float, window_ms: float) -> float:
        """Arrivals a millisecond over the window that ends now, or over all time so far if shorter."""
        if self.start_ms is None:
            return 0.0
        seen_ms = now_ms - self.start_ms
        return self.count(now_ms - window_ms, now_ms) / (min(window_ms, seen_ms) if seen_ms > 1.0 else 1.0)

    def _trim(self) -> None:
        del self._times[: bisect_left(self._times, self._times[-1] - self._horizon_ms)]
        self._limit = max(8192, 2 * len(self._times))


class Context:
    """The state of the server at one decision. One object is reused for all decisions: keep no reference.

    Attributes:
        now_ms: the time.
        worker: index of the idle worker that asks.
        queued: requests waiting, >= 1.
        slack_ms: deadline of the most urgent request minus now; negative when it is late.
        slo_ms: the usual time a request is given.
        floor: accuracy, percent, that the most urgent request demands; 0 when it takes any.
        queue: the queue itself, for `deadline(i)` and `floor(i)`.
        arrivals: recent arrivals, for `rate_per_ms`.
        free_at_ms: when each worker is expected to be free; inf for one that is down.
        may_shed: whether `shed(count)` is allowed.
    """

    __slots__ = (
        "_shed",
        "arrivals",
        "floor",
        "free_at_ms",
        "may_shed",
        "now_ms",
        "queue",
        "queued",
        "slack_ms",
        "slo_ms",
        "worker",
    )

    def __init__(
        self,
        queue: EDFQueue[Any],
        arrivals: ArrivalMeter,
        free_at_ms: list[float],
        slo_ms: float,
        shed: Callable[[int], None] | None = None,
    ) -> None:
        self.queue = queue
        self.arrivals = arrivals
        self.free_at_ms = free_at_ms
        self.slo_ms = slo_ms
        self.may_shed = shed is not None
        self._shed = shed
        self.now_ms = 0.0
        self.worker = 0
        self.queued = 0
        self.slack_ms = 0.0
        self.floor = 0.0

    def shed(self, count: int) -> None:
        """Give up on the `count` most urgent requests (fewer than `queued`), by the queue's hopeless rule."""
        if self._shed is not None and 0 < count < self.queued:
            self._shed(count)
            self.queued -= count
            self.slack_ms = self.queue.deadline() - self.now_ms
            self.floor = self.queue.floor()


@runtime_checkable
class Policy(Protocol):
    """A scheduling policy: `table`, and one method.

    A policy may keep state between decisions; one policy object serves one simulation or batcher.
    Optional further members, honoured where present: `switch_ms` (a worker that changes its subnet loses
    that much), `retabled(table)` (the same policy, with what it remembers, for other latencies: the live
    batcher learns them), `observe(subnet, batch_size, profiled_ms, measured_ms)` (after every batch),
    `reset()` (before a simulation), `preempt(context, running)` (see `subnetact.serving.policies.flex`).
    """

    @property
    def table(self) -> LatencyTable:
        """The profile whose subnets and batch sizes the policy answers with."""
        ...

    def decide(self, context: Context) -> tuple[int, int] | None:
        """Answer (subnet index, batch size), or None to leave the worker idle until something changes."""
        ...
