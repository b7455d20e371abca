"""The client of the replicas: what a front has in place of a batcher."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
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


class ReplicaClient:
    """Sends requests to replicas from one event loop, once more if a replica dies, and counts the outcomes.

    `call` sends the rows of one request to a replica, as `EngineReplica.answer` takes them; the exceptions
    `died` say that it is lost, and `full` that none can take the request now. `check` refuses inputs that no
    replica could run. `replicas` returns how many run, and how many should; more than `max_per_replica`
    inputs without an answer for each are refused. `clock_ms` returns a time that never falls.
    """

    def __init__(
        self,
        call: Callable[..., Awaitable[Reply]],
        accuracy: Mapping[int, float],
        *,
        died: tuple[type[BaseException], ...] = (),
        full: tuple[type[BaseException], ...] = (),
        check: Callable[[Any], None] = lambda _: None,
        replicas: Callable[[], tuple[int, int]] = lambda: (1, 1),
        max_per_replica: int = 10_000,
        clock_ms: Callable[[], float] = monotonic_ms,
    ) -> None:
        self.accuracy = dict(accuracy)
        self._call, self._check, self._replicas = call, check, replicas
        self._died, self._full = died, full
        self._max_per_replica = self.max_queue = max_per_replica  # one replica gets all rows of a request
        self._clock_ms = clock_ms
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
        started_ms = self._clock_ms()
        if self._closed:
            raise BatcherClosed("the server is closing; send the request to another one")
        for x in xs:
            self._check(x)
        if self._outstanding + len(xs) > self._max_per_replica * max(1, self._replicas()[0]):
            raise QueueFull(f"{self._outstanding} inputs wait for answers; retry later")
        self._outstanding += len(xs)
        try:
            reply = await self._reply([to_arrays(x) for x in xs], started_ms + deadline_ms, deadline_ms, ask)
        finally:
            self._outstanding -= len(xs)
        if isinstance(reply, Exception):
            raise reply
        spent_ms = self._clock_ms() - started_ms
        own: dict[str, Any] = {"latency_ms": spent_ms, "met": spent_ms <= deadline_ms}
        return [answer._replace(output=to_tensors(answer.output), **own) for answer in reply]

    async def _reply(self, xs: list[Any], end_ms: float, deadline_ms: float, ask: dict[str, Any]) -> Reply:
        """Return the reply of a replica, or of another one if the first one dies."""
        for last in (False, True):
            left_ms = end_ms - self._clock_ms()
            if left_ms <= 0.0:
                raise DeadlinePassed("the replica of the request died, and no time is left for another one")
            sent = self._call(xs=xs, left_ms=left_ms, due_ms=unix_ms() + left_ms, **ask)
            try:
                return await asyncio.wait_for(sent, (left_ms + LATE_MS) * 1e-3)
            except asyncio.TimeoutError:
                raise DeadlinePassed(f"no replica answered within {deadline_ms:g} ms") from None
            except self._full as error:
                raise QueueFull("no replica takes requests now; retry later") from error
            except self._died as error:
                if last:
                    raise BatchFailed("two replicas died with this request") from error
                self._counts["retried"] += len(xs)
        raise AssertionError("unreachable")

    def stats(self) -> BatcherStats:
        """Return the counters of the requests that this process sent; `workers` are replicas."""
        up, wanted = self._replicas()
        self._counts["submitted"] = self._outstanding + sum(self._counts[how] for how in OUTCOMES)
        return self._counters.snapshot(queued=self._outstanding, workers=wanted, workers_up=up)

    def close(self, drain: bool = True) -> None:  # noqa: ARG002
        """Refuse new requests; Ray ends a front when its requests have their answers."""
        self._closed = True
