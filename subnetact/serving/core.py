"""The state of a batcher: every transition a request or a worker can make, under one lock, without threads."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from threading import Condition, Lock
from typing import Any

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    QueueFull,
    WorkerHung,
)
from subnetact.latency import LatencyTable
from subnetact.serving.context import Policy
from subnetact.serving.decision_log import DecisionLog
from subnetact.serving.dispatch import Batch, Dispatcher
from subnetact.serving.jobs import Job, is_out_of_memory
from subnetact.serving.learner import Learner
from subnetact.serving.observation import Observation
from subnetact.serving.requests import Answer, Outcome, Request
from subnetact.serving.roster import Roster

__all__ = ["Core"]


class Core:
    """Queue, workers and counters. The threads of the batcher call it; a test can call it without any.

    A request belongs to the queue, to the suspects (a second try after its worker hung or died) or to one
    job. Whoever closes it (`open` becomes False, under the lock) owes it the one outcome: methods return
    the outcomes they made, and the caller settles them and then calls `delivered`.
    """

    def __init__(
        self,
        policy: Policy,
        table: LatencyTable,
        *,
        workers: int,
        max_queue: int,
        hopeless: str,
        slo_ms: float,
        clock_ms: Callable[[], float],
        watchdog_ms: float | None,
        learn: bool,
    ) -> None:
        self.clock_ms = clock_ms
        self.observation = Observation()
        self.roster = Roster(workers)
        self.closing = False
        self.log: DecisionLog | None = None
        self.lock = Lock()
        #: workers wait here for work
        self.changed = Condition(self.lock)
        #: the supervisor waits here while there is nothing to watch
        self.watched = Condition(self.lock)
        #: `drain` waits here
        self.drained = Condition(self.lock)
        self._max_queue = max_queue
        self._accuracy = table.known_accuracy()
        self._watchdog_ms = watchdog_ms
        self._given_up: list[Request] = []
        self._dispatcher: Dispatcher[Request] = Dispatcher(
            policy, self.roster.free_at_ms, slo_ms, hopeless, self._given_up.extend, table
        )
        self.learner = Learner(table, policy, self._dispatcher, self.lock, clock_ms, learn)
        self._suspects: deque[tuple[Request, int]] = deque()
        self._jobs: dict[int, Job] = {}
        self._idle = 0
        self._supervisor_sleeps = False
        self._delivering = 0

    def __len__(self) -> int:
        return len(self._dispatcher) + len(self._suspects)

    # -- clients ---------------------------------------------------------------------------------

    def admit(
        self, x: Any, deadline_ms: float, floor: float, priority: int, future: Any, loop: Any
    ) -> Request:
        """Queue one request that was checked.

        Raises:
            QueueFull: the bound is reached.
            BatcherClosed: it is closing.
        """
        with self.lock:
            now = self.clock_ms()
            if self.closing:
                raise BatcherClosed("the batcher is closed or draining; open another one")
            dispatcher = self._dispatcher
            request = Request(x, now, now + deadline_ms, floor, priority, future, loop)
            if len(dispatcher) + len(self._suspects) >= self._max_queue:
                self.observation.refused += 1
                self.observation.full += 1
                if self.log is not None:
                    self.log.outcome("full", request)
                raise QueueFull(
                    f"queue: {self._max_queue} requests wait already, as many as max_queue allows; "
                    "retry later, or raise max_queue"
                )
            if priority and dispatcher.priority is None:
                dispatcher.priority = attrgetter("priority")
            dispatcher.queue.push(request.deadline_ms, request, floor)
            dispatcher.arrivals.append(now)
            self.observation.submitted += 1
            if self._idle:
                self.changed.notify()
            if self._supervisor_sleeps:
                self._supervisor_sleeps = False
                self.watched.notify()
        return request

    def refused(self) -> None:
        """Count a request that was refused at the door."""
        with self.lock:
            self.observation.refused += 1

    def withdraw(self, request: Request) -> bool:
        """Close a request whose client has cancelled; False when it had an outcome already."""
        with self.lock:
            if not request.open:
                return False
            dispatcher = self._dispatcher
            if not dispatcher.queue.remove(request.deadline_ms, request):
                dispatcher.late.remove(request.deadline_ms, request)
            self._suspects = deque(entry for entry in self._suspects if entry[0] is not request)
            self._close(request, "cancelled")
            self._wake_if_finished()
            return True

    # -- workers ---------------------------------------------------------------------------------

    def next_job(self, worker: int, wait: bool = True) -> tuple[Job | None, list[Outcome]]:
        """What a worker shall do: a job, outcomes to settle, both, or (neither) end.

        With `wait=False` neither may also mean that there is nothing to do now.
        """
        with self.lock:
            while True:
                outcomes: list[Outcome] = []
                job = self._decide(worker, outcomes) if len(self) else None
                if job is not None or outcomes:
                    self._owe(outcomes)
                    return job, outcomes
                if not wait or self._finished():
                    return None, []
                self._idle += 1
                self.changed.wait(timeout=0.05 if len(self) else None)
                self._idle -= 1

    def answered(self, job: Job, outputs: Any) -> list[Outcome]:
        """The current part ran and gave one output for each request; go on to the next."""
        now = self.clock_ms()
        outcomes: list[Outcome] = []
        with self.lock:
            if job.abandoned:
                return outcomes
            seen, size, subnet = self.observation, job.size, job.subnet
            accuracy = self._accuracy[subnet]
            met = 0
            for request, output in zip(job.part, outputs, strict=True):
                if request.open:
                    request.open = False
                    in_time = now <= request.deadline_ms
                    met += in_time
                    latency_ms = now - request.accepted_ms
                    seen.latency_ms.add(latency_ms)
                    answer = Answer(output, subnet, accuracy, latency_ms, in_time, size)
                    outcomes.append((request, answer, None))
            took_ms = now - job.started_ms
            seen.met += met
            seen.late += len(outcomes) - met
            seen.accuracy_sum += met * accuracy
            seen.served_by[subnet] += len(outcomes)
            seen.batch_sizes[size] += 1
            seen.run_ms.add(took_ms)
            if self.log is not None:
                self.log.batch(job, [request for request, _, _ in outcomes], took_ms)
            self.learner.observe(job, took_ms)
            self.roster.succeeded(job.worker)
            self._advance(job, now)
            self._owe(outcomes)
        return outcomes

    def raised(self, job: Job, error: Exception) -> list[Outcome]:
        """The current part raised: split it, or fail the one request it held."""
        now = self.clock_ms()
        outcomes: list[Outcome] = []
        with self.lock:
            if job.abandoned:
                return outcomes
            seen, part = self.observation, [r for r in job.part if r.open]
            exhausted = is_out_of_memory(error)
            if exhausted:
                seen.out_of_memory += 1
                limit = self.learner.limit(job.subnet, job.size, len(part))
            if len(part) > 1:
                seen.bisected += not exhausted
                job.split(part, limit if exhausted else (len(part) + 1) // 2)
            elif part:
                failure = BatchFailed(
                    f"subnet {job.subnet} failed on this request, alone in its batch: "
                    f"{type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                outcomes.append(self._fail(part[0], failure))
            self._advance(job, now)
            self._owe(outcomes)
        return outcomes

    def died(self, worker: int, job: Job | None, error: BaseException) -> list[Outcome]:
        """The worker's thread is about to end because of an exception that is no `Exception`."""
        now = self.clock_ms()
        outcomes: list[Outcome] = []
        with self.lock:
            if job is not None and job.abandoned:
                self.roster.came_back(worker)
                return outcomes
            self.observation.died += 1
            self.roster.down(worker, now)
            if self._jobs.pop(worker, None) is not None and job is not None:
                for request in job.requests():
                    failure = BatchFailed(
                        f"a worker died over this request, twice: {type(error).__name__}: {error}"
                    )
                    failure.__cause__ = error
                    self._retry(request, job.subnet, now, failure, outcomes)
            self._owe(outcomes)
            self._wake_all()
        return outcomes

    def returned(self, job: Job) -> None:
        """A worker that was replaced came back after all; its thread ends."""
        with self.lock:
            self.roster.came_back(job.worker)
            self._wake_all()

    def delivered(self) -> None:
        """The outcomes of one call were settled."""
        with self.lock:
            self._delivering -= 1
            self._wake_if_finished()

    # -- supervisor ------------------------------------------------------------------------------

    def tick(self) -> tuple[list[int], list[Outcome]]:
        """What time alone brings about: (workers to start again, outcomes).

        Workers past their limit are given up, requests that became hopeless are answered although no
        worker is idle, and workers that are down come back.
        """
        with self.lock:
            now = self.clock_ms()
            outcomes: list[Outcome] = []
            for job in list(self._jobs.values()):
                if now > job.limit_ms:
                    self._abandon(job, now, outcomes)
                elif now > job.started_ms + max(50.0, 5.0 * job.expected_ms):
                    self.roster.free_at_ms[job.worker] = math.inf
            revived = [] if self._finished() else self.roster.due(now)
            self.observation.revived += len(revived)
            if self._dispatcher.hopeless == "drop":
                self._dispatcher.clear_hopeless(now)
                self._answer_given_up(now, outcomes)
            if not self.roster.up() and not revived:
                self._nobody_serves(now, outcomes)
            self._owe(outcomes)
        return revived, outcomes

    def wait_until_watched(self, timeout_s: float) -> bool:
        """Sleep for one tick, or until there is something to watch; False when everything has ended."""
        with self.lock:
            if self._finished():
                return False
            self._supervisor_sleeps = not (len(self) or self._jobs or self.roster.any_down())
            self.watched.wait(None if self._supervisor_sleeps else timeout_s)
            self._supervisor_sleeps = False
            return not self._finished()

    # -- ending ----------------------------------------------------------------------------------

    def close_door(self) -> None:
        """Take no more requests."""
        with self.lock:
            self.closing = True
            self._wake_all()

    def wait_until_drained(self, timeout_s: float | None) -> bool:
        """Wait until every accepted request has its outcome; False when that takes longer."""
        with self.lock:
            return self.drained.wait_for(
                lambda: not self.observation.unfinished and not self._delivering, timeout_s
            )

    def abandon_queue(self) -> list[Outcome]:
        """Close every request that waits."""
        with self.lock:
            outcomes = [self._refuse(request) for request in self._empty()]
            self._owe(outcomes)
            self._wake_all()
        return outcomes

    def stats_fields(self) -> dict[str, Any]:
        """What the core adds to the counters; call it under the lock."""
        running = sum(len(job.requests()) for job in self._jobs.values())
        return {
            "queued": len(self),
            "running": running,
            "workers": len(self.roster.free_at_ms),
            "workers_up": self.roster.up(),
            "batch_limits": dict(self._dispatcher.limits),
        }

    # -- under the lock --------------------------------------------------------------------------

    def _decide(self, worker: int, outcomes: list[Outcome]) -> Job | None:
        now = self.clock_ms()
        if self._suspects:
            return self._second_try(worker, now, outcomes)
        batch: Batch | None = None
        try:
            batch = self._dispatcher.next_batch(now, worker)
        except Exception as error:
            taken, self._dispatcher.taken = self._dispatcher.taken, []
            message = f"the policy failed: {type(error).__name__}: {error}"
            for request in taken + self._empty():
                failure = BatchFailed(message)
                failure.__cause__ = error
                outcomes.append(self._fail(request, failure))
        if self._given_up:
            self._answer_given_up(now, outcomes)
        if batch is None:
            return None
        seen = self.observation
        seen.batches += 1
        seen.slack_ms.add(batch.slack_ms)
        seen.queue_depth.add(batch.queued)
        seen.batch.add(len(batch.items))
        job = Job(worker, batch.subnet, batch.items, batch.queued, batch.slack_ms)
        self._start(job, now)
        seen.decision_ms.add(self.clock_ms() - now)
        return job

    def _second_try(self, worker: int, now: float, outcomes: list[Outcome]) -> Job | None:
        while self._suspects:
            request, subnet = self._suspects.popleft()
            if request.deadline_ms < now + self._dispatcher.expected_ms(subnet, 1):
                outcomes.append(self._drop(request, now))
                continue
            job = Job(worker, subnet, [request], len(self) + 1, request.deadline_ms - now)
            self.observation.batches += 1
            self._start(job, now)
            return job
        return None

    def _start(self, job: Job, now: float) -> None:
        """Book the job's current part on its worker."""
        count = len(job.part)
        job.size = self._dispatcher.padded(count)
        job.started_ms = now
        expected_ms = self._dispatcher.expected_ms(job.subnet, count)
        job.expected_ms = expected_ms if expected_ms == expected_ms else job.expected_ms
        patience_ms = self._watchdog_ms
        if patience_ms is None:
            patience_ms = max(1000.0, 20.0 * job.expected_ms)
        job.limit_ms = now + patience_ms
        self.roster.free_at_ms[job.worker] = now + job.expected_ms
        self._jobs[job.worker] = job

    def _advance(self, job: Job, now: float) -> None:
        job.advance()
        if job.part:
            self._start(job, now)
            return
        del self._jobs[job.worker]
        self.roster.free_at_ms[job.worker] = now
        if self.closing:
            self._wake_all()

    def _abandon(self, job: Job, now: float, outcomes: list[Outcome]) -> None:
        job.abandoned = True
        del self._jobs[job.worker]
        self.observation.hung += 1
        self.roster.hung(job.worker, now)
        after = f"{now - job.started_ms:.0f} ms, where {job.expected_ms:.1f} ms were expected"
        for request in job.requests():
            failure = WorkerHung(
                f"subnet {job.subnet}: a worker hung over this request, twice; the last one was replaced after "
                f"{after}; look at the input and the engine, or raise watchdog_ms"
            )
            self._retry(request, job.subnet, now, failure, outcomes)
        self._wake_all()

    def _retry(
        self, request: Request, subnet: int, now: float, failure: BatchFailed, outcomes: list[Outcome]
    ) -> None:
        """Give a request whose worker was lost a second try, alone, if it had none and there is time."""
        if request.deadline_ms < now + self._dispatcher.expected_ms(subnet, 1):
            outcomes.append(self._drop(request, now))
        elif request.retried:
            outcomes.append(self._fail(request, failure))
        else:
            request.retried = True
            self.observation.retried += 1
            self._suspects.append((request, subnet))

    def _nobody_serves(self, now: float, outcomes: list[Outcome]) -> None:
        """No worker is up: nobody else would tell those whose deadline passes."""
        if self.closing and not self.roster.hope():
            outcomes += [self._refuse(request) for request in self._empty()]
            return
        passed = [request for request in self._waiting() if request.deadline_ms < now]
        for request in passed:
            if not self._dispatcher.queue.remove(request.deadline_ms, request):
                self._dispatcher.late.remove(request.deadline_ms, request)
            outcomes.append(self._drop(request, now))
        if passed:
            self._suspects = deque(entry for entry in self._suspects if entry[0].open)

    def _waiting(self) -> list[Request]:
        queue, late = self._dispatcher.queue, self._dispatcher.late
        entries = queue.entries(len(queue)) + late.entries(len(late))
        return [request for _, request in entries] + [request for request, _ in self._suspects]

    def _empty(self) -> list[Request]:
        waiting, dispatcher = self._waiting(), self._dispatcher
        dispatcher.queue.take(len(dispatcher.queue))
        dispatcher.late.take(len(dispatcher.late))
        self._suspects.clear()
        return waiting

    def _answer_given_up(self, now: float, outcomes: list[Outcome]) -> None:
        outcomes += [self._drop(request, now) for request in self._given_up]
        self._given_up.clear()

    def _drop(self, request: Request, now: float) -> Outcome:
        self._close(request, "dropped")
        self.learner.starving = True
        slo_ms = request.deadline_ms - request.accepted_ms
        return (
            request,
            None,
            DeadlinePassed(
                f"deadline_ms: {slo_ms:g} ms were given, and after {now - request.accepted_ms:.1f} ms no subnet "
                f"could answer in time any more (the fastest needs {self._dispatcher.least_ms(0.0):.3g} ms); "
                "allow more time, or send less"
            ),
        )

    def _fail(self, request: Request, failure: BatchFailed) -> Outcome:
        self._close(request, "failed")
        return request, None, failure

    def _refuse(self, request: Request) -> Outcome:
        self._close(request, "closed")
        return (
            request,
            None,
            BatcherClosed("the batcher was closed before this request ran; open another one"),
        )

    def _close(self, request: Request, outcome: str) -> None:
        request.open = False
        seen = self.observation
        setattr(seen, outcome, getattr(seen, outcome) + 1)
        if self.log is not None:
            self.log.outcome(outcome, request)

    def _owe(self, outcomes: list[Outcome]) -> None:
        if outcomes:
            self._delivering += 1

    def _finished(self) -> bool:
        return self.closing and not self.observation.unfinished

    def _wake_if_finished(self) -> None:
        if not self.observation.unfinished and not self._delivering:
            self.drained.notify_all()
            if self.closing:
                self._wake_all()

    def _wake_all(self) -> None:
        self.changed.notify_all()
        self.watched.notify_all()
        self.drained.notify_all()
