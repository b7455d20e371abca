"""The threads of a batcher: one per worker, and three that do what no worker has to wait for.

The watchdog replaces workers that hang or die. It calls nobody else's code and waits for no disk, so that it
notices a hang in time whatever the others do: the messenger delivers outcomes that no worker delivers, and
the planner lets the policy plan and writes the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from subnetact.errors import WorkerDied, failure_text
from subnetact.serving.live.batch_job import BatchJob
from subnetact.serving.live.core import Core
from subnetact.serving.live.decision_log import DecisionLog
from subnetact.serving.live.interpreter_exit import computing
from subnetact.serving.live.requests import Decided, Outcome, Runner, settle
from subnetact.serving.live.turns import Turn, WorkerTurns

__all__ = ["Workers"]

_log = logging.getLogger(__name__)
_TICK_S = 0.02


class Workers:
    """Starts the threads, which run the jobs that the core hands out.

    Args:
        core: the state of the batcher.
        engines: one engine per worker; several workers may share one.
        on_decision: called with a `Decided` before every batch runs.
        threads: argument of `engine.enter_worker(threads)`, which is called once in every worker thread.
        log: the decision log; the planner flushes it after every tick.
        on_end: called when all has ended but the workers' threads.
        turns: what decides which of several batchers a worker serves next, and this one's name there.
            If None, the workers serve this batcher alone.

    Attributes:
        number: number of workers.
    """

    def __init__(
        self,
        core: Core,
        engines: Sequence[Runner],
        on_decision: Callable[[Decided], None] | None,
        threads: int | None,
        log: DecisionLog | None,
        on_end: Callable[[], None] | None = None,
        turns: tuple[WorkerTurns, str] | None = None,
    ) -> None:
        self._core = core
        self._engines = engines
        self._on_decision = on_decision
        self._threads_each = threads
        self._log = log
        self._turns = turns
        if turns is not None:
            turns[0].urgent[turns[1]] = core.urgent
        self._held: dict[int, Turn] = {}
        self.number = len(engines)
        self._on_end = on_end
        self._jobs: dict[int, BatchJob] = {}
        self._current: dict[int, threading.Thread] = {}
        self._owed: SimpleQueue[list[Outcome] | None] = SimpleQueue()
        self._ticked = threading.Event()
        self._ended = False
        self._helpers = [
            threading.Thread(target=target, name=f"subnetact-batcher-{name}", daemon=True)
            for name, target in (
                ("watchdog", self._watch),
                ("messenger", self._send),
                ("planner", self._plan),
            )
        ]
        for worker, engine in enumerate(engines):
            if hasattr(engine, "enter_worker"):
                core.entering(worker)
            self._start(worker)
        for thread in self._helpers:
            thread.start()

    def join(self) -> None:
        """Wait until all threads end, except those that hang. The core has to be closed."""
        if self.is_current():
            return  # a callback closed the batcher, and the thread that it runs on cannot wait for itself
        for thread in self._helpers:
            thread.join()
        for worker, thread in list(self._current.items()):
            if not self._core.hangs(worker):
                thread.join()

    def is_current(self) -> bool:
        """Return whether the caller runs on one of these threads, as callbacks of futures do."""
        return threading.current_thread() in self.threads()

    def threads(self) -> list[threading.Thread]:
        """Return the three helpers and the current thread of every worker."""
        return [*self._helpers, *self._current.values()]

    def _start(self, worker: int) -> None:
        thread = threading.Thread(
            target=self._work, args=(worker,), name=f"subnetact-batcher-{worker}", daemon=True
        )
        thread.start()
        self._current[worker] = thread

    def _start_again(self, worker: int) -> None:
        try:
            self._start(worker)
        except RuntimeError as error:  # the system has no thread left; try again after a pause
            self._owed.put(self._core.died(worker, None, error))

    def _deliver(self, outcomes: list[Outcome]) -> None:
        if outcomes:
            try:
                settle(outcomes)
            finally:
                self._core.delivered()

    def _work(self, worker: int) -> None:
        core = self._core
        job: BatchJob | None = None
        try:
            enter: Any = getattr(self._engines[worker], "enter_worker", None)
            if enter is not None:
                enter(self._threads_each)
            core.entered(worker)
            while self._turns is None or core.wait_for_work(worker):
                turn = None if self._turns is None else self._turns[0].take(worker, self._turns[1])
                if turn is not None:
                    self._held[worker] = turn
                try:
                    job, outcomes = core.next_job(worker, wait=turn is None)
                    if job is None and not outcomes and turn is None:
                        return
                    nothing = job is None and not outcomes
                    with computing():
                        self._deliver(outcomes)
                        if job is not None:
                            self._run(job)
                        if job is None or not job.abandoned:
                            job, outcomes = None, []  # frees tensors here, which is a computation
                finally:
                    if turn is not None and self._turns is not None:
                        self._turns[0].end(turn)
                if job is not None:
                    core.returned(job)
                    return
                if nothing:  # another worker was quicker, or the policy waits
                    time.sleep(1e-3)
        except BaseException as error:  # for example SystemExit from an engine; the worker is started again
            self._deliver(core.died(worker, job, error))
            _log.warning("batcher worker %d died: %s", worker, failure_text(error))

    def _is_calm(self, job: BatchJob, done: float) -> bool:
        """Return whether a job goes on with its next block without a look at the queues."""
        wanted = self._turns is not None and self._turns[0].is_wanted(job.worker)
        return not wanted and self._core.is_calm(job, done)

    def _give_way(self, job: BatchJob, done: float, turns: WorkerTurns) -> None:
        """Pass the turn on between two blocks if a batcher that comes next has urgent requests."""
        turn = self._held[job.worker]
        for rival in turns.rivals(turn):
            if self._core.suspend(job, done, turns.urgent[rival]):
                turns.pass_on(turn)
                self._core.resume(job)
                return

    def _run(self, job: BatchJob) -> None:
        core, engine = self._core, self._engines[job.worker]
        if job.beneath is None:  # it is abandoned together with what preempts it
            self._jobs[job.worker] = job
        if self._on_decision is not None:
            self._tell(job)
        while job.part and not job.abandoned:
            try:
                outputs: Any = self._outputs(engine, job)
                if isinstance(outputs, Mapping):
                    raise TypeError("the engine returned a mapping; run() returns one output per input")
                outputs = list(outputs)  # a generator that raises makes the batch fail, not the worker
                if len(outputs) != len(job.part):
                    raise ValueError(
                        f"the engine returned {len(outputs)} outputs for {len(job.part)} inputs; "
                        "run() returns one for each"
                    )
            except WorkerDied:
                raise
            except Exception as error:
                self._deliver(core.raised(job, error))
            else:
                self._deliver(core.answered(job, outputs))

    def _outputs(self, engine: Any, job: BatchJob) -> Any:
        """Run the current part of a job, and between its blocks what is more urgent."""
        core, inputs = self._core, [request.x for request in job.part]
        start: Any = getattr(engine, "start", None) if core.runs_in_blocks(job) else None
        if start is None:
            return engine.run(job.subnet, inputs, job.size)
        run = start(job.subnet, inputs, job.size)
        length = core.block_length(job, run.blocks)
        calm = partial(core.is_calm if self._turns is None else self._is_calm, job)
        while not run.step(length, calm) and not job.abandoned:
            done = run.position / run.blocks
            if self._turns is not None:
                self._give_way(job, done, self._turns[0])
            urgent, outcomes = core.urgent_job(job, done)
            self._deliver(outcomes)
            if urgent is not None:
                self._run(urgent)
        return [None] * len(inputs) if job.abandoned else run.outputs()

    def _tell(self, job: BatchJob) -> None:
        tell = self._on_decision
        if tell is None:
            return
        try:
            tell(Decided(job.started_ms, job.queued, job.slack_ms, job.subnet, job.size, len(job.part)))
        except Exception:
            _log.exception("on_decision raised; it is not called again")
            self._on_decision = None

    def _watch(self) -> None:
        core = self._core
        while core.wait_until_watched(_TICK_S):
            try:
                revived, outcomes = core.tick()
                if outcomes:
                    self._owed.put(outcomes)
                self._stop_abandoned()
                for worker in revived:
                    self._start_again(worker)
            except Exception:
                _log.exception("the batcher's watchdog goes on after an error")
            self._ticked.set()
        self._ended = True
        self._ticked.set()
        self._owed.put(None)

    def _send(self) -> None:
        while (outcomes := self._owed.get()) is not None:
            try:
                self._deliver(outcomes)
            except Exception:
                _log.exception("the batcher's messenger goes on after an error")

    def _plan(self) -> None:
        core = self._core
        while True:
            self._ticked.wait()
            self._ticked.clear()  # before the end is asked for, which sets both
            if self._ended:
                break
            try:
                core.replan()
                if self._log is not None:
                    self._log.flush()
            except Exception:
                _log.exception("the batcher's planner goes on after an error")
        core.learner.report()
        if self._on_end is not None:
            self._on_end()

    def _stop_abandoned(self) -> None:
        """End the turns of workers whose batch was taken to hang, and tell the runners that can stop it."""
        for worker, job in list(self._jobs.items()):
            if job.abandoned:
                del self._jobs[worker]
                if self._turns is not None:
                    self._turns[0].end_of(worker, self._turns[1])
                abandon: Any = getattr(self._engines[worker], "abandon", None)
                if abandon is not None:
                    with suppress(Exception):  # the worker is replaced in any case
                        abandon()
