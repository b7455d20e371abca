"""`Pipeline`: stages behind each other, served live under end-to-end deadlines, one batcher per stage."""

# Annotations are not postponed here, so that tools can read the fields of the named tuples elsewhere.

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    InvalidRequest,
    PipelineError,
    RequestError,
    failure_text,
)
from subnetact.files.fork import new_lock
from subnetact.serving.live.answers import Answer, AnswerFuture
from subnetact.serving.live.batcher import Batcher, close_elsewhere, monotonic_ms
from subnetact.serving.live.context_manager import ClosedOnExit
from subnetact.serving.live.histograms import MILLISECONDS, Histogram
from subnetact.serving.pipelines.graph import StageGraph
from subnetact.serving.pipelines.stage import Stage, engines_of, open_stage, table_of
from subnetact.serving.scheduling.checks import by_name, check_deadline, check_time

_NOTHING = object()
"""What stands for the output of a stage that a request does not take."""
_OUTCOMES = ("met", "late", "dropped", "failed", "cancelled")


class StageTime(NamedTuple):
    """Where the time of one input of a request went at one stage.

    Attributes:
        arrived_ms: when the input reached the stage, ms after the request was accepted.
        waited_ms: time in the queue of the stage, ms.
        ran_ms: time in the batch that answered, ms.
        subnet: id of the subnet that ran.
        accuracy: profiled accuracy of that subnet, in percent.
    """

    arrived_ms: float
    waited_ms: float
    ran_ms: float
    subnet: int
    accuracy: float


class PipelineAnswer(NamedTuple):
    """The answer to one request.

    Attributes:
        output: the output of the last stage; if several stages are last, a dictionary from their names to
            their outputs. Stages that the request did not take give None, or are left out of the dictionary.
        latency_ms: time from the submission to the answer, ms.
        met: whether the answer came within the deadline.
        stages: for every stage that the request took, one entry per input.
    """

    output: Any
    latency_ms: float
    met: bool
    stages: dict[str, list[StageTime]]


@dataclass(frozen=True)
class PipelineStats:
    """A snapshot of a pipeline's counters.

    Attributes:
        submitted: requests that were accepted; each has one of the next five outcomes, or is `open`.
        met: answered within the deadline.
        late: answered after it.
        dropped: ended with `DeadlinePassed`.
        failed: ended with another error.
        cancelled: withdrawn by the client.
        refused: requests that were never accepted.
        open: requests without an outcome yet.
        latency_ms: histogram of the latencies of the answers.
    """

    submitted: int
    met: int
    late: int
    dropped: int
    failed: int
    cancelled: int
    refused: int
    open: int
    latency_ms: Histogram


@dataclass(slots=True, eq=False)
class _Trip:
    """A request on its way through the stages.

    `futures` are those of its inputs at stages that it has entered, and `missing` how many have no answer.
    """

    accepted_ms: float
    given_ms: float = 0.0
    future: Any = field(default_factory=AnswerFuture)
    outputs: dict[str, Any] = field(default_factory=dict)
    times: dict[str, list[StageTime]] = field(default_factory=dict)
    futures: dict[str, list[AnswerFuture]] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)


