"""What a policy sees when a worker is idle (`Context`), and what it must implement (`Policy`)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.queue import EDFQueue


class ArrivalMeter:
    """Counts the arrivals within recent windows of time; many that are older than `horizon_ms` are forgotten.

    `start_ms` is the time of the first arrival, or None before it; `total` counts all arrivals so far.
    """

    __slots__ = ("_forgotten_ms", "_horizon_ms", "_limit", "_times", "start_ms", "total")

    def __init__(self, horizon_ms: float = 2000.0) -> None:
        self._times: list[float] = []
        self._horizon_ms = horizon_ms
        self._limit = 8192
        self._forgotten_ms = -math.inf
        self.start_ms: float | None = None
        self.total = 0

    def extend(self, times_ms: Sequence[float]) -> list[float]:
        """Record several arrivals; return their times, which never fall, whatever clocks threads read."""
        last = self._times[-1] if self._times else times_ms[0]
        times = [last := max(last, ms) for ms in times_ms]
        if self.start_ms is None:
            self.start_ms = times[0]
        self._times.extend(times)
        self.total += len(times)
        if len(self._times) > self._limit:
            self._forgotten_ms = self._times[-1] - self._horizon_ms
            del self._times[: bisect_left(self._times, self._forgotten_ms)]
            self._limit = max(8192, 2 * len(self._times))
        return times

    def rate_per_ms(self, now_ms: float, window_ms: float) -> float:
        """Return the arrival rate of a window that ends now, as far back as arrivals are remembered."""
        if self.start_ms is None:
            return 0.0
        seen_ms = max(now_ms - self.start_ms, window_ms / 400.0)
        window_ms = min(window_ms, now_ms - self._forgotten_ms)
        arrived = bisect_right(self._times, now_ms) - bisect_right(self._times, now_ms - window_ms)
        return arrived / min(window_ms, seen_ms)


@dataclass(slots=True, eq=False)
class Context:
    """The state of the server at one decision.

    One object is reused for all decisions, so a policy must not keep a reference to it.

    Attributes:
        now_ms: the time.
        worker: index of the idle worker that asks.
        queued: number of requests in the queue, at least 1.
        slack_ms: the deadline of the most urgent request minus now; negative if that deadline has passed.
        slo_ms: the usual time from arrival to deadline, ms.
        floor: minimum accuracy, percent, that the most urgent request demands; 0 if it accepts any subnet.
        queue: the queue itself, for `deadline(i)` and `floor(i)`.
        arrivals: recent arrivals, for `rate_per_ms`.
        free_at_ms: when each worker is expected to be free; inf for one that is down.
        expired: number of requests that have expired so far.
    """

    queue: EDFQueue
    arrivals: ArrivalMeter
    free_at_ms: list[float]
    slo_ms: float
    _expire: Callable[[int], None] | None = None
    now_ms: float = 0.0
    worker: int = 0
    queued: int = 0
    slack_ms: float = 0.0
    floor: float = 0.0
    expired: int = 0

    @property
    def may_expire(self) -> bool:
        """Whether the policy may treat requests as expired with `expire(count)`."""
        return self._expire is not None

    def expire(self, count: int) -> None:
        """Treat the most urgent requests as expired, although a subnet could still meet their deadlines.

        A policy does so if serving them would make later requests miss their deadlines. The rule for expired
        requests drops or defers them. Nothing happens if `may_expire` is False.

        Args:
            count: how many, fewer than `queued`.
        """
        if self._expire is not None and 0 < count < self.queued:
            self._expire(count)
            self.queued -= count
            self.slack_ms = self.queue.deadline() - self.now_ms
            self.floor = self.queue.floor()


@runtime_checkable
class Policy(Protocol):
    """A scheduling policy: an attribute `table` and a method `decide`.

    A policy may keep state between decisions; one policy object serves one simulation or one batcher. These
    members are optional and are used if a policy has them:

    * `slo_ms`: the usual time from arrival to deadline, ms, that the policy was made for.
    * `switch_ms`: how long a worker is busy, ms, when it changes to another subnet.
    * `retabled(table)`: returns the same policy, with its state, for other latencies of the same subnets and
      batch sizes. The live batcher calls it when it has learned latencies.
    * `observe(subnet, batch_size, profiled_ms, measured_ms)`: called after every batch.
    * `reset()`: forgets all state; called before a simulation.
    * `preempt(context, running)`: may interrupt a running batch; see `Preemptive`. The live batcher and the
      simulator (`blocks=`) ask between two blocks of a batch, and continue it afterwards.
    * `block_length(layer_blocks, batch_ms)`: after how many layer blocks they ask; 1 without this method.
    """

    @property
    def table(self) -> LatencyTable:
        """The latency table whose subnets and batch sizes the policy answers with."""
        ...

    def decide(self, context: Context) -> tuple[int, int] | None:
        """Return the subnet and the batch size that the idle worker runs next.

        Args:
            context: the state of the server.

        Returns:
            (index of the subnet in the table, largest number of requests in the batch), or None to leave the
            worker idle until a request arrives or a worker becomes free.
        """
        ...
