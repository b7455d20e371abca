"""The state of a batcher: every transition of a request or a worker, under one lock, without threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from threading import Condition, Lock
from typing import Any

from subnetact.errors import BatcherClosed, BatchFailed
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.failures import (
    alone_failed,
    policy_failed,
    queue_full,
    worker_died,
    worker_hung,
)
from subnetact.serving.live.jobs import Job, is_out_of_memory
from subnetact.serving.live.learner import Learner
from subnetact.serving.live.outcomes import Outcomes
from subnetact.serving.live.pending_requests import PendingRequests
from subnetact.serving.live.requests import Outcome, Request
from subnetact.serving.live.stats import BatcherStats
from subnetact.serving.live.worker_states import WorkerStates
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.scheduling.dispatch import Batch, Dispatcher

__all__ = ["Core"]

_priority = attrgetter("priority")


class Core:
    """Queue, workers and account. The threads of the batcher call it; a test can call it without any.

    A request waits, or belongs to one job. Whoever closes it, under the lock, owes it the one outcome:
    methods return the outcomes they made, and the caller settles them and then calls `delivered`.
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
        self.ledger = Outcomes()
        self.roster = WorkerStates(workers)
        self.closing = False
        self.lock = Lock()
        self._max_queue = max_queue
        self._accuracy = table.known_accuracy()
        self._watchdog_ms = watchdog_ms
        self._given_up: list[Request] = []
        self._evicted: list[Outcome] = []
        self._dispatcher: Dispatcher[Request] = Dispatcher(
            policy, self.roster.free_at_ms, slo_ms, hopeless, self._given_up.extend, table
        )
        self._queue = self._dispatcher.queue
        self._arrived = self._dispatcher.arrivals.append
        self._defers = hopeless == "defer"
        self._seen = self.ledger.seen
        self.waiting = PendingRequests(self._dispatcher)
        self.learner = Learner(table, policy, self._dispatcher, self.lock, clock_ms, learn)
        self._jobs: dict[int, Job] = {}
        self._ran: set[tuple[int, int, int]] = set()
        self._work = Condition(self.lock)
        self._idle = 0
        self._watch = Condition(self.lock)
        self._unwatched = self._calm = False
        self._drained = Condition(self.lock)

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
            deadline = now + deadline_ms
            request = Request(x, now, deadline, floor, priority, future, loop)
            if (len(self.waiting) if self._defers else len(self._queue)) >= self._max_queue:
                if not self._dispatcher.deferred:
                    self.ledger.full(request)
                    raise queue_full(self._max_queue)
                self._evict(now)
            if priority:
                self._dispatcher.priority = _priority
            self._queue.push(deadline, request, floor)
            self._arrived(now)
            self._seen.submitted += 1
            if self._idle:
                self._work.notify()
            if self._unwatched:
                self._unwatched = False
                self._watch.notify()
        return request

    def refused(self) -> None:
        """Count a request that was refused at the door."""
        with self.lock:
            self._seen.refused += 1

    def withdraw(self, request: Request) -> bool:
        """Close a request whose client has cancelled; False when it had an outcome already."""
        with self.lock:
            if not request.open:
                return False
            self.waiting.remove(request)
            self.ledger.cancel(request)
            self._wake_if_settled()
            return True

    # -- workers ---------------------------------------------------------------------------------

    def next_job(self, worker: int, wait: bool = True) -> tuple[Job | None, list[Outcome]]:
        """What a worker shall do: a job, outcomes to settle, both, or (neither) end.

        With `wait=False` neither may also mean that there is nothing to do now.
        """
        with self.lock:
            while True:
                outcomes: list[Outcome] = []
                job = self._decide(worker, outcomes) if len(self.waiting) else None
                if job is not None or outcomes:
                    return job, self.ledger.owed(outcomes)
                if not wait or self._finished():
                    return None, []
                self._idle += 1
                self._work.wait(timeout=0.05 if len(self.waiting) else None)
                self._idle -= 1

    def answered(self, job: Job, outputs: Any) -> list[Outcome]:
        """The current part ran and gave one output for each request; go on to the next."""
        now = self.clock_ms()
        with self.lock:
            if job.abandoned:
                return []
            outcomes = self.ledger.answer(job, outputs, self._accuracy[job.subnet], now)
            self.learner.observe(job, now - job.started_ms)
            self.roster.succeeded(job.worker)
            self._ran.add((job.worker, job.subnet, job.size))
            self._advance(job, now)
            return outcomes

    def raised(self, job: Job, error: Exception) -> list[Outcome]:
        """The current part raised: split it, or fail the one request it held."""
        now = self.clock_ms()
        outcomes: list[Outcome] = []
        with self.lock:
            if job.abandoned:
                return outcomes
            seen, part = self._seen, [r for r in job.part if r.open]
            most = (len(part) + 1) // 2
            exhausted = is_out_of_memory(error)
            if exhausted:
                seen.out_of_memory += 1
                most = self.learner.limit(job.subnet, job.size, len(part))
            if len(part) > 1:
                seen.bisected += not exhausted
                job.split(part, most)
            elif part:
                outcomes.append(self.ledger.fail(part[0], alone_failed(job, error)))
            self._advance(job, now)
            return self.ledger.owed(outcomes)

    def died(self, worker: int, job: Job | None, error: BaseException) -> list[Outcome]:
        """The worker's thread is about to end because of an exception that is no `Exception`."""
        now = self.clock_ms()
        outcomes: list[Outcome] = []
        with self.lock:
            if job is not None and job.abandoned:
                self.roster.came_back(worker)
                return outcomes
            self._seen.died += 1
            self.roster.down(worker, now)
            if self._jobs.pop(worker, None) is not None and job is not None:
                for request in job.requests():
                    self._retry(request, job, now, worker_died(error), outcomes)
            self._wake_all()
            return self.ledger.owed(outcomes)

    def returned(self, job: Job) -> None:
        """A worker that was replaced came back after all; its thread ends."""
        with self.lock:
            self.roster.came_back(job.worker)
            self._wake_all()

    def delivered(self) -> None:
        """The outcomes of one call were settled."""
        with self.lock:
            self.ledger.delivering -= 1
            self._wake_if_settled()

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
            self._seen.revived += len(revived)
            if self._dispatcher.expired == "drop":
                self._dispatcher.remove_expired(now)
                self._answer_given_up(now, outcomes)
            if not self.roster.up():
                self._nobody_serves(now, outcomes)
            if self._evicted:
                outcomes += self._evicted
                self._evicted.clear()
                return revived, outcomes
            return revived, self.ledger.owed(outcomes)

    def wait_until_watched(self, timeout_s: float) -> bool:
        """Sleep for one tick, or until there is something to watch; False when everything has ended."""
        with self.lock:
            if self._finished() and not self._jobs:
                return False
            calm = not (len(self.waiting) or self._evicted or self._jobs or self.roster.any_down())
            self._unwatched, self._calm = calm and self._calm, calm  # one more tick after the last batch
            self._watch.wait(None if self._unwatched else timeout_s)
            self._unwatched = False
            return not self._finished() or bool(self._jobs)

    # -- ending ----------------------------------------------------------------------------------

    def close_door(self) -> None:
        """Take no more requests."""
        with self.lock:
            self.closing = True
            self._wake_all()

    def wait_until_drained(self, timeout_s: float | None) -> bool:
        """Wait until every accepted request has its outcome; False when that takes longer."""
        with self.lock:
            return self._drained.wait_for(lambda: self.ledger.settled, timeout_s)

    def hangs(self, worker: int) -> bool:
        """Whether the thread of a worker hangs and was given up."""
        with self.lock:
            return self.roster.hangs(worker)

    def abandon_queue(self) -> list[Outcome]:
        """Close every request that waits."""
        with self.lock:
            outcomes = [self.ledger.refuse(request) for request in self.waiting.take_all()]
            self._wake_all()
            return self.ledger.owed(outcomes)

    # -- at any time -----------------------------------------------------------------------------

    def stats(self) -> BatcherStats:
        """Return a consistent snapshot of counters and histograms."""
        correction, drifted = self.learner.corrections.drift()
        with self.lock:
            return self._seen.snapshot(
                queued=len(self.waiting),
                running=sum(len(job.requests()) for job in self._jobs.values()),
                replanned=self.learner.replanned,
                workers=len(self.roster.free_at_ms),
                workers_up=self.roster.up(),
                batch_limits=dict(self._dispatcher.limits),
                correction=correction,
                drifted=drifted,
            )

    def replan(self, at_once: bool = False) -> bool:
        """Let the policy plan with what was learned, as `Learner.refresh` does; tell whether it changed."""
        return self.learner.refresh(at_once)

    # -- under the lock --------------------------------------------------------------------------

    def _decide(self, worker: int, outcomes: list[Outcome]) -> Job | None:
        now = self.clock_ms()
        job = self._second_try(worker, now, outcomes)
        if job is not None:
            return job
        batch: Batch | None = None
        try:
            batch = self._dispatcher.next_batch(now, worker)
        except Exception as error:
            taken, self._dispatcher.taken = self._dispatcher.taken, []
            for request in taken + self.waiting.take_all():
                outcomes.append(self.ledger.fail(request, policy_failed(error)))
        if self._given_up:
            self._answer_given_up(now, outcomes)
        if batch is None:
            return None
        seen = self._seen
        seen.batches += 1
        seen.slack_ms.add(batch.slack_ms)
        seen.queue_depth.add(batch.queued)
        seen.batch.add(len(batch.items))
        job = Job(worker, batch.subnet, batch.items, batch.queued, batch.slack_ms)
        self._start(job, now)
        seen.decision_ms.add(self.clock_ms() - now)
        return job

    def _second_try(self, worker: int, now: float, outcomes: list[Outcome]) -> Job | None:
        free = self.roster.free_at_ms
        others = any(ms < math.inf for other, ms in enumerate(free) if other != worker)
        while (suspect := self.waiting.next_suspect(worker, others)) is not None:
            request, subnet = suspect
            if request.deadline_ms < now + self._dispatcher.expected_ms(subnet, 1):
                outcomes.append(self._drop(request, now))
                continue
            job = Job(worker, subnet, [request], len(self.waiting) + 1, request.deadline_ms - now)
            self._seen.batches += 1
            self._start(job, now)
            return job
        return None

    def _start(self, job: Job, now: float) -> None:
        """Book the job's current part on its worker."""
        count = len(job.part)
        job.size = self._dispatcher.padded(job.subnet, count)
        job.started_ms = now
        expected_ms = self._dispatcher.expected_ms(job.subnet, count)
        if not math.isnan(expected_ms):
            job.expected_ms = expected_ms
        patience_ms = self._watchdog_ms
        if patience_ms is None:
            known = (job.worker, job.subnet, job.size) in self._ran
            patience_ms = max(1000.0 if known else 30_000.0, 20.0 * job.expected_ms)
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

    def _abandon(self, job: Job, now: float, outcomes: list[Outcome]) -> None:
        job.abandoned = True
        del self._jobs[job.worker]
        self._seen.hung += 1
        self.roster.hung(job.worker, now)
        for request in job.requests():
            self._retry(request, job, now, worker_hung(job, now), outcomes)
        self._wake_all()

    def _retry(
        self, request: Request, job: Job, now: float, failure: BatchFailed, outcomes: list[Outcome]
    ) -> None:
        """Give a request whose worker was lost a second try, alone, if it had none and there is time."""
        if request.deadline_ms < now + self._dispatcher.expected_ms(job.subnet, 1):
            outcomes.append(self._drop(request, now))
        elif request.retried:
            outcomes.append(self.ledger.fail(request, failure))
        else:
            request.retried = True
            self._seen.retried += 1
            self.waiting.suspect(request, job.subnet, job.worker)

    def _nobody_serves(self, now: float, outcomes: list[Outcome]) -> None:
        """No worker is up: nobody else would tell those whose deadline passes."""
        if self.closing and not self.roster.hope():
            outcomes += [self.ledger.refuse(request) for request in self.waiting.take_all()]
            return
        for request in self.waiting.requests():
            if request.deadline_ms < now:
                self.waiting.remove(request)
                outcomes.append(self._drop(request, now))

    def _answer_given_up(self, now: float, outcomes: list[Outcome]) -> None:
        outcomes += [self._drop(request, now) for request in self._given_up]
        self._given_up.clear()

    def _evict(self, now: float) -> None:
        """Give up the oldest deferred request to make room; the supervisor delivers, for clients do not."""
        _, [oldest] = self._dispatcher.deferred.take(1)
        first = not self._evicted
        self._evicted.append(self._drop(oldest, now))
        if first:
            self.ledger.owed(self._evicted)

    def _drop(self, request: Request, now: float) -> Outcome:
        self.learner.starving = True
        return self.ledger.drop(request, now, self._dispatcher.least_ms(request.floor))

    def _finished(self) -> bool:
        return self.closing and not self._seen.unfinished and not self._evicted

    def _wake_if_settled(self) -> None:
        if self.ledger.settled:
            self._drained.notify_all()
            if self.closing:
                self._wake_all()

    def _wake_all(self) -> None:
        self._work.notify_all()
        self._watch.notify_all()
        self._drained.notify_all()
