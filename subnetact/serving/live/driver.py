"""`Driver`: the lock, the clock and the threads around the scheduler of a batcher.

One thread per worker runs the jobs. Three more do what no worker has to wait for: the watchdog replaces
workers that hang or died; it calls nobody else's code and waits for no disk, so that it notices a hang in
time whatever the others do. The messenger delivers outcomes that no worker delivers, and the planner lets the
policy plan and writes the log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from subnetact.errors import (
    BatcherClosed,
    DeadlinePassed,
    InvalidRequest,
    OutputNotFinite,
    QueueFull,
    WorkerDied,
    failure_text,
)
from subnetact.serving.live.answers import Answer, Outcome, settle
from subnetact.serving.live.decision_log import DecisionLog
from subnetact.serving.live.finite import not_finite
from subnetact.serving.live.interpreter_exit import computing
from subnetact.serving.live.learner import Learner
from subnetact.serving.live.rate_limited_log import RateLimitedLog
from subnetact.serving.live.runner import Runner
from subnetact.serving.live.stats import BatcherStats, Counters
from subnetact.serving.live.turns import Turn, Turns
from subnetact.serving.scheduling.floors import Floors
from subnetact.serving.scheduling.request import Job, Request, checked_ask
from subnetact.serving.scheduling.scheduler import Scheduler

_log = logging.getLogger(__name__)
_new = tuple.__new__  # takes half the time of calling a named tuple's class
_HUNG = "batcher worker %d hung: its batch of %d on subnet %d has run for %.0f ms, %.1f ms were expected; %s"
_OUTPUT = (
    "subnet %d: the output for this request is not finite (NaN or infinite); look at the weights and the "
    "input, or open the batcher with check_outputs=False if such outputs are meant"
)
_NOT_FINITE = "subnet %d: %d of %d outputs of a batch are not finite; these requests fail"
_TICK_S = 0.02
_PAUSE_S = 0.05
"""After this time an idle worker asks again, if requests wait that the policy does not run yet."""


@dataclass(eq=False)
class Driver:
    """Runs the jobs of a scheduler on threads. Any thread may call the methods.

    Whoever takes outcomes delivers them without the lock; `wait_until_drained` waits for that too.

    There is one runner per worker; several may be the same. `check` refuses inputs that cannot run,
    `shape_of`, asked if there are several tables, returns the position among them of an input's shape, and
    `on_end` is called when all has ended but the workers' threads. The other arguments are as in `Batcher`.
    """

    scheduler: Scheduler
    runners: Sequence[Runner]
    _: KW_ONLY
    learn: bool
    clock_ms: Callable[[], float]
    check: Callable[[Any], None]
    shape_of: Any
    check_outputs: bool
    threads: int | None
    log: DecisionLog | None
    on_end: Callable[[], None]
    shared: tuple[Turns, str] | None

    def __post_init__(self) -> None:
        scheduler, self._repeated = self.scheduler, RateLimitedLog(_log)
        self.counters = Counters(scheduler.counts)
        self._turns, self._name = self.shared or (Turns({"": 1.0}), "")
        scheduler.shares_workers = self.shared is not None
        self.lock = self._turns.lock
        tables = scheduler.tables
        self.learner = Learner(tables, scheduler.dispatcher, self.lock, self.clock_ms, self.learn)
        self._accuracy, self._floors = tables[-1].known_accuracy(), Floors(tables[-1])
        self._work, self._watch, self._drained = (threading.Condition(self.lock) for _ in range(3))
        self._undelivered = self._idle = 0
        self._waking = self._watchdog_sleeps = False
        self._current: dict[int, threading.Thread] = {}
        self._owed: SimpleQueue[list[Outcome] | None] = SimpleQueue()
        self._ticked = threading.Event()
        helpers = {"watchdog": self._guard, "messenger": self._send, "planner": self._plan}
        self._helpers = [_thread(name, target) for name, target in helpers.items()]

    def start(self) -> None:
        """Start the threads."""
        for worker, runner in enumerate(self.runners):
            if hasattr(runner, "enter_worker"):
                self.scheduler.workers.starting(worker)
            self._start(worker)
        for thread in self._helpers:
            thread.start()

    # -- clients ---------------------------------------------------------------------------------

    def admit(self, future: Any, loop: Any, x: Any, deadline_ms: float | None, *terms: Any) -> Request:
        """Queue an input, with the terms of an `Ask`; `loop` is None if the future is an `AnswerFuture`."""
        usual_ms, count = self.scheduler.dispatcher.slo_ms, len(self.scheduler.tables)
        try:
            ask = checked_ask(self._floors, usual_ms if deadline_ms is None else deadline_ms, *terms)
            self.check(x)
            request = Request(ask, self.clock_ms(), x)
            request.future, request.loop = future, loop
            request.shape = shape = self.shape_of(x) if count > 1 else -1
            if count > 1 and (type(shape) is not int or not 0 <= shape < count):
                raise InvalidRequest(f"shape_of: the engine gave {shape!r}; there are {count} tables")
        except BaseException:
            with self.lock:
                self.scheduler.counts["refused"] += 1
            raise
        with self.lock:
            if self.scheduler.closing:
                raise BatcherClosed("the batcher is closed or draining; open another one")
            try:
                self.scheduler.make_room(ask.client)
            except QueueFull:
                if self.log is not None:
                    self.log.outcome("full", request)
                raise
            self.scheduler.submit([request])
            self._wake_a_worker()
            if self._watchdog_sleeps:
                self._watchdog_sleeps = False
                self._watch.notify()
        return request

    def _wake_a_worker(self) -> None:
        """Wake an idle worker, if there is one; until a worker looks for work, nobody has to do so again."""
        if not self._waking:
            self._waking = True
            self._work.notify()

    def withdraw(self, request: Request) -> None:
        """Close a request that its client has cancelled."""
        with self.lock:
            self.scheduler.withdraw(request)
            outcomes = self._outcomes()  # those of requests that were dropped to make room for others
            if outcomes:
                self._owed.put(outcomes)
            if self._is_drained:
                self._wake_all()

    # -- workers ---------------------------------------------------------------------------------

    def _start(self, worker: int) -> None:
        thread = _thread(worker, self._work_on, worker)
        thread.start()
        self._current[worker] = thread

    def _work_on(self, worker: int) -> None:
        job: Job | None = None
        failure: BaseException | None = None
        turn = Turn(worker, self._name)
        try:
            getattr(self.runners[worker], "enter_worker", lambda _: None)(self.threads)
            with self.lock:
                self.scheduler.workers.started(worker, self.clock_ms())
            while (work := self._next(turn)) is not None:
                job, outcomes = work
                with computing():
                    self._deliver(outcomes)
                    if job is not None:
                        self._run(job)
                        if job.abandoned:
                            break
                    job, outcomes, work = None, [], None  # frees tensors here, a computation
        except BaseException as error:  # for example SystemExit from a runner; the worker is started again
            failure = error
        with self.lock:
            self._turns.end(turn, self.clock_ms())
            self._turns.give_up(turn)
            if replaced := job is not None and job.abandoned:
                self.scheduler.workers.hung_thread_ended(worker)
            elif failure is not None:
                self.scheduler.lost(worker, failure, self.clock_ms())
            outcomes = self._outcomes()
            self._wake_all()
        self._deliver(outcomes)
        if failure is not None and not replaced:  # its end was logged when it was replaced
            _log.warning("batcher worker %d died: %s", worker, failure_text(failure))

    def _next(self, turn: Turn) -> tuple[Job | None, list[Outcome]] | None:
        """Wait for a job of an idle worker, or for outcomes to deliver; None if the worker ends."""
        with self.lock:
            while not self.scheduler.is_over:
                self._turns.end(turn, self.clock_ms())
                self._waking = False
                if not len(self.scheduler):
                    self._turns.give_up(turn)
                    self._idle += 1
                    self._work.wait()
                    self._idle -= 1
                    continue
                self._turns.want(turn)
                if not self._turns.begin(turn, self.clock_ms()):
                    self._wake_a_worker()  # whose turn may come earlier
                    self._turns.changed.wait()
                    continue
                job = self._asked(partial(self.scheduler.idle, turn.worker))
                outcomes = self._outcomes()
                if job is None and not outcomes:
                    self._turns.end(turn, self.clock_ms())
                    self._work.wait(_PAUSE_S)
                    continue
                if len(self.scheduler):
                    self._wake_a_worker()  # for the requests that came while this worker was woken
                return job, outcomes
            return None

    def _asked(self, decide: Callable[[float], Job | None], waiting: bool = True) -> Job | None:
        """Ask the scheduler for a job; if the policy raises, requests fail, and the batcher goes on."""
        now, histograms = self.clock_ms(), self.counters.histograms
        try:
            job = decide(now)
        except Exception as error:
            self.scheduler.policy_failed(error, waiting)
            return None
        if job is not None:
            histograms["slack_ms"].add(max(0.0, job.slack_ms))  # so that the sum never falls
            histograms["queue_depth"].add(job.queued)
            histograms["batch"].add(len(job.part))
            histograms["decision_ms"].add(self.clock_ms() - now)
        return job

    def _run(self, job: Job) -> None:
        while job.part and not job.abandoned:
            try:
                outputs: Any = self._outputs(job)
                if isinstance(outputs, Mapping):
                    raise TypeError("the engine returned a mapping; run() returns one output per input")
                outputs = list(outputs)  # a generator that raises makes the batch fail, not the worker
                if len(outputs) != len(job.part):
                    raise ValueError(
                        f"the engine returned {len(outputs)} outputs for {len(job.part)} inputs; "
                        "run() returns one for each"
                    )
                rejected = not_finite(outputs) if self.check_outputs else ()
            except WorkerDied:
                raise
            except Exception as error:
                with self.lock:
                    self.scheduler.failed(job, error, self.clock_ms())
                    outcomes = self._outcomes()
            else:
                if rejected:
                    facts = job.subnet, len(rejected), len(outputs)
                    self._repeated.log(logging.WARNING, _NOT_FINITE, *facts)
                outcomes = self._answer(job, outputs, rejected)
            self._deliver(outcomes)

    def _outputs(self, job: Job) -> Any:
        """Run the current part of a job, and between its blocks what is more urgent."""
        runner: Any = self.runners[job.worker]
        inputs = [request.x for request in job.part]
        if not self.scheduler.runs_in_blocks(job):
            return runner.run(job.subnet, inputs, job.size)
        run = runner.start(job.subnet, inputs, job.size)
        length = self.scheduler.block_length(job, run.blocks)
        while not run.step(length) and not job.abandoned:
            done = run.position / run.blocks
            if not len(self.scheduler.dispatcher.queue):
                continue  # without the lock: the next block looks again
            with self.lock:
                urgent = self._asked(partial(self.scheduler.step_done, job, done), waiting=False)
                outcomes = self._outcomes()
            self._deliver(outcomes)
            if urgent is not None:
                self._run(urgent)
        return [None] * len(inputs) if job.abandoned else run.outputs()

    def _answer(self, job: Job, outputs: Sequence[Any], rejected: Sequence[int]) -> list[Outcome]:
        """Answer the part of a job that ran; the requests whose output is rejected fail."""
        now, counters = self.clock_ms(), self.counters
        with self.lock:
            if job.abandoned:
                return []
            subnet, size, took_ms = job.subnet, job.size, now - job.started_ms - job.paused_ms
            accuracy, part, started_ms = self._accuracy[subnet], job.part, job.started_ms
            outcomes: list[Outcome] = []
            latencies: list[float] = []
            met = 0
            for request in [part[i] for i in rejected if part[i].open]:
                self.scheduler.reject(request, OutputNotFinite(_OUTPUT % job.subnet))
            for request, output in zip(part, outputs, strict=True):
                if request.open:
                    in_time = now <= request.deadline_ms
                    met += in_time
                    latency_ms = now - request.accepted_ms
                    latencies.append(latency_ms)
                    waited_ms = started_ms - request.accepted_ms
                    answer = _new(Answer, (output, subnet, accuracy, latency_ms, in_time, size, waited_ms))
                    outcomes.append((request, answer, None))
            counters.answered(subnet, accuracy, latencies, met)
            counters.batch_sizes[size] += 1
            counters.histograms["run_ms"].add(took_ms)
            if self.log is not None:
                self.log.batch(job, [request for request, _, _ in outcomes], now - started_ms, met)
            self.learner.observe(job, took_ms)
            self.scheduler.finished(job, now)
            return self._outcomes(outcomes)

    # -- outcomes ----------------------------------------------------------------------------------

    def _outcomes(self, answers: Iterable[Outcome] = ()) -> list[Outcome]:
        """Return answers and what ended without one, to be delivered. The caller holds the lock."""
        ended, outcomes = self.scheduler.ended, list(answers)
        for request, how, error in ended:
            if self.log is not None:
                self.log.outcome(how, request)
            if how == "dropped":
                self.learner.dropping = True
                error = self._deadline_passed(request)
            if how != "cancelled":
                outcomes.append((request, None, error))
        ended.clear()
        if outcomes:
            self._undelivered += 1
        return outcomes

    def _deadline_passed(self, request: Request) -> DeadlinePassed:
        waited_ms = self.clock_ms() - request.accepted_ms
        fastest_ms = self.scheduler.dispatcher.least_ms(request.ask.floor, request.shape)
        return DeadlinePassed(
            f"deadline_ms: {request.ask.deadline_ms:g} ms were given, after {waited_ms:.1f} ms no subnet "
            f"could answer in time any more (the fastest needs {fastest_ms:.3g} ms); allow more, or send less"
        )

    def _deliver(self, outcomes: list[Outcome]) -> None:
        if not outcomes:
            return
        try:
            settle(outcomes)
        finally:
            with self.lock:
                self._undelivered -= 1
                if self._is_drained:
                    self._wake_all()

    @property
    def _is_drained(self) -> bool:
        """Whether no request comes, all have their outcomes, and every outcome was delivered."""
        return self.scheduler.is_over and not self._undelivered

    def _wake_all(self) -> None:
        for condition in (self._work, self._watch, self._drained, self._turns.changed):
            condition.notify_all()

    @property
    def _ends(self) -> bool:
        """Whether there is nothing left to watch."""
        return self.scheduler.is_over and not self.scheduler.jobs

    # -- helpers -----------------------------------------------------------------------------------

    def _guard(self) -> None:
        """Run the watchdog until the batcher is closed and everything has ended."""
        was_calm = ended = False
        while not ended:
            with self.lock:
                scheduler = self.scheduler
                idle = not (len(scheduler) or scheduler.ended or scheduler.jobs)
                calm = idle and not scheduler.workers.any_down()
                # one more tick follows the last batch, so that what it taught is applied
                self._watchdog_sleeps, was_calm = calm and was_calm, calm
                if not self._ends:
                    self._watch.wait(None if self._watchdog_sleeps else _TICK_S)
                self._watchdog_sleeps = False
            try:
                self._tick()
            except Exception:
                _log.exception("the batcher's watchdog goes on after an error")
            ended = self._ends  # asked for before the planner is woken, which asks, too
            self._ticked.set()
        self._owed.put(None)

    def _tick(self) -> None:
        with self.lock:
            now = self.clock_ms()
            revived, hung = self.scheduler.tick(now)
            outcomes = self._outcomes()
            for job in hung:
                self._turns.end(self._turns.holders[job.worker], now)
                facts = job.worker, len(job.part), job.subnet, now - job.started_ms, job.expected_ms
                pid = getattr(self.runners[job.worker], "pid", None)
                end = "another thread replaces it" if pid is None else f"process {pid} is killed"
                self.scheduler.warnings.append((_HUNG, (*facts, end), None))
            if hung:
                self._wake_all()
        if outcomes:
            self._owed.put(outcomes)
        for job in hung:
            with suppress(Exception):  # the worker is replaced in any case
                getattr(self.runners[job.worker], "abandon", lambda: None)()
        for worker in revived:
            try:
                self._start(worker)
            except RuntimeError as error:  # the system has no thread left; try again after a pause
                with self.lock:
                    self.scheduler.lost(worker, error, self.clock_ms())

    def _send(self) -> None:
        while (outcomes := self._owed.get()) is not None:
            self._deliver(outcomes)

    def _plan(self) -> None:
        while not self._ends:
            self._ticked.wait()
            self._ticked.clear()
            try:
                self.replan()
                if self.log is not None:
                    self.log.flush()
            except Exception:
                _log.exception("the batcher's planner goes on after an error")
        self._report()
        self.on_end()

    def replan(self, at_once: bool = False) -> bool:
        """Let the policy plan with what was learned; return whether it was given other latencies."""
        self._report()
        return self.learner.refresh(at_once)

    def _report(self) -> None:
        """Log what the scheduler warns of, without the lock, because handlers may be slow."""
        with self.lock:
            warnings, self.scheduler.warnings = self.scheduler.warnings, []
        for text, arguments, error in warnings:
            _log.log(logging.ERROR if error else logging.WARNING, text, *arguments, exc_info=error)

    # -- at any time, and the end --------------------------------------------------------------------

    def stats(self) -> BatcherStats:
        """Return a consistent snapshot of the counters and histograms."""
        correction, drifted = self.learner.corrections.drift()
        with self.lock:
            scheduler, limits = self.scheduler, dict(self.scheduler.dispatcher.limits)
            now = {"queued": len(scheduler), "running": scheduler.running, "workers": len(self.runners)}
            ready = [getattr(runner, "is_ready", True) for runner in self.runners]  # whether a process lives
            up = sum(scheduler.workers.is_up(worker) and is_ready for worker, is_ready in enumerate(ready))
            now |= {"workers_up": up, "replanned": self.learner.replanned}
            learned: Any = {"batch_limits": limits, "correction": correction, "drifted": drifted}
            return self.counters.snapshot(**now, **learned)

    def stop_admitting(self, abandon: bool = False) -> None:
        """Refuse all further requests, and close those that wait if `abandon`."""
        with self.lock:
            self.scheduler.closing = True
            if abandon:
                self.scheduler.close_all()
            outcomes = self._outcomes()
            self._wake_all()
        self._deliver(outcomes)

    def wait_until_drained(self, timeout_s: float | None) -> bool:
        """Wait at most some seconds; return whether every accepted request has its outcome delivered."""
        with self.lock:
            return self._drained.wait_for(lambda: self._is_drained, timeout_s)

    def join(self) -> None:
        """Wait until all threads end, except those that hang. The scheduler has to be closing."""
        if self.is_current():
            return  # a callback closed the batcher, and the thread that it runs on cannot wait for itself
        for thread in self._helpers:
            thread.join()
        for worker, thread in list(self._current.items()):
            with self.lock:
                hangs = self.scheduler.workers.hangs(worker)
            if not hangs:
                thread.join()

    def is_current(self) -> bool:
        """Return whether the caller runs on one of these threads, as callbacks of futures do."""
        return threading.current_thread() in (*self._helpers, *self._current.values())


def is_settled(drivers: Collection[Driver], computing: int) -> bool:
    """Tell whether all workers' threads of some drivers wait, but for so many that compute or hang.

    Nothing happens any more then until a request comes, a computation ends or the time is later.
    """
    waiting = -computing
    for turns in {driver._turns for driver in drivers}:
        with turns.lock:
            if turns.may_begin():
                return False
            waiting -= turns.waiting()
    for driver in drivers:
        with driver.lock:
            if driver._undelivered or (driver._idle and len(driver.scheduler)):
                return False
            waiting += driver.scheduler.workers.threads() - driver._idle
    return not waiting


def _thread(name: object, target: Callable[..., None], *args: Any) -> threading.Thread:
    """Return a thread of a batcher that the end of the program does not wait for."""
    return threading.Thread(target=target, args=args, name=f"subnetact-batcher-{name}", daemon=True)
