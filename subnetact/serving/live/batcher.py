"""The live batcher: takes requests with deadlines, chooses a subnet per batch, and answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import isfinite
from numbers import Real
from typing import Any

from subnetact.errors import BatcherClosed, PolicyError
from subnetact.files.documents import StrPath
from subnetact.files.fork import hear_of_forks
from subnetact.latency.origin import warn_of_doubts
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.answers import Answer, AnswerFuture
from subnetact.serving.live.context_manager import ClosedOnExit
from subnetact.serving.live.corrections import Corrections
from subnetact.serving.live.decision_log import DecisionLog
from subnetact.serving.live.driver import Driver
from subnetact.serving.live.prometheus import Collector
from subnetact.serving.live.runner import Runner, check_runner, check_start, open_processes, runner_per_worker
from subnetact.serving.live.stats import BatcherStats
from subnetact.serving.live.turns import Turns
from subnetact.serving.policies.hullfit import HullFit
from subnetact.serving.scheduling.checks import check_count, check_policy, check_positive, check_time
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.scheduling.fair_shares import FairShares
from subnetact.serving.scheduling.scheduler import Scheduler


class Batcher(ClosedOnExit):
    """Serves subnets under deadlines, from threads and from asyncio, on one engine or on several.

    Requests wait in one earliest-deadline-first queue. Whenever a worker is idle, the policy picks a subnet
    and a batch size, and the most urgent requests run together. Every accepted request gets exactly one
    outcome: an `Answer`, or a typed error. Use a batcher as a context manager (`with` or `async with`).

    A request has expired when no subnet can meet its deadline any more. It is refused, that is, never
    accepted, if it is invalid or the queue is full.

    A fault stays with the request that caused it. A batch that raises is split until that request is alone.
    A worker that hangs or dies is replaced, and each of its requests gets a second try, alone, if its
    deadline allows; what a hung call returns later is discarded. If a subnet runs out of memory, its largest
    batch size is halved. While a worker is down, the policy sees fewer workers, so that accuracy gives way
    before deadlines are missed.

    The batcher learns latencies: the policy plans with the time that batches really take here (about the
    97th percentile per subnet and batch size), not with the table alone.

    The threads are named `subnetact-batcher-0`, `-1` and so on, and `subnetact-batcher-watchdog`,
    `-messenger` and `-planner`.

    Args:
        engine: a `Runner`, for example an `Engine`, the folder of a bundle, or a list of them with the same
            subnets: each is one worker, and they share the queue. The keys of the subnets must be those of
            the policy's table.
        policy: chooses the subnet and the batch size. If None, `HullFit` over `table` with `slo_ms`.
        max_queue: number of waiting requests at which further requests are refused with `QueueFull`.
        table: the latency table. If None, the policy's. For an engine of several input shapes, a list of one
            table per shape in the order of `engine.samples`: batches then hold inputs of one shape, and
            the policy plans with the table of that shape. With one table all inputs are planned with that
            one; make it of the largest shape.
        workers: number of threads or processes that run batches at the same time on one engine. On CUDA, with
            two threads the copies of one batch overlap with the computation of another.
        process: whether the workers are processes, which are spawned. Each of them has an interpreter of
            its own, so that the model does not wait for Python code of this process; there is one copy of
            the weights, to which the tensors of the engine move. A process that dies is replaced, and its
            requests get a second try. The processes follow all changes of the engine before the next batch.
            A process runs a batch as a whole, so policies that preempt are refused. If False, the workers
            are threads.
        spares: number of processes that take over at once when a process dies or hangs. Without one, a new
            process has to start first, which takes seconds.
        expired: what becomes of a request that has expired: `drop` (answered at once with
            `DeadlinePassed`), `defer` (served when nothing else waits) or `serve` (kept at the head).
        slo_ms: the time that a request is given, in ms, if it names none; policies that plan ahead use it. If
            None, the policy's own; a policy without one needs this argument.
        clock_ms: a monotonic clock, in ms. If None, `time.perf_counter_ns`.
        threads_per_worker: number of CPU threads of each worker, set by `engine.enter_worker(threads)`. If
            None, the engine keeps its own number; worker processes then use torch's number in this process.
        watchdog_ms: time after which the worker of a batch is taken to hang, in ms; inf turns the watchdog
            off. If None, 20 times the expected latency, but at least 1 s, and at least 30 s if a worker runs
            a subnet at a batch size for the first time.
        check_finite: whether to refuse inputs with values that are not finite, by
            `engine.check(x, finite=True)`.
        check_outputs: whether requests whose output has NaN or an infinite number fail with
            `OutputNotFinite`. `stats().not_finite` counts them.
        learn: whether the policy plans with learned latencies.
        decision_log: path of a file for every request and decision, as JSON lines; an existing file is
            replaced. `python -m subnetact.simulate --replay` reads it.
        shares: how the clients named by `submit(..., client=...)` share the workers' time. If not all
            deadlines can be met, requests beyond their client's share expire first (not with
            `expired="serve"`), and they get half of the places of the queue at most, so that no client takes
            the service from the others. If None, the most urgent request runs first, whoever sent it.

    Attributes:
        max_queue: as given.
        subnets: the keys of the subnets, in the order of their ids.
        accuracy: profiled accuracy per subnet id, in percent.
        fingerprint: the engine's fingerprint of its supernet; empty if it has none.

    Raises:
        ProfileMismatch: The table is of other subnets, or of another supernet, than the engine.
        PolicyError: An argument is missing or out of range.
        EngineError: The engine cannot be sent to worker processes, or they do not start.
        MissingFile: There is no bundle in the folder. A bundle that is damaged raises `FileFormatError`.
        OSError: The decision log cannot be written.

    Example:
        >>> policy = subnetact.HullFit(table, slo_ms=36.0)
        >>> with subnetact.Batcher(engine, policy=policy) as batcher:
        ...     answer = batcher.submit(x, deadline_ms=36.0).result()
    """

    _shared: tuple[Turns, str] | None = None
    """The turns in which several batchers use the same workers, and this one's name there."""

    def __init__(
        self,
        engine: Runner | StrPath | Sequence[Runner],
        *,
        policy: Policy | None = None,
        max_queue: int = 10_000,
        table: LatencyTable | Sequence[LatencyTable] | None = None,
        workers: int = 1,
        expired: str = "drop",
        slo_ms: float | None = None,
        clock_ms: Callable[[], float] | None = None,
        threads_per_worker: int | None = None,
        watchdog_ms: float | None = None,
        check_finite: bool = False,
        check_outputs: bool = True,
        learn: bool = True,
        decision_log: StrPath | None = None,
        shares: FairShares | None = None,
        process: bool = False,
        spares: int = 1,
    ) -> None:
        tables = [] if table is None else list(table) if isinstance(table, Sequence) else [table]
        if policy is None:
            if not tables or slo_ms is None:
                raise PolicyError("policy: none given; give a policy, or a table and slo_ms to make one from")
            policy = HullFit(tables[-1], slo_ms=slo_ms)
        check_policy(policy, *tables)
        slo_ms = getattr(policy, "slo_ms", None) if slo_ms is None else slo_ms
        if slo_ms is None:
            raise PolicyError(
                f"slo_ms: {type(policy).__name__} has none; give the usual time of a request, in ms"
            )
        self.slo_ms = slo_ms = check_time(slo_ms, "slo_ms")
        tables = tables or [policy.table]
        table = tables[-1]
        check_count(max_queue, "max_queue")
        check_count(spares, "spares", least=0)
        if threads_per_worker is not None:
            check_count(threads_per_worker, "threads_per_worker")
        if watchdog_ms is not None:
            watchdog_ms = check_positive(watchdog_ms, "watchdog_ms")
        if not isinstance(process, bool):
            text = "give True for processes, which are spawned, never forked, or False for threads"
            raise PolicyError(f"process: {process!r}; {text}")
        if shares is not None and not isinstance(shares, FairShares):
            raise PolicyError(f"shares: expected FairShares(...) or None, got {type(shares).__name__}")
        clock: Any = clock_ms or monotonic_ms
        now = clock() if callable(clock) else None
        if not isinstance(now, Real) or not isfinite(now):
            raise PolicyError(f"clock_ms: {clock!r} is no function that returns a finite time, in ms")
        runners = runner_per_worker(engine, workers)
        for runner in runners:
            check_runner(runner, tables, None if process else threads_per_worker, check_finite)
            check_start(policy, runner, process)
        warn_of_doubts(tables, runners, threads_per_worker)
        check: Any = runners[0].check
        self.accuracy: Mapping[int, float] = dict(enumerate(table.accuracy))
        self.subnets, self.fingerprint = table.subnets, str(getattr(runners[0], "fingerprint", ""))
        scheduler = Scheduler(
            policy,
            tables,
            workers=len(runners),
            slo_ms=slo_ms,
            expired=expired,
            max_queue=max_queue,
            watchdog_ms=watchdog_ms,
            shares=shares,
        )
        self.max_queue = max_queue
        log: DecisionLog | None = None
        self._runners: Sequence[Any] = runners
        with ExitStack() as opened:  # what is open already is closed if a process does not start
            if decision_log is not None:
                facts = {"workers": len(runners), "expired": expired, "slo_ms": slo_ms}
                header = {**facts, "policy": type(policy).__name__, "table": table.to_json()}
                log = DecisionLog(decision_log, header, clock())
                opened.callback(log.close)
            if process:
                sizes = table.batch_sizes
                self._runners = open_processes(runners, opened, threads_per_worker, sizes, spares)
            close_all = opened.pop_all().close
        self._driver = Driver(
            scheduler,
            self._runners,
            learn=learn,
            clock_ms=clock,
            check=partial(check, finite=True) if check_finite else check,
            shape_of=getattr(runners[0], "shape_of", None),
            check_outputs=check_outputs,
            threads=threads_per_worker,
            log=log,
            on_end=close_all,
            shared=self._shared,
        )
        self._forked = False
        hear_of_forks(self)
        self._driver.start()

    def submit(
        self,
        x: Any,
        deadline_ms: float | None = None,
        *,
        min_accuracy: float | None = None,
        priority: int | None = None,
        client: str = "",
    ) -> AnswerFuture:
        """Queue one input, from any thread.

        Cancelling the future withdraws the request: it leaves the queue, or its answer is discarded if it
        already runs. Callbacks of the future are called on a worker's thread; keep them short.

        Args:
            x: one input, without a batch dimension, as the engine's `check` accepts it. It is not copied:
                if its memory is overwritten before the answer arrives, the answer is to the new values. Give
                `x.clone()` of a buffer that is filled again and again.
            deadline_ms: time that the request is given from now, in ms; 1e12 ms at most, more counts as that.
                If None, `slo_ms`.
            min_accuracy: minimum profiled accuracy, in percent, of the subnet that answers. If None, any
                subnet may answer.
            priority: a whole number, the higher the more important; 0 if None. The queue is ordered by
                deadline alone. Only if not all deadlines can be met, requests of lower priority expire first
                (with `expired="serve"`, priority has no effect).
            client: name of the client; only matters if the batcher was opened with `shares`.

        Returns:
            A future of the `Answer`. Its exception is `DeadlinePassed` if the request expired, `BatchFailed`
            if the engine or the policy raised, `WorkerHung` (a `BatchFailed`) if two workers hung with the
            request, or `BatcherClosed` if the batcher was closed before the request ran.

        Raises:
            InvalidRequest: The deadline is not finite and > 0, no subnet reaches the minimum accuracy, the
                priority is no whole number, the client is no string, or the engine refuses the input.
            QueueFull: `max_queue` requests wait already, or half as many and the client is beyond its share.
            BatcherClosed: The batcher is closed or draining, or this process was forked from its process.
        """
        future = AnswerFuture()
        request = self._driver.admit(future, None, x, deadline_ms, min_accuracy, priority, client)
        future.on_cancel(partial(self._driver.withdraw, request))
        return future

    async def infer(
        self,
        x: Any,
        deadline_ms: float | None = None,
        *,
        min_accuracy: float | None = None,
        priority: int | None = None,
        client: str = "",
    ) -> Answer:
        """Queue one input and wait for its answer. Cancelling the call withdraws the request.

        Args:
            x: one input, as in `submit`.
            deadline_ms: time that the request is given from now, in ms. If None, `slo_ms`.
            min_accuracy: as in `submit`.
            priority: as in `submit`.
            client: as in `submit`.

        Returns:
            The answer.

        Raises:
            RequestError: What `submit` raises, or what the exception of its future would be.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        request = self._driver.admit(future, loop, x, deadline_ms, min_accuracy, priority, client)
        try:
            return await future
        except asyncio.CancelledError:
            self._driver.withdraw(request)
            raise

    def check_room(self, count: int) -> None:
        """Raise `QueueFull` if so many requests that belong together could not all wait.

        They count as one refused request then.
        """
        with self._driver.lock:
            self._driver.scheduler.check_room(count)

    def stats(self) -> BatcherStats:
        """Return a consistent snapshot of the counters and histograms.

        Raises:
            BatcherClosed: This process was forked from the batcher's.
        """
        self._check_process()
        return self._driver.stats()

    def prometheus(self) -> str:
        """Return the snapshot in Prometheus' text format, for a `/metrics` endpoint.

        A process that has a registry of its own registers `Collector(batcher)` there instead, or one
        `Collector` for several batchers.

        Raises:
            MissingExtra: prometheus_client is not installed.
        """
        return Collector(self).text()

    @property
    def corrections(self) -> Corrections:
        """The corrections of the table that were learned on this machine; they can be saved and loaded."""
        return self._driver.learner.corrections

    def replan(self) -> bool:
        """Plan at once with what was learned so far, for example after `corrections.load(path)`.

        Without this call the batcher does the same by itself, usually within a fraction of a second of the
        next batch. Any thread may call this method, except a policy while it decides.

        Returns:
            Whether the policy was given other latencies. It is not if they changed by less than 5 %, or if
            the batcher has just done so by itself; `stats().replanned` counts both.
        """
        self._check_process()
        return self._driver.replan(at_once=True)

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of the workers' processes, spares not included. It is empty if the workers are threads."""
        return tuple(pid for runner in self._runners if (pid := getattr(runner, "pid", None)) is not None)

    @property
    def closing(self) -> bool:
        """Whether new requests are refused because `drain` or `close` was called."""
        return self._driver.scheduler.closing

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until every accepted request has its outcome.

        The call blocks; in a coroutine, use `await asyncio.to_thread(batcher.drain)`. In a callback of a
        future it does not wait, because the thread that runs the callback has more outcomes to deliver.

        Args:
            timeout: longest time to wait, in s. If None, there is no limit.

        Returns:
            Whether every request has its outcome. The worker threads go on; call `close` next. In a process
            that was forked from the batcher's, the result is False at once.
        """
        if self._forked:
            return False
        self._driver.stop_admitting()
        return self._driver.wait_until_drained(0.0 if self._driver.is_current() else timeout)

    def close(self, drain: bool = True) -> None:
        """Refuse new requests, finish those that wait, and end the threads.

        Batches that run are finished in any case. A thread that hangs is not waited for; it ends when its
        call returns. A policy that waits (answers None) while nothing runs is not asked further: the
        cheapest subnet serves the requests that are left. If every worker is lost again and again, the
        requests that wait end with `BatcherClosed`. In a process that was forked from the batcher's
        this method does nothing.

        Args:
            drain: whether to serve the requests that wait; if False, they end with `BatcherClosed`.
        """
        if self._forked:
            return
        self._driver.stop_admitting(abandon=not drain)
        self._driver.join()

    def __enter__(self) -> Batcher:
        self._check_process()
        if self._driver.scheduler.closing:
            raise BatcherClosed("the batcher is closed; open another one")
        return self

    def _check_process(self, *_: Any) -> Any:
        if self._forked:
            raise BatcherClosed(
                "the batcher belongs to the process that this one was forked from, and its threads did not "
                "come along; open a batcher in this process, or start processes with the method spawn"
            )

    def note_fork(self) -> None:
        """Refuse every use in a forked child, where locks may be held by threads that do not exist."""
        self._forked = True
        self._driver.__dict__["admit"] = self._check_process  # `submit` and `infer` call it first


def monotonic_ms() -> float:
    """Return the time of the usual clock, in ms."""
    return time.perf_counter_ns() * 1e-6


def close_elsewhere(batchers: Collection[Batcher], close: Callable[[], None]) -> bool:
    """Call `close` on a thread of its own if this one belongs to a batcher; return whether it does.

    Such a thread runs a callback, and must go on for the batchers to finish what they accepted.
    """
    if not any(batcher._driver.is_current() for batcher in batchers):
        return False
    threading.Thread(target=close, name="subnetact-closing", daemon=True).start()
    return True
