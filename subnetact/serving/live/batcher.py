"""The live batcher: requests with deadlines in, subnets chosen per batch, answers out."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from types import TracebackType
from typing import Any

from subnetact.errors import (
    BatcherClosed,
    InvalidRequest,
    PolicyError,
    ProfileMismatch,
)
from subnetact.latency.file import document
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.core import Core
from subnetact.serving.live.corrections import Corrections
from subnetact.serving.live.decision_log import DecisionLog
from subnetact.serving.live.prometheus import exposition
from subnetact.serving.live.requests import (
    Answer,
    AnswerFuture,
    Decided,
    Runner,
    settle,
)
from subnetact.serving.live.stats import BatcherStats
from subnetact.serving.live.workers import Workers
from subnetact.serving.policies import SlackFit
from subnetact.serving.scheduling.checks import check_count, check_policy
from subnetact.serving.scheduling.context import Policy

__all__ = ["Answer", "Batcher", "BatcherStats", "Decided", "Runner"]


class Batcher:
    """Serve subnets under deadlines, from threads and from asyncio, on one engine or on several.

    Requests wait in one earliest-deadline-first queue. Whenever a worker is idle the policy picks
    (subnet, batch size), and the most urgent requests run together. Every accepted request gets exactly
    one outcome: an `Answer`, or a typed error. Use it as a context manager.

    Faults stay where they are. A batch that raises is split until the guilty request is alone. A worker
    that hangs or dies is replaced, and its requests get a second try, each alone, if their deadlines
    allow; what a hung call returns later is discarded. Running out of memory halves the largest batch of
    that subnet. While a worker is down the policy sees fewer workers, so accuracy gives way first.

    Its threads are named `subnetact-batcher-0`, `-1` and so on, and `subnetact-batcher-supervisor`.

    Latencies are learned: the policy plans with what batches really take here (about the 97th percentile
    of each subnet and batch size), not with the table alone.

    Args:
        engine: the runner (see `Runner`), or several with the same subnets: one worker each, one queue.
            Subnet keys must be those of the policy's table.
        policy: decides; None = SlackFit over `table` with `slo_ms`.
        max_queue: waiting requests at which `QueueFull` is raised.
        table: the profile; None = the policy's.
        workers: threads that run batches at the same time, on one engine. On CUDA two let the copies of one
            batch overlap with the other's computation.
        hopeless: requests no subnet can answer in time any more: `drop` (answered at once with
            `DeadlinePassed`), `defer` (served when nothing live waits) or `serve` (kept at the head).
        slo_ms: the usual time a request is given; policies that plan ahead use it. None = the policy's own.
        on_decision: called with a `Decided` before each batch runs, from the worker thread; keep it quick.
        clock_ms: a monotonic clock, ms.
        threads_per_worker: CPU threads of each worker, by `engine.enter_worker(threads)`. None = as it is.
        watchdog_ms: time after which a batch's worker is taken to hang; inf = never; None = 20 times the
            expected latency, at least 1 s, and 30 s where a subnet runs at a batch size for the first time.
        check_finite: refuse inputs with values that are not finite, by `engine.check(x, finite=True)`.
        learn: whether the policy plans with learned latencies.
        decision_log: a file for every arrival and decision, as JSON lines; it is replaced.

    Raises:
        ProfileMismatch: the table is of other subnets than the engine.
        PolicyError: an argument out of range.
        OSError: the decision log cannot be written.
    """

    def __init__(
        self,
        engine: Runner | Sequence[Runner],
        *,
        policy: Policy | None = None,
        max_queue: int = 10_000,
        table: LatencyTable | None = None,
        workers: int = 1,
        hopeless: str = "drop",
        slo_ms: float | None = None,
        on_decision: Callable[[Decided], None] | None = None,
        clock_ms: Callable[[], float] | None = None,
        threads_per_worker: int | None = None,
        watchdog_ms: float | None = None,
        check_finite: bool = False,
        learn: bool = True,
        decision_log: str | os.PathLike[str] | None = None,
    ) -> None:
        if policy is None:
            if table is None:
                raise PolicyError("policy: none given; give a policy, or a table to make one from")
            policy = SlackFit(table, slo_ms=36.0 if slo_ms is None else slo_ms)
        check_policy(policy)
        table = table or policy.table
        if table.subnets != policy.table.subnets or table.batch_sizes != policy.table.batch_sizes:
            raise ProfileMismatch(
                "table: the policy was made for other subnets or batch sizes; make it from this table"
            )
        check_count(max_queue, "max_queue")
        engines = _one_a_worker(engine, workers)
        for runner in engines:
            _check_runner(runner, table, threads_per_worker, check_finite)
        usual_slo = slo_ms if slo_ms is not None else getattr(policy, "slo_ms", 36.0)
        if not 0.0 < usual_slo < math.inf:
            raise PolicyError(f"slo_ms: {usual_slo} must be finite and > 0")
        if watchdog_ms is not None and not watchdog_ms > 0.0:
            raise PolicyError(f"watchdog_ms: {watchdog_ms} must be > 0; math.inf turns it off")
        check: Any = engines[0].check
        self._check = partial(check, finite=True) if check_finite else check
        self._accuracy = dict(enumerate(table.accuracy))
        self._best_accuracy = max(
            percent
            for percent, row in zip(table.accuracy, table.latency_ms.tolist(), strict=True)
            if any(ms == ms for ms in row)
        )
        clock_ms = clock_ms or _monotonic_ms
        self._core = Core(
            policy,
            table,
            workers=len(engines),
            max_queue=max_queue,
            hopeless=hopeless,
            slo_ms=usual_slo,
            clock_ms=clock_ms,
            watchdog_ms=watchdog_ms,
            learn=learn,
        )
        self._log: DecisionLog | None = None
        if decision_log is not None:
            facts = {"workers": len(engines), "hopeless": hopeless, "slo_ms": usual_slo}
            header = {**facts, "policy": type(policy).__name__, "table": document(table)}
            self._log = self._core.ledger.log = DecisionLog(decision_log, header, clock_ms())
        self._admit = self._core.admit
        self._workers = Workers(self._core, engines, on_decision, threads_per_worker, self._log)

    def submit(
        self, x: Any, deadline_ms: float, min_accuracy: float | None = None, priority: int | None = None
    ) -> AnswerFuture:
        """Queue one input; the future ends with an `Answer` or a typed error.

        Cancelling the future takes the request off the queue, or discards the answer if it runs already.
        Callbacks of the future are called in a worker's thread: keep them quick.

        Args:
            x: one input, without a batch dimension, as the engine's `check` accepts it.
            deadline_ms: time the request is given, from now.
            min_accuracy: least profiled accuracy, percent, of the subnet that may answer.
            priority: a whole number, higher is more important; None = 0. Deadlines alone order the queue.
                Only when not all can be met, requests of lower priority are given up first, by the
                hopeless rule (under `serve` priority has no effect).

        Raises:
            InvalidRequest: a deadline that is not finite and > 0, a floor no subnet reaches, a priority that
                is no whole number, or an input the engine refuses.
            QueueFull: `max_queue` requests wait already.
            BatcherClosed: the batcher was closed, or is draining.

        The future may end with `DeadlinePassed`, `BatchFailed` (`WorkerHung` is one) or `BatcherClosed`.
        """
        floor = self._checked(x, deadline_ms, min_accuracy, priority)
        future = AnswerFuture()
        request = self._admit(x, deadline_ms, floor, priority or 0, future, None)
        future.on_cancel(partial(self._core.withdraw, request))
        return future

    async def infer(
        self, x: Any, deadline_ms: float, min_accuracy: float | None = None, priority: int | None = None
    ) -> Answer:
        """Queue one input and wait for its answer; arguments and errors as for `submit`.

        Cancelling the call takes the request off the queue.

        Raises:
            DeadlinePassed: no subnet could answer in time any more.
            BatchFailed: the engine raised on this request; the cause is chained.
            WorkerHung: two workers hung over this request.
        """
        loop = asyncio.get_running_loop()
        floor = self._checked(x, deadline_ms, min_accuracy, priority)
        future: asyncio.Future[Answer] = loop.create_future()
        request = self._admit(x, deadline_ms, floor, priority or 0, future, loop)
        try:
            return await future
        except asyncio.CancelledError:
            self._core.withdraw(request)
            raise

    def stats(self) -> BatcherStats:
        """A consistent snapshot of counters and histograms."""
        return self._core.stats()

    def prometheus(self) -> str:
        """The snapshot in Prometheus' text format, for a `/metrics` endpoint."""
        return exposition(self.stats(), self._accuracy)

    @property
    def corrections(self) -> Corrections:
        """What was learned about this machine's latencies: look at it, save it, load it."""
        return self._core.learner.corrections

    def replan(self) -> bool:
        """Plan with what was learned so far at once, for example after `corrections.load(path)`.

        Without this call the batcher does the same by itself, usually within a fraction of a second of the
        next batch. Any thread may call it, but not a policy while it decides.

        Returns:
            Whether the policy was given other latencies. It is not if they moved by less than 5 %, or if the
            batcher has done so by itself just before; `stats().replanned` counts both.
        """
        return self._core.replan(at_once=True)

    @property
    def closing(self) -> bool:
        """Whether new requests are refused, because `drain` or `close` was called."""
        return self._core.closing

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait until every accepted one has its outcome.

        It blocks: in a coroutine, `await asyncio.to_thread(batcher.drain)`. In a future's callback it does
        not wait, for the thread that called that has more to deliver.

        Args:
            timeout: seconds to wait at most; None = as long as it takes.

        Returns:
            Whether all have. The workers go on; call `close` next.
        """
        self._core.close_door()
        return self._core.wait_until_drained(0.0 if self._workers.is_current() else timeout)

    def close(self, drain: bool = True) -> None:
        """Take no more requests, finish (or, without `drain`, refuse) those queued, and end the threads.

        Batches that run are finished. A thread that hangs is not waited for; it ends when its call returns.
        """
        self._core.close_door()
        if not drain:
            outcomes = self._core.abandon_queue()
            if outcomes:
                try:
                    settle(outcomes)
                finally:
                    self._core.delivered()
        self._workers.join()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Batcher:
        if self._core.closing:
            raise BatcherClosed("the batcher is closed; open another one")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=error is None)

    async def __aenter__(self) -> Batcher:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close, error is None)

    def _checked(self, x: Any, deadline_ms: float, min_accuracy: float | None, priority: int | None) -> float:
        """The accuracy floor of a request that can be accepted."""
        try:
            if type(deadline_ms) is not float and not _is_number(deadline_ms):
                raise InvalidRequest(
                    f"deadline_ms: {deadline_ms!r} is not a number; give milliseconds from now"
                )
            if type(deadline_ms) is not float:
                _as_float(deadline_ms, "deadline_ms")
            if not 0.0 < deadline_ms < math.inf:
                raise InvalidRequest(
                    f"deadline_ms: {deadline_ms} must be finite and > 0, in milliseconds from now"
                )
            if min_accuracy is None:
                floor = 0.0
            else:
                if not _is_number(min_accuracy):
                    raise InvalidRequest(f"min_accuracy: {min_accuracy!r} is not a number; give a percentage")
                floor = _as_float(min_accuracy, "min_accuracy")
                if not floor <= self._best_accuracy:
                    raise InvalidRequest(
                        f"min_accuracy: {min_accuracy} % is above the best subnet "
                        f"({self._best_accuracy:g} %); ask for less"
                    )
            if priority is not None and type(priority) is not int:
                raise InvalidRequest(f"priority: {priority!r} is not an int; the higher, the more important")
            self._check(x)
        except BaseException:
            self._core.refused()
            raise
        return floor


def _one_a_worker(engine: Runner | Sequence[Runner], workers: int) -> list[Runner]:
    check_count(workers, "workers")
    if isinstance(engine, (list, tuple)):
        if not engine:
            raise PolicyError("engine: an empty list; give one engine, or one for each device")
        if workers not in (1, len(engine)):
            raise PolicyError(f"workers: {workers} for {len(engine)} engines; each engine is one worker")
        return list(engine)
    return [engine] * workers  # type: ignore[list-item]


def _check_runner(engine: Any, table: LatencyTable, threads: int | None, finite: bool) -> None:
    if not callable(getattr(engine, "run", None)) or not hasattr(engine, "keys"):
        raise PolicyError(
            f"engine: {type(engine).__name__} has no run(...) and keys; give Engine(supernet, specs), an "
            "ExportedEngine, or an own one, see help(subnetact.serving.requests.Runner)"
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
    if threads is not None:
        check_count(threads, "threads_per_worker")
        if not callable(getattr(engine, "enter_worker", None)):
            raise PolicyError(
                f"threads_per_worker: {type(engine).__name__} has no method enter_worker(threads); add "
                "it, or leave threads_per_worker out"
            )
    if finite:
        try:
            inspect.signature(engine.check).bind(None, finite=True)
        except TypeError as error:
            raise PolicyError(
                f"check_finite: {type(engine).__name__}.check(x) takes no `finite`; add it, or leave "
                "check_finite out"
            ) from error


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _as_float(value: float, name: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        kind = type(value).__name__
        raise InvalidRequest(f"{name}: an {kind} beyond every float; give a smaller one") from error


def _monotonic_ms() -> float:
    return time.perf_counter_ns() * 1e-6


def _differing_keys(engine: Sequence[str], table: Sequence[str]) -> str:
    for i, (mine, theirs) in enumerate(zip(engine, table, strict=False)):
        if mine != theirs:
            return f"table: subnet {i} is {theirs!r}, but the engine's is {mine!r}; profile this engine"
    return f"table: {len(table)} subnets, but the engine has {len(engine)}; profile this engine"
