"""The client of the replicas: what a server has in place of a batcher."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from subnetact import errors
from subnetact.cluster.arrays import to_arrays, to_tensors
from subnetact.cluster.deadline import Deadline
from subnetact.cluster.replica import Reply
from subnetact.errors import BatcherClosed, BatchFailed, DeadlinePassed, InvalidRequest, QueueFull
from subnetact.serving.live.answers import Answer
from subnetact.serving.live.prometheus import Collector
from subnetact.serving.live.stats import BatcherStats, Counters

__all__ = ["Call", "ReplicaClient"]

LATE_MS = 1000.0
"""How long after its deadline the answer to a request is waited for, in ms."""
DRAIN_S = 30.0

#: sends the rows of one request to some replica, as `EngineReplica.answer` takes them
Call = Callable[..., Awaitable[Reply]]


class ReplicaClient:
    """Sends requests to replicas and counts what becomes of them. Use one event loop.

    Every request has one outcome: an answer or a typed error. If the replica of a request dies, the request
    is sent once more, with the time that it has left.

    Args:
        call: sends one request to a replica that it chooses.
        accuracy: profiled accuracy per subnet id, in percent.
        died: the exceptions that say that the replica is lost.
        full: the exceptions that say that no replica can take the request now.
        check: refuses inputs that no replica could run. If None, the replicas do.
        replicas: returns how many replicas run, and how many should.
        max_per_replica: number of inputs without an answer per replica beyond which further requests are
            refused.

    Attributes:
        sender: name of this process among those that send requests.
    """

    def __init__(
        self,
        call: Call,
        accuracy: Mapping[int, float],
        *,
        died: tuple[type[BaseException], ...] = (),
        full: tuple[type[BaseException], ...] = (),
        check: Callable[[Any], None] | None = None,
        replicas: Callable[[], tuple[int, int]] = lambda: (1, 1),
        max_per_replica: int = 10_000,
    ) -> None:
        self.sender = uuid.uuid4().hex[:16]
        self._call = call
        self._accuracy = dict(accuracy)
        self._died = died
        self._full = full
        self._check = check
        self._replicas = replicas
        self._max_per_replica = max_per_replica
        self._outstanding = 0
        self._turned_away = 0
        self._counters = Counters()
        self._closed = False

    @property
    def accuracy(self) -> Mapping[int, float]:
        """Profiled accuracy per subnet id, in percent."""
        return self._accuracy

    async def infer_rows(
        self,
        xs: Sequence[Any],
        deadline_ms: float,
        min_accuracy: float | None = None,
        priority: int | None = None,
        client: str = "",
    ) -> Sequence[Answer]:
        """Send the rows of one request to one replica and wait for the answers.

        Args:
            xs: the inputs, without a batch dimension.
            deadline_ms: time that the request is given from now, in ms.
            min_accuracy: minimum accuracy of the answering subnets, in percent. If None, any may answer.
            priority: the higher, the more important.
            client: name of the client.

        Returns:
            The answers in order.

        Raises:
            InvalidRequest: the request is malformed.
            QueueFull: too many requests wait, or no replica can meet the deadline any more.
            DeadlinePassed: the deadline passed.
            BatchFailed: the network failed on the request, or two replicas died with it.
            BatcherClosed: the client is closed.
        """
        counters, count = self._counters, len(xs)
        try:
            if self._closed:
                raise BatcherClosed("the server is closing; send the request to another one")
            if self._check is not None:
                for x in xs:
                    self._check(x)
            up, _ = self._replicas()
            if self._outstanding + count > self._max_per_replica * max(1, up):
                self._turned_away += count
                raise QueueFull(f"{self._outstanding} inputs wait for answers; retry later")
            counters.submitted += count
            self._outstanding += count
            try:
                answers = await self._send(xs, deadline_ms, min_accuracy, priority, client)
            finally:
                self._outstanding -= count
        except QueueFull:
            counters.full += count
            counters.refused += count
            raise
        except InvalidRequest:
            counters.refused += count
            raise
        except DeadlinePassed:
            counters.dropped += count
            raise
        except asyncio.CancelledError:
            counters.cancelled += count
            raise
        except BatcherClosed:
            counters.closed += count
            raise
        except BatchFailed:
            counters.failed += count
            raise
        except Exception as error:
            counters.failed += count
            raise BatchFailed("the replica failed") from error
        for answer in answers:
            self._note(answer)
        return answers

    async def _send(
        self,
        xs: Sequence[Any],
        deadline_ms: float,
        min_accuracy: float | None,
        priority: int | None,
        client: str,
    ) -> list[Answer]:
        started = time.perf_counter()
        arrays = [to_arrays(x) for x in xs]
        for again in (False, True):
            left_ms = deadline_ms - (time.perf_counter() - started) * 1e3
            if left_ms <= 0.0:
                raise DeadlinePassed("the replica of the request died, and no time is left for another one")
            sent = self._call(
                xs=arrays,
                deadline=tuple(Deadline.after(left_ms)),
                sender=self.sender,
                min_accuracy=min_accuracy,
                priority=priority,
                client=client,
                turned_away=self._turned_away,
            )
            told, self._turned_away = self._turned_away, 0
            try:
                reply = Reply(*await asyncio.wait_for(sent, (left_ms + LATE_MS) * 1e-3))
            except asyncio.TimeoutError:
                raise DeadlinePassed(f"no replica answered within {deadline_ms:g} ms") from None
            except QueueFull:  # by the router: no replica has heard of it
                self._turned_away += told + len(xs)
                raise
            except self._full as error:
                self._turned_away += told + len(xs)
                raise QueueFull("no replica can answer in time; retry later") from error
            except self._died as error:
                if again:
                    raise BatchFailed("two replicas died with this request") from error
                self._counters.retried += len(xs)
                continue
            if reply.error:
                raise _error(reply)
            spent_ms = (time.perf_counter() - started) * 1e3
            return [_answer(fields, spent_ms, deadline_ms) for fields in reply.answers]
        raise AssertionError("unreachable")

    def _note(self, answer: Answer) -> None:
        counters = self._counters
        counters.served_by[answer.subnet] += 1
        counters.batch_sizes[answer.batch_size] += 1
        counters.latency_ms.add(answer.latency_ms)
        if answer.met:
            counters.met += 1
            counters.accuracy_sum += answer.accuracy
        else:
            counters.late += 1

    def stats(self) -> BatcherStats:
        """Return the counters of the requests that this process sent; `workers` are replicas."""
        up, wanted = self._replicas()
        return self._counters.snapshot(
            queued=self._outstanding,
            running=0,
            replanned=0,
            workers=wanted,
            workers_up=up,
            batch_limits={},
            correction=1.0,
            drifted={},
        )

    def prometheus(self) -> str:
        """Return the counters in Prometheus' text format.

        Raises:
            MissingExtra: prometheus_client is not installed.
        """
        return Collector(self).text()

    def close(self, drain: bool = True) -> None:
        """Refuse new requests.

        Args:
            drain: whether to wait until every request has its outcome. The event loop must run elsewhere.
        """
        self._closed = True
        end = time.monotonic() + DRAIN_S
        while drain and self._outstanding and time.monotonic() < end:
            time.sleep(0.01)


def _answer(fields: Sequence[Any], spent_ms: float, deadline_ms: float) -> Answer:
    answer = Answer(*fields)
    return answer._replace(output=to_tensors(answer.output), latency_ms=spent_ms, met=spent_ms <= deadline_ms)


def _error(reply: Reply) -> Exception:
    kind = getattr(errors, reply.error, None)
    if isinstance(kind, type) and issubclass(kind, errors.RequestError):
        return kind(reply.message)
    return BatchFailed(f"the replica failed: {reply.error}")
