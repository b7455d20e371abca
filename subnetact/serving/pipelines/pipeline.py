"""`Pipeline`: stages behind each other, served live under end-to-end deadlines, one batcher per stage."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    InvalidRequest,
    PipelineError,
    PolicyError,
    QueueFull,
    failure_text,
)
from subnetact.serving.live.answers import Answer, AnswerFuture
from subnetact.serving.live.batcher import Batcher, close_elsewhere, monotonic_ms
from subnetact.serving.live.histograms import MILLISECONDS, Histogram, HistogramSnapshot
from subnetact.serving.live.periodic_call import PeriodicCall
from subnetact.serving.live.stats import BatcherStats
from subnetact.serving.pipelines.graph import StageGraph, expected_work_ms
from subnetact.serving.pipelines.pipeline_answer import PipelineAnswer, StageTime
from subnetact.serving.pipelines.stage import FunctionRunner, Stage
from subnetact.serving.pipelines.stage_tuner import StageTuner
from subnetact.serving.policies import HullFit
from subnetact.serving.scheduling.checks import check_positive, check_time

__all__ = ["Pipeline", "PipelineStats"]

_NOTHING = object()
"""What stands for the output of a stage that a request does not take."""
_OF_STAGES = {"engine", "policy", "table", "workers", "expired", "slo_ms"}
"""The arguments of a stage's `Batcher` that the pipeline gives itself."""


@dataclass(frozen=True)
class PipelineStats:
    """A snapshot of a pipeline's counters.

    Attributes:
        submitted: requests that were accepted.
        met: requests that were answered within their deadline.
        late: requests that were answered after their deadline.
        dropped: requests that ended with `DeadlinePassed`.
        failed: requests that ended with another error.
        cancelled: requests that their client cancelled.
        refused: requests that were never accepted.
        open: requests without an outcome yet.
        latency_ms: histogram of the latencies of the answers.
        stages: the counters of every stage's batcher. Their deadlines are those of the stage.
        tuning_errors: how often a step of the tuner failed; the numbers of workers stay then.
    """

    submitted: int
    met: int
    late: int
    dropped: int
    failed: int
    cancelled: int
    refused: int
    open: int
    latency_ms: HistogramSnapshot
    stages: dict[str, BatcherStats]
    tuning_errors: int = 0


class _Trip:
    """A request on its way through the stages."""

    __slots__ = ("accepted_ms", "deadline_ms", "future", "lock", "missing", "open", "outputs", "times", "x")

    def __init__(self, x: Any, now_ms: float, deadline_ms: float, missing: dict[str, int]) -> None:
        self.x = x
        self.accepted_ms = now_ms
        self.deadline_ms = deadline_ms
        self.future: Any = AnswerFuture()
        self.lock = threading.RLock()
        self.missing = missing
        self.outputs: dict[str, Any] = {}
        self.times: dict[str, list[StageTime]] = {}
        self.open: dict[tuple[str, int], Future[Answer]] | None = {}


