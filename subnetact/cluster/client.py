"""The client of the replicas: what a front has in place of a batcher."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from subnetact.cluster.replica import Reply, to_arrays, to_tensors
from subnetact.errors import BatcherClosed, BatchFailed, DeadlinePassed, InvalidRequest, QueueFull
from subnetact.serve.base_app import unix_ms
from subnetact.serving.live.answers import Answer
from subnetact.serving.live.batcher import monotonic_ms
from subnetact.serving.live.stats import OUTCOMES, BatcherStats, Counters

LATE_MS = 1000.0  # how long after its deadline the answer to a request is waited for
COUNTERS = {
    QueueFull: "refused",
    InvalidRequest: "refused",
    DeadlinePassed: "dropped",
    BatcherClosed: "closed",
    asyncio.CancelledError: "cancelled",
}
"""The counter of every error; those of all others is `failed`."""


@dataclass(eq=False)
class ReplicaClient:
    """Sends requests to replicas from one event loop, once more if a replica dies, and counts the outcomes.

    `call` sends the rows of one request to a replica, as `EngineReplica.answer` takes them; the exceptions
    `died` say that it is lost, and `full` that none can take the request now. `check` refuses inputs that no
    replica could run. `replicas` returns how many run, and how many should; more than `max_queue` inputs
    without an answer for each are refused, and one gets all rows of a request. `clock_ms` returns a time that
    never falls.
    """

    call: Callable[..., Awaitable[Reply]]
    accuracy: Mapping[int, float]
    _: KW_ONLY
    died: tuple[type[BaseException], ...] = ()
    full: tuple[type[BaseException], ...] = ()
    check: Callable[[Any], None] = lambda _: None
    replicas: Callable[[], tuple[int, int]] = lambda: (1, 1)
    max_queue: int = 10_000
    clock_ms: Callable[[], float] = monotonic_ms

    def __post_init__(self) -> None:
        self._outstanding, self._closed, self._counters = 0, False, Counters(Counter())
        self._counts = self._counters.counts

    async def infer_rows(self, xs: Sequence[Any], deadline_ms: float, **ask: Any) -> Sequence[Answer]:
        """Return the answers to the rows of one request, in order; see `subnetact.serve.app.infer_rows`."""
        counters, count = self._counters, len(xs)
        try:
            answers = await self._send(xs, deadline_ms, ask)
        except BaseException as error:
            outcome = COUNTERS.get(type(error), "failed")
            self._counts[outcome] += count
            self._counts["full"] += count * isinstance(error, QueueFull)
            if outcome != "failed" or isinstance(error, BatchFailed) or not isinstance(error, Exception):
                raise
            raise BatchFailed(f"the replica failed: {type(error).__name__}") from error
        for answer in answers:
            counters.answered(answer.subnet, answer.accuracy, [answer.latency_ms], answer.met)
            counters.batch_sizes[answer.batch_size] += 1
        return answers

    async def _send(self, xs: Sequence[Any], deadline_ms: float, ask: dict[str, Any]) -> list[Answer]:
        """Return the answers, or raise the error of the request."""
        started_ms = self.clock_ms()
        if self._closed:
            raise BatcherClosed("the server is closing; send the request to another one")
        for x in xs:
            self.check(x)
        if self._outstanding + len(xs) > self.max_queue * max(1, self.replicas()[0]):
            raise QueueFull(f"{self._outstanding} inputs wait for answers; retry later")
        self._outstanding += len(xs)
        try:
            reply = await self._reply([to_arrays(x) for x in xs], started_ms + deadline_ms, ask)
        except asyncio.TimeoutError:
            raise DeadlinePassed(f"no replica answered within {deadline_ms:g} ms") from None
        finally:
            self._outstanding -= len(xs)
        if isinstance(reply, Exception):
            raise reply
        spent_ms = self.clock_ms() - started_ms
        own: dict[str, Any] = {"latency_ms": spent_ms, "met": spent_ms <= deadline_ms}
        return [answer._replace(output=to_tensors(answer.output), **own) for answer in reply]

    async def _reply(self, xs: list[Any], end_ms: float, ask: dict[str, Any], last: bool = False) -> Reply:
        """Return the reply of a replica, or, unless it is the `last`, of another one if it dies."""
        left_ms = end_ms - self.clock_ms()
        if left_ms <= 0.0:
            raise DeadlinePassed("the replica of the request died, and no time is left for another one")
        sent = self.call(xs=xs, left_ms=left_ms, due_ms=unix_ms() + left_ms, **ask)
        try:
            return await asyncio.wait_for(sent, (left_ms + LATE_MS) * 1e-3)
        except self.full as error:
            raise QueueFull("no replica takes requests now; retry later") from error
        except self.died as error:
            if last:
                raise BatchFailed("two replicas died with this request") from error
            self._counts["retried"] += len(xs)
            return await self._reply(xs, end_ms, ask, last=True)

    def stats(self) -> BatcherStats:
        """Return the counters of the requests that this process sent; `workers` are replicas."""
        up, wanted = self.replicas()
        self._counts["submitted"] = self._outstanding + sum(self._counts[how] for how in OUTCOMES)
        return self._counters.snapshot(queued=self._outstanding, workers=wanted, workers_up=up)

    def close(self, drain: bool = True) -> None:  # noqa: ARG002
        """Refuse new requests; Ray ends a front when its requests have their answers."""
        self._closed = True
