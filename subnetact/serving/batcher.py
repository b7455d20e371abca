"""The live batcher: requests with deadlines in, subnets chosen per batch, answers out."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    InvalidRequest,
    PolicyError,
    ProfileMismatch,
    QueueFull,
)
from subnetact.latency import LatencyTable
from subnetact.serving.checks import check_count
from subnetact.serving.context import Policy
from subnetact.serving.dispatch import Batch, Dispatcher
from subnetact.serving.policies import SlackFit
from subnetact.serving.requests import Answer, BatcherStats, Decided, Outcome, Request, Runner, settle

__all__ = ["Answer", "Batcher", "BatcherStats", "Decided", "Runner"]


class Batcher:
    """Serve an engine's subnets under deadlines, from threads and from asyncio.

    Requests wait in one earliest-deadline-first queue. Whenever a worker is idle the policy picks
    (subnet, batch size), and the most urgent requests run together. Use it as a context manager.

    Args:
        engine: the runner; see `Runner`. Its keys must be those of the policy's table.
        policy: decides; None = SlackFit over `table` with `slo_ms`.
        max_queue: waiting requests at which `QueueFull` is raised.
        table: the profile; None = the policy's.
        workers: threads that run batches at the same time on the engine.
        hopeless: `drop` (answered at once with `DeadlinePassed`), `defer` or `serve`.
        slo_ms: the usual time a request is given; policies that plan ahead use it. None = the policy's own.
        on_decision: called with a `Decided` before each batch runs, from the worker thread; keep it quick.
        clock_ms: a monotonic clock, ms.

    Raises:
        ProfileMismatch: the table is of other subnets than the engine.
        PolicyError: an argument out of range.
    """

    def __init__(
        self,
        engine: Runner,
        *,
        policy: Policy | None = None,
        max_queue: int = 10_000,
        table: LatencyTable | None = None,
        workers: int = 1,
        hopeless: str = "drop",
        slo_ms: float | None = None,
        on_decision: Callable[[Decided], None] | None = None,
        clock_ms: Callable[[], float] | None = None,
    ) -> None:
        if policy is None:
            if table is None:
                raise PolicyError("policy: none given; give a policy, or a table to make one from")
            policy = SlackFit(table, slo_ms=36.0 if slo_ms is None else slo_ms)
        table = table or policy.table
        if table.subnets != policy.table.subnets or table.batch_sizes != policy.table.batch_sizes:
            raise ProfileMismatch(
                "table: the policy was made for other subnets or batch sizes; make it from this table"
            )
        keys = tuple(engine.keys)
        if keys != table.subnets:
            raise ProfileMismatch(_differing_keys(keys, table.subnets))
        stamped = table.stamp.get("supernet")
        own = getattr(engine, "fingerprint", stamped)
        if stamped is not None and own != stamped:
            raise ProfileMismatch(
                f"table: measured on supernet {stamped}, the engine's is {own}; profile this engine"
            )
        check_count(max_queue, "max_queue")
        check_count(workers, "workers")
        usual_slo = slo_ms if slo_ms is not None else getattr(policy, "slo_ms", 36.0)
        if not 0.0 < usual_slo < math.inf:
            raise PolicyError(f"slo_ms: {usual_slo} must be finite and > 0")
        self._engine = engine
        self._best_accuracy = max(table.accuracy)
        self._accuracy = table.accuracy
        self._max_queue = max_queue
        self._on_decision = on_decision
        self._clock_ms = clock_ms or _monotonic_ms
        self._observe: Any = getattr(policy, "observe", None)
        self._free_at = [0.0] * workers
        self._dropped_now: list[Request] = []
        self._dispatcher: Dispatcher[Request] = Dispatcher(
            policy, self._free_at, usual_slo, hopeless, self._dropped_now.extend, table
        )
        self._changed = threading.Condition(threading.Lock())
        self._sleeping = 0
        self._closing = False
        self._counts: Counter[str] = Counter()
        self._accuracy_sum = 0.0
        self._served_by: Counter[int] = Counter()
        self._batch_sizes: Counter[int] = Counter()
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"subnetact-batcher-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, x: Any, deadline_ms: float, min_accuracy: float | None = None
    ) -> concurrent.futures.Future[Answer]:
        """Queue one input; the future ends with an `Answer` or a typed error.

        Args:
            x: one input, without a batch dimension, as the engine's `check` accepts it.
            deadline_ms: time the request is given, from now.
            min_accuracy: least profiled accuracy, percent, of the subnet that may answer.

        Raises:
            InvalidRequest: a deadline that is not finite and > 0, a floor no subnet reaches, or an input
                the engine refuses.
            QueueFull: `max_queue` requests wait already.
            BatcherClosed: the batcher was closed.

        The future may end with `DeadlinePassed`, `BatchFailed` or `BatcherClosed`.
        """
        future: concurrent.futures.Future[Answer] = concurrent.futures.Future()
        self._enqueue(x, deadline_ms, min_accuracy, future, None)
        return future

    async def infer(self, x: Any, deadline_ms: float, min_accuracy: float | None = None) -> Answer:
        """Queue one input and wait for its answer; arguments and errors as for `submit`.

        Cancelling the call takes the request off the queue.

        Raises:
            DeadlinePassed: no subnet could answer in time any more.
            BatchFailed: the engine raised while it ran the batch; the cause is chained.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        deadline, request = self._enqueue(x, deadline_ms, min_accuracy, future, loop)
        try:
            return await future
        except asyncio.CancelledError:
            self._withdraw(deadline, request)
            raise

    def stats(self) -> BatcherStats:
        """A consistent snapshot of the counters."""
        with self._changed:
            counts = self._counts
            return BatcherStats(
                submitted=counts["submitted"],
                met=counts["met"],
                late=counts["late"],
                dropped=counts["dropped"],
                failed=counts["failed"],
                cancelled=counts["cancelled"],
                refused=counts["refused"],
                closed=counts["closed"],
                queued=len(self._dispatcher),
                batches=counts["batches"],
                accuracy_sum=self._accuracy_sum,
                served_by=dict(self._served_by),
                batch_sizes=dict(self._batch_sizes),
            )

    def close(self, drain: bool = True) -> None:
        """Take no more requests, finish (or, without `drain`, refuse) those queued, and end the threads."""
        with self._changed:
            self._closing = True
            abandoned = [] if drain else self._empty_queue()
            self._counts["closed"] += len(abandoned)
            self._changed.notify_all()
        settle(
            [(r, None, BatcherClosed("the batcher was closed before this request ran")) for r in abandoned]
        )
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=error is None)

    async def __aenter__(self) -> Batcher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close, error is None)

    def _enqueue(
        self, x: Any, deadline_ms: float, min_accuracy: float | None, future: Any, loop: Any
    ) -> tuple[float, Request]:
        try:
            try:
                deadline_ms = float(deadline_ms)
                floor = 0.0 if min_accuracy is None else float(min_accuracy)
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"deadline_ms and min_accuracy are numbers: {error}") from error
            if not 0.0 < deadline_ms < math.inf:
                raise InvalidRequest(f"deadline_ms: {deadline_ms} must be finite and > 0")
            if not floor <= self._best_accuracy:
                raise InvalidRequest(
                    f"min_accuracy: {min_accuracy} % is above the best subnet ({self._best_accuracy} %)"
                )
            self._engine.check(x)
        except BaseException:
            with self._changed:
                self._counts["refused"] += 1
            raise
        with self._changed:
            now = self._clock_ms()
            if self._closing:
                raise BatcherClosed("the batcher is closed; open another one")
            dispatcher = self._dispatcher
            if len(dispatcher) >= self._max_queue:
                self._counts["refused"] += 1
                raise QueueFull(f"{self._max_queue} requests wait already; retry later or raise max_queue")
            request = Request(x, now, future, loop)
            deadline = now + deadline_ms
            dispatcher.queue.push(deadline, request, floor)
            dispatcher.arrivals.append(now)
            self._counts["submitted"] += 1
            if self._sleeping:
                self._changed.notify()
        return deadline, request

    def _withdraw(self, deadline: float, request: Request) -> None:
        with self._changed:
            dispatcher = self._dispatcher
            if dispatcher.queue.remove(deadline, request) or dispatcher.late.remove(deadline, request):
                self._counts["cancelled"] += 1

    def _empty_queue(self) -> list[Request]:
        dispatcher = self._dispatcher
        return dispatcher.queue.take(len(dispatcher.queue))[1] + dispatcher.late.take(len(dispatcher.late))[1]

    def _work(self, worker: int) -> None:
        while True:
            batch: Batch | None = None
            outcomes: list[Outcome] = []
            with self._changed:
                while batch is None and not outcomes:
                    if len(self._dispatcher):
                        batch, outcomes = self._decide(worker)
                    elif self._closing:
                        return
                    if batch is None and not outcomes:
                        self._sleeping += 1
                        self._changed.wait(timeout=0.05 if len(self._dispatcher) else None)
                        self._sleeping -= 1
            settle(outcomes)
            if batch is not None:
                self._run(batch)

    def _decide(self, worker: int) -> tuple[Batch | None, list[Outcome]]:
        """Ask for the next batch. Called under the lock."""
        now = self._clock_ms()
        outcomes: list[Outcome] = []
        batch: Batch | None = None
        try:
            batch = self._dispatcher.next_batch(now, worker)
        except Exception as error:
            failed = self._empty_queue()
            self._counts["failed"] += len(failed)
            outcomes += [
                (r, None, _chained(BatchFailed(f"the policy failed: {error}"), error)) for r in failed
            ]
        if self._dropped_now:
            self._counts["dropped"] += len(self._dropped_now)
            outcomes += [
                (
                    r,
                    None,
                    DeadlinePassed(
                        f"no subnet could answer in time any more after {now - r.accepted_ms:.1f} ms"
                    ),
                )
                for r in self._dropped_now
            ]
            self._dropped_now.clear()
        if batch is not None:
            self._free_at[worker] = now + batch.expected_ms
            self._counts["batches"] += 1
        return batch, outcomes

    def _run(self, batch: Batch) -> None:
        requests: list[Request] = batch.items
        kept = [
            i
            for i, r in enumerate(requests)
            if (r.future.set_running_or_notify_cancel() if r.loop is None else not r.future.cancelled())
        ]
        cancelled = len(requests) - len(kept)
        if cancelled:
            with self._changed:
                self._counts["cancelled"] += cancelled
            requests = [requests[i] for i in kept]
            batch = batch._replace(deadlines_ms=[batch.deadlines_ms[i] for i in kept])
        if not requests:
            return
        started = self._clock_ms()
        try:
            if self._on_decision is not None:
                self._on_decision(
                    Decided(
                        started, batch.queued, batch.slack_ms, batch.subnet, batch.batch_size, len(requests)
                    )
                )
            outputs = self._engine.run(batch.subnet, [r.x for r in requests], batch.batch_size)
            if len(outputs) != len(requests):
                raise ValueError(f"the engine returned {len(outputs)} outputs for {len(requests)} inputs")
        except Exception as error:
            with self._changed:
                self._counts["failed"] += len(requests)
            message = f"subnet {batch.subnet} failed on a batch of {len(requests)}: {error}"
            settle([(r, None, _chained(BatchFailed(message), error)) for r in requests])
            return
        finished = self._clock_ms()
        accuracy = self._accuracy[batch.subnet]
        met = 0
        outcomes: list[Outcome] = []
        for request, output, deadline in zip(requests, outputs, batch.deadlines_ms, strict=True):
            in_time = finished <= deadline
            met += in_time
            answer = Answer(
                output, batch.subnet, accuracy, finished - request.accepted_ms, in_time, batch.batch_size
            )
            outcomes.append((request, answer, None))
        with self._changed:
            self._counts["met"] += met
            self._counts["late"] += len(requests) - met
            self._accuracy_sum += met * accuracy
            self._served_by[batch.subnet] += len(requests)
            self._batch_sizes[batch.batch_size] += 1
            if self._observe is not None:
                self._observe(batch.subnet, batch.batch_size, batch.expected_ms, finished - started)
        settle(outcomes)


def _chained(error: BatchFailed, cause: BaseException) -> BatchFailed:
    error.__cause__ = cause
    return error


def _monotonic_ms() -> float:
    return time.perf_counter_ns() * 1e-6


def _differing_keys(engine: Sequence[str], table: Sequence[str]) -> str:
    for i, (mine, theirs) in enumerate(zip(engine, table, strict=False)):
        if mine != theirs:
            return f"table: subnet {i} is {theirs!r}, but the engine's is {mine!r}; profile this engine"
    return f"table: {len(table)} subnets, but the engine has {len(engine)}; profile this engine"