class Pipeline:
    """Serves a directed acyclic graph of stages under end-to-end deadlines.

    Every stage has a `Batcher`, so each chooses its own subnet per batch. The deadline of a request at a
    stage is its end-to-end deadline minus the expected latency of the stages behind: the request's time is
    split in proportion to the work of the stages on the longest path, and what one stage leaves over is
    slack of the next. A request that is behind at one stage is deferred there, and so served when nothing
    else waits; a request that cannot reach its end in time any more is dropped between two stages.

    A request fails with the error of the first stage that fails on it. Everything that batchers do about
    faults holds for every stage; see `Batcher`.

    Args:
        stages: the stages, in any order.
        slo_ms: the usual time from the submission to the deadline, ms.
        sample: one input of the pipeline. It runs through the stages once before anything starts, so that
            stages whose inputs and outputs do not fit are found.
        expired: the rule of the stages for requests that are behind, as in `Batcher`.
        tuner: scales the stages while the pipeline runs, up to their `most_workers`. If None, the numbers
            of workers stay.
        options: further arguments of every stage's `Batcher`, for example `learn=False`. Those of a stage
            come before them.

    Raises:
        PipelineError: there is a cycle, a stage refuses what another one hands over, two stages have the same
            name, or `slo_ms` is shorter than the shortest path.
        PolicyError: an argument is out of range.
        ProfileMismatch: a table is of other subnets than its engine.

    Source:
        InferLine (SoCC'20).

    Example:
        >>> find = Stage("find", detector, table=found_in)
        >>> read = Stage("read", digits, after=["find"], each=True, table=read_in)
        >>> with Pipeline([find, read], slo_ms=100.0, sample=page) as pipeline:
        ...     answer = pipeline.submit(page, deadline_ms=100.0).result()
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        slo_ms: float,
        sample: Any,
        expired: str = "defer",
        tuner: StageTuner | None = None,
        **options: Any,
    ) -> None:
        given = list(stages)
        for stage in given:
            if not isinstance(stage, Stage):
                raise PipelineError(f"stages: expected Stage(...), got {type(stage).__name__}")
        twice = [name for name, count in Counter(stage.name for stage in given).items() if count > 1]
        if twice:
            raise PipelineError(f"stages: two are called {twice[0]!r}; give each a name of its own")
        self._stages = {stage.name: stage for stage in given}
        conditions = {stage.name: stage.conditions for stage in given}
        self.graph = StageGraph(
            {name: {o: c is not None for o, c in feeding.items()} for name, feeding in conditions.items()}
        )
        self._conditions = conditions
        self.slo_ms = check_time(slo_ms, "slo_ms")
        tables = {stage.name: stage.latencies() for stage in given}
        fastest = {name: table.fastest_ms for name, table in tables.items()}
        self._shortest_ms = self.graph.longest_ms(fastest, always=True)
        if self.slo_ms < self._shortest_ms:
            raise PipelineError(
                f"slo_ms: {self.slo_ms:g} is shorter than the shortest path through the stages "
                f"({self._shortest_ms:.3g} ms); allow more"
            )
        behind = self.graph.tails(fastest, always=True)
        self._least_ms = {name: fastest[name] + behind[name] for name in tables}
        works = {s.name: expected_work_ms(tables[s.name], s.inputs if s.each else 1.0) for s in given}
        self._reserves = self.graph.reserves(works)
        self._clock_ms: Callable[[], float] = options.get("clock_ms") or monotonic_ms
        for stage in given:
            if stage.policy is not None or stage.is_function:
                continue
            share = self.slo_ms * (1.0 - self._reserves[stage.name])
            if share < fastest[stage.name]:
                raise PipelineError(
                    f"stage {stage.name!r}: its share of the {self.slo_ms:g} ms is {share:.3g} ms, but its "
                    f"fastest subnet needs {fastest[stage.name]:.3g} ms; allow more"
                )
        unknown = [name for name in (tuner.tuners if tuner is not None else ()) if name not in self._stages]
        if unknown:
            raise PipelineError(f"tuner: {unknown[0]!r} is no stage; choose from {', '.join(self._stages)}")
        self._try(sample)
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._counts: Counter[str] = Counter()
        self._latency = Histogram(MILLISECONDS)
        self._closing = False
        self._seen: dict[str, deque[float]] = {name: deque() for name in (tuner.tuners if tuner else ())}
        self._batchers: dict[str, Batcher] = {}
        try:
            for stage in given:
                self._batchers[stage.name] = self._open(stage, tables, expired, options)
        except BaseException:
            for batcher in self._batchers.values():
                batcher.close()
            raise
        self._most = {name: batcher.stats().workers for name, batcher in self._batchers.items()}
        self._missing = {name: len(feeding) for name, feeding in conditions.items()}
        self._tuning: PeriodicCall | None = None
        if tuner is not None:
            step = partial(self._tune, tuner)
            self._tuning = PeriodicCall(step, tuner.step_ms / 1e3, "subnetact-pipeline-tuner")

    def _open(
        self, stage: Stage, tables: Mapping[str, Any], expired: str, options: dict[str, Any]
    ) -> Batcher:
        name, table = stage.name, tables[stage.name]
        most = stage.most_workers if stage.most_workers is not None else stage.workers
        if not 1 <= stage.workers <= most:
            raise PolicyError(
                f"stage {name!r}: workers {stage.workers} must be from 1 to most_workers ({most})"
            )
        slo_ms = self.slo_ms * (1.0 - self._reserves[name])
        policy = stage.policy
        if policy is None:
            policy = HullFit(table, max(slo_ms, table.fastest_ms))
        runner: Any = FunctionRunner(name, stage.runner) if stage.is_function else stage.runner  # type: ignore[arg-type]
        several = isinstance(runner, (list, tuple))
        own = set(inspect.signature(Batcher).parameters) - _OF_STAGES
        wrong = sorted(set(stage.options) - own)
        if wrong:
            raise PipelineError(
                f"stage {name!r}: options: {wrong[0]!r} is no further argument of a Batcher; allowed are "
                f"{', '.join(sorted(own))}"
            )
        batcher = Batcher(
            runner,
            policy=policy,
            table=table,
            workers=len(runner) if several else most,
            expired=expired,
            slo_ms=max(slo_ms, table.fastest_ms),
            **{**options, **stage.options},
        )
        if stage.is_function:  # its latency was guessed, so a difference says nothing about the machine
            batcher.corrections.threshold = math.inf
        if stage.workers < most:
            batcher.resize(stage.workers)
        return batcher

    def _try(self, sample: Any) -> None:
        """Run one input through all stages that it takes, and refuse stages that do not fit."""
        outputs: dict[str, Any] = {}
        for name in self.graph.order:
            stage = self._stages[name]
            where = f"stage {name!r}"
            try:
                x = self._input(name, sample, outputs)
                if x is _NOTHING:
                    outputs[name] = _NOTHING
                    continue
                inputs = list(x) if stage.each else [x]
            except Exception as error:
                raise PipelineError(
                    f"{where}: its condition, its `prepare` or its fan-out failed on the sample "
                    f"({failure_text(error)}); the stages do not fit together"
                ) from error
            runner: Any = stage.runner[0] if isinstance(stage.runner, Sequence) else stage.runner
            if stage.is_function:
                runner = FunctionRunner(name, runner)
            results = []
            feeding = ", ".join(map(repr, self.graph.after[name])) or "the pipeline's input"
            for x in inputs:
                try:
                    runner.check(x)
                    results += list(runner.run(0, [x], 1))
                except Exception as error:
                    raise PipelineError(f"{where} does not fit {feeding}: {failure_text(error)}") from error
            outputs[name] = results if stage.each else results[0]

    def _input(self, name: str, x: Any, outputs: Mapping[str, Any]) -> Any:
        """Return the input of a stage, or `_NOTHING` if the request takes no edge that leads to it."""
        stage, conditions = self._stages[name], self._conditions[name]
        if conditions:
            taken = {
                other: outputs[other]
                for other, condition in conditions.items()
                if outputs[other] is not _NOTHING and (condition is None or condition(outputs[other]))
            }
            if not taken:
                return _NOTHING
            x = next(iter(taken.values())) if len(conditions) == 1 else taken
        return x if stage.prepare is None else stage.prepare(x)

    # -- clients ---------------------------------------------------------------------------------

    def submit(self, x: Any, deadline_ms: float | None = None) -> Future[PipelineAnswer]:
        """Send one input through the stages, from any thread.

        Cancelling the future withdraws the request from the stages where it waits.

        Args:
            x: the input of the stages that no other feeds.
            deadline_ms: time that the request is given from now, ms. If None, `slo_ms`.

        Returns:
            A future of the `PipelineAnswer`. Its exception is that of the first stage that failed, or
            `DeadlinePassed`.

        Raises:
            InvalidRequest: The deadline is no number, or shorter than the shortest path through the stages,
                or the first stage refuses the input.
            QueueFull: The queue of a first stage is full.
            BatcherClosed: The pipeline is closed or draining.
        """
        given = self.slo_ms
        if deadline_ms is not None:
            try:
                given = check_positive(deadline_ms, "deadline_ms")
            except PolicyError as error:
                self._count("refused")
                raise InvalidRequest(str(error)) from error
        if given < self._shortest_ms:
            self._count("refused")
            raise InvalidRequest(
                f"deadline_ms: {given:g} is shorter than the shortest path through the stages "
                f"({self._shortest_ms:.3g} ms); allow more"
            )
        now = self._clock_ms()
        trip = _Trip(x, now, now + given, dict(self._missing))
        with self._lock:
            if self._closing:
                raise BatcherClosed("the pipeline is closed or draining; open another one")
            self._counts["submitted"] += 1
            self._counts["open"] += 1
        future: Future[PipelineAnswer] = trip.future
        trip.future.on_cancel(partial(self._cancel, trip))
        sources = [name for name in self.graph.order if not self.graph.after[name]]
        for name in sources:
            refused = self._enter(trip, name)
            if isinstance(refused, (InvalidRequest, QueueFull, BatcherClosed)):
                self._count("refused", submitted=-1, failed=-1)
                raise refused
        return future

    async def infer(self, x: Any, deadline_ms: float | None = None) -> PipelineAnswer:
        """Send one input through the stages and wait for the answer; see `submit`.

        Args:
            x: the input of the stages that no other feeds.
            deadline_ms: time that the request is given from now, ms. If None, `slo_ms`.

        Returns:
            The answer.

        Raises:
            RequestError: As in `submit`, or as the exception of its future.
        """
        return await asyncio.wrap_future(self.submit(x, deadline_ms))

    # -- the way through the stages --------------------------------------------------------------

    def _enter(self, trip: _Trip, name: str) -> BaseException | None:
        """Give a request to a stage whose predecessors have all ended; return the error if that fails."""
        stage = self._stages[name]
        try:
            x = self._input(name, trip.x, trip.outputs)
            inputs = [] if x is _NOTHING else list(x) if stage.each else [x]
        except Exception as cause:
            failure = BatchFailed(
                f"stage {name!r}: its condition, its `prepare` or its fan-out raised {failure_text(cause)}; "
                "look at the input and the functions"
            )
            failure.__cause__ = cause
            return self._fail(trip, failure)
        if not inputs:
            self._leave(trip, name, _NOTHING if x is _NOTHING else [])
            return None
        now = self._clock_ms()
        if trip.deadline_ms < now + self._least_ms[name]:
            given = trip.deadline_ms - trip.accepted_ms
            return self._fail(
                trip,
                DeadlinePassed(
                    f"deadline_ms: {given:g} ms were given, and after {now - trip.accepted_ms:.1f} ms stage "
                    f"{name!r} cannot lead to an answer in time any more; allow more, or send less"
                ),
            )
        left = trip.deadline_ms - now - self._reserves[name] * (trip.deadline_ms - trip.accepted_ms)
        results: list[Any] = [None] * len(inputs)
        with trip.lock:
            if trip.open is None:
                return None
            trip.times[name] = []
            waiting = {"count": len(inputs)}
            batcher = self._batchers[name]
            futures: list[Future[Answer]] = []
            for x in inputs:
                if name in self._seen:
                    self._seen[name].append(now)
                try:
                    future: Future[Answer] = batcher.submit(
                        x, max(left, 1e-3), min_accuracy=stage.min_accuracy
                    )
                except Exception as error:
                    return self._fail(trip, error)
                trip.open[name, len(futures)] = future
                futures.append(future)
        for index, future in enumerate(futures):
            future.add_done_callback(partial(self._answered, trip, name, index, results, waiting, now))
        return None

    def _answered(
        self,
        trip: _Trip,
        name: str,
        index: int,
        results: list[Any],
        waiting: dict[str, int],
        arrived_ms: float,
        future: Future[Answer],
    ) -> None:
        with trip.lock:
            if trip.open is None:
                return
            trip.open.pop((name, index), None)
            error = None if future.cancelled() else future.exception()
            if error is None and not future.cancelled():
                answer = future.result()
                results[index] = answer.output
                trip.times[name].append(
                    StageTime(
                        arrived_ms - trip.accepted_ms,
                        answer.waited_ms,
                        answer.latency_ms - answer.waited_ms,
                        answer.subnet,
                        answer.accuracy,
                    )
                )
                waiting["count"] -= 1
                if waiting["count"]:
                    return
        if error is not None:
            self._fail(trip, error)
        elif not waiting["count"]:
            self._leave(trip, name, results if self._stages[name].each else results[0])

    def _leave(self, trip: _Trip, name: str, output: Any) -> None:
        """Note the output of a stage, and enter the stages that have all their inputs now."""
        with trip.lock:
            trip.outputs[name] = output
            ready = []
            for other in self.graph.following[name]:
                trip.missing[other] -= 1
                if not trip.missing[other]:
                    ready.append(other)
            ended = all(sink in trip.outputs for sink in self.graph.sinks)
        for other in ready:
            self._enter(trip, other)
        if ended:
            self._finish(trip)

    def _finish(self, trip: _Trip) -> None:
        now = self._clock_ms()
        outputs = {s: trip.outputs[s] for s in self.graph.sinks if trip.outputs[s] is not _NOTHING}
        output = outputs if len(self.graph.sinks) > 1 else next(iter(outputs.values()), None)
        latency = now - trip.accepted_ms
        met = now <= trip.deadline_ms
        with trip.lock:
            if trip.open is None:
                return
            trip.open = None
        self._count("met" if met else "late", latency, open=-1)
        _settle(trip, PipelineAnswer(output, latency, met, trip.times), None)

    def _fail(self, trip: _Trip, error: BaseException) -> BaseException:
        if self._withdraw(trip):
            self._count("dropped" if isinstance(error, DeadlinePassed) else "failed", open=-1)
            _settle(trip, None, error)
        return error

    def _cancel(self, trip: _Trip) -> None:
        if self._withdraw(trip):
            self._count("cancelled", open=-1)

    def _withdraw(self, trip: _Trip) -> bool:
        with trip.lock:
            if trip.open is None:
                return False
            futures, trip.open = list(trip.open.values()), None
        for future in futures:
            future.cancel()
        return True

    def _count(self, outcome: str, latency_ms: float | None = None, **others: int) -> None:
        with self._lock:
            self._counts[outcome] += 1
            for name, change in others.items():
                self._counts[name] += change
            if latency_ms is not None:
                self._latency.add(latency_ms)
            if not self._counts["open"]:
                self._ended.notify_all()

    # -- scaling ---------------------------------------------------------------------------------

    def resize(self, stage: str, workers: int) -> None:
        """Let fewer or more workers of a stage take batches; see `Batcher.resize`.

        Args:
            stage: the name of the stage.
            workers: how many, from 1 to the stage's `most_workers`.

        Raises:
            PolicyError: There is no such stage, or the number is out of range.
        """
        if stage not in self._batchers:
            raise PolicyError(f"stage: {stage!r} is none; choose from {', '.join(map(repr, self._batchers))}")
        self._batchers[stage].resize(workers)

    def _tune(self, tuner: StageTuner) -> None:
        now = self._clock_ms()
        arrived = {name: _taken(times, now) for name, times in self._seen.items()}
        for name, workers in tuner.step(now, arrived).items():
            self._batchers[name].resize(min(workers, self._most[name]))

    # -- at any time -----------------------------------------------------------------------------

    def stats(self) -> PipelineStats:
        """Return a snapshot of the counters, with those of every stage."""
        stages = {name: batcher.stats() for name, batcher in self._batchers.items()}
        outcomes = ("submitted", "met", "late", "dropped", "failed", "cancelled", "refused", "open")
        with self._lock:
            counts = {name: self._counts[name] for name in outcomes}
            errors = 0 if self._tuning is None else self._tuning.errors
            return PipelineStats(
                **counts, latency_ms=self._latency.snapshot(), stages=stages, tuning_errors=errors
            )

    def close(self, drain: bool = True) -> None:
        """Refuse new requests, finish those on their way, and end all threads.

        In a callback of a future it does not wait: the requests on their way need that thread.

        Args:
            drain: whether to finish the requests that are on their way; if False, those that wait at a stage
                end with `BatcherClosed`.
        """
        with self._lock:
            self._closing = True
        if close_elsewhere(self._batchers.values(), partial(self.close, drain)):
            return
        with self._lock:
            if drain:
                self._ended.wait_for(lambda: not self._counts["open"])
        if self._tuning is not None:
            self._tuning.stop()
        for name in self.graph.order:
            self._batchers[name].close(drain=drain)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=error is None)

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close, error is None)


def _settle(trip: _Trip, answer: PipelineAnswer | None, error: BaseException | None) -> None:
    future, trip.x = trip.future, None
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(answer)
    else:
        future.set_exception(error)


def _taken(times: deque[float], until_ms: float) -> list[float]:
    taken = []
    while times and times[0] <= until_ms:
        taken.append(times.popleft())
    return sorted(taken)