class Pipeline(ClosedOnExit):
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
        options: further arguments of every stage's `Batcher`, for example `learn=False`. Those of a stage
            come before them. `expired` is "defer" if not given.

    Attributes:
        batchers: the batcher of every stage, by name; `Collector(pipeline.batchers, label="stage")` offers
            their metrics.

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

    def __init__(self, stages: Sequence[Stage], *, slo_ms: float, sample: Any, **options: Any) -> None:
        self._stages = by_name(stages, Stage, "stages", PipelineError)
        self.graph = StageGraph({name: stage.conditions for name, stage in self._stages.items()})
        self.slo_ms = check_time(slo_ms, "slo_ms")
        tables = {name: table_of(stage) for name, stage in self._stages.items()}
        inputs = {name: stage.inputs if stage.each else 1.0 for name, stage in self._stages.items()}
        self._reserves = self.graph.reserves(tables, inputs)
        self._least_ms = self.graph.least_ms(tables, self.slo_ms)
        self._try(sample)
        self._clock_ms: Callable[[], float] = options.get("clock_ms") or monotonic_ms
        self._lock = new_lock()  # of the counters and of all trips
        self._ended = threading.Condition(self._lock)
        self._counts: Counter[str] = Counter()
        self._trips: set[_Trip] = set()  # those that have not ended
        self._latency = Histogram(MILLISECONDS)
        self._closing = False
        self._closers: set[int] = set()  # the threads in `close`, which may run callbacks that close again
        self.batchers: dict[str, Batcher] = {}
        with ExitStack() as opened:  # those that are open already are closed if another one cannot be opened
            for name, stage in self._stages.items():
                share_ms = self.slo_ms * (1.0 - self._reserves[name])
                batcher = open_stage(stage, share_ms, tables[name], options)
                self.batchers[name] = opened.enter_context(batcher)
            opened.pop_all()

    def _try(self, sample: Any) -> None:
        """Run one input through all stages that it takes, and refuse stages that do not fit."""
        outputs: dict[str, Any] = {}
        for name in self.graph.order:
            stage = self._stages[name]
            try:
                inputs = self._inputs(name, sample, outputs)
                engine = engines_of(stage)[0]
                for x in inputs or ():
                    engine.check(x)
                results = [engine.run(0, [x], 1)[0] for x in inputs or ()]
            except Exception as error:
                feeding = ", ".join(map(repr, self.graph.after[name])) or "the pipeline's input"
                raise PipelineError(
                    f"stage {name!r} does not fit {feeding}: {failure_text(error)}; look at its condition, "
                    "its `prepare` and the sample"
                ) from error
            outputs[name] = _NOTHING if inputs is None else results if stage.each else results[0]

    def _inputs(self, name: str, x: Any, outputs: Mapping[str, Any]) -> list[Any] | None:
        """Return the inputs of a stage; None if the request takes no edge that leads to it."""
        stage, conditions = self._stages[name], self.graph.after[name]
        if conditions:
            taken = {
                other: outputs[other]
                for other, condition in conditions.items()
                if outputs[other] is not _NOTHING and (condition is None or condition(outputs[other]))
            }
            if not taken:
                return None
            x = next(iter(taken.values())) if len(conditions) == 1 else taken
        x = x if stage.prepare is None else stage.prepare(x)
        return list(x) if stage.each else [x]

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
            BatchFailed: The `prepare` of a first stage raised.
        """
        trip = _Trip(self._clock_ms())
        with self._lock:
            self._trips.add(trip)
        try:
            trip.given_ms = check_deadline(self.slo_ms if deadline_ms is None else deadline_ms)
            if self._closing:  # if it is set later, `close` waits for this trip
                raise BatcherClosed("the pipeline is closed or draining; open another one")
            for name in self.graph.sources:
                self._queue(trip, name, x)
        except BaseException:
            self._end(trip, "refused")
            raise
        future: Future[PipelineAnswer] = trip.future
        trip.future.on_cancel(partial(self._end, trip, "cancelled"))
        with self._lock:
            self._counts["submitted"] += 1
        for name in self.graph.sources:  # only now that all of them have accepted it
            self._watch(trip, name)
        return future

    async def infer(self, x: Any, deadline_ms: float | None = None) -> PipelineAnswer:
        """Send one input `x` with `deadline_ms` through the stages as `submit` does, and return its answer.

        Raises:
            RequestError: As in `submit`, or as the exception of its future.
        """
        return await asyncio.wrap_future(self.submit(x, deadline_ms))

    # -- the way through the stages --------------------------------------------------------------

    def _queue(self, trip: _Trip, name: str, x: Any = None) -> None:
        """Submit the inputs of a request to the batcher of a stage, unless it does not take the stage."""
        stage = self._stages[name]
        try:
            inputs = self._inputs(name, x, trip.outputs)
            if inputs is None:
                return
            took_ms = self._clock_ms() - trip.accepted_ms
            left_ms = trip.given_ms - took_ms
            if inputs and left_ms < self._least_ms[name]:
                raise (DeadlinePassed if stage.after else InvalidRequest)(
                    f"deadline_ms: {trip.given_ms:g} ms were given, and after {took_ms:.1f} ms stage "
                    f"{name!r} cannot lead to an answer in time, which takes {self._least_ms[name]:.3g} ms "
                    "at least; allow more, or send less"
                )
            slack_ms = max(left_ms - self._reserves[name] * trip.given_ms, 1e-3)
            futures = trip.futures[name] = []
            for one in inputs:
                futures.append(self.batchers[name].submit(one, slack_ms, min_accuracy=stage.min_accuracy))
                if trip not in self._trips:  # then `_end` may not have seen this one
                    futures[-1].cancel()
        except RequestError:
            raise
        except (Exception, SystemExit) as error:
            raise BatchFailed(
                f"stage {name!r}: its condition, its `prepare`, its fan-out or its check raised "
                f"{failure_text(error)}; look at the input and the functions"
            ) from error

    def _watch(self, trip: _Trip, name: str) -> None:
        """Go on when all inputs of a request at a stage are answered."""
        arrived_ms = self._clock_ms() - trip.accepted_ms
        futures = trip.futures.get(name)
        if not futures:
            self._leave(trip, name, _NOTHING if futures is None else [])
            return
        trip.missing[name] = len(futures)
        for future in futures:
            future.add_done_callback(partial(self._answered, trip, name, arrived_ms))

    def _answered(self, trip: _Trip, name: str, arrived_ms: float, future: Future[Answer]) -> None:
        """Note that one of a request's inputs at a stage is done; after the last one, leave the stage."""
        if future.cancelled():  # `_end` cancels what still waits
            return
        if (error := future.exception()) is not None:
            self._end(trip, "failed", error)
            return
        with self._lock:
            trip.missing[name] -= 1
            if trip.missing[name] or trip not in self._trips:
                return
            answers = [future.result() for future in trip.futures[name]]
        trip.times[name] = [
            StageTime(arrived_ms, a.waited_ms, a.latency_ms - a.waited_ms, a.subnet, a.accuracy)
            for a in answers
        ]
        outputs = [answer.output for answer in answers]
        self._leave(trip, name, outputs if self._stages[name].each else outputs[0])

    def _leave(self, trip: _Trip, name: str, output: Any) -> None:
        """Note the output of a stage, and enter the stages that have all their inputs now."""
        with self._lock:
            if trip not in self._trips:
                return
            outputs, sinks = trip.outputs, self.graph.sinks
            outputs[name] = output
            feeding = self.graph.after.items()
            ready = [other for other, edges in feeding if name in edges and edges.keys() <= outputs.keys()]
            ended = len(outputs) == len(feeding)
        for other in ready:
            try:
                self._queue(trip, other)
                self._watch(trip, other)
            except BaseException as error:
                self._end(trip, "failed", error)
        if ended:
            taken = {sink: outputs[sink] for sink in sinks if outputs[sink] is not _NOTHING}
            output = taken if len(sinks) > 1 else next(iter(taken.values()), None)
            latency_ms = self._clock_ms() - trip.accepted_ms
            met = latency_ms <= trip.given_ms
            answer = PipelineAnswer(output, latency_ms, met, trip.times)
            self._end(trip, "met" if met else "late", answer)

    def _end(self, trip: _Trip, outcome: str, found: PipelineAnswer | BaseException | None = None) -> None:
        """Count and deliver the outcome of a request, unless it has one, and withdraw it where it waits."""
        with self._lock:
            if trip not in self._trips:
                return
            self._trips.remove(trip)
            self._counts["dropped" if isinstance(found, DeadlinePassed) else outcome] += 1
            if isinstance(found, PipelineAnswer):
                self._latency.add(found.latency_ms)
            self._ended.notify_all()
            future, trip.future = trip.future, None  # a client that keeps it must not keep all outputs alive
            entered, trip.futures, trip.outputs = trip.futures, {}, {}
        for waiting in [one for futures in entered.values() for one in futures]:
            waiting.cancel()
        with suppress(InvalidStateError):  # the client has cancelled in the meantime
            if isinstance(found, PipelineAnswer):
                future.set_result(found)
            elif found is not None:
                future.set_exception(found)

    # -- at any time -----------------------------------------------------------------------------

    def stats(self) -> PipelineStats:
        """Return a snapshot of the counters; those of a stage are `batchers[name].stats()`."""
        with self._lock:
            counts = {name: self._counts[name] for name in ("submitted", *_OUTCOMES, "refused")}
            counts["open"] = counts["submitted"] - sum(counts[name] for name in _OUTCOMES)
            return PipelineStats(**counts, latency_ms=self._latency.snapshot())

    def close(self, drain: bool = True) -> None:
        """Refuse new requests, finish those on their way, and end all threads.

        In a callback of a future it does not wait: the requests on their way need that thread.

        Args:
            drain: whether to finish the requests that are on their way; if False, those that wait at a stage
                end with `BatcherClosed`.
        """
        self._closing = True
        thread = threading.get_ident()
        if thread in self._closers or close_elsewhere(self.batchers.values(), partial(self.close, drain)):
            return
        self._closers.add(thread)
        try:
            if drain:
                with self._lock:
                    self._ended.wait_for(lambda: not self._trips)
            for name in self.graph.order:
                self.batchers[name].close(drain=drain)
        finally:
            self._closers.discard(thread)
