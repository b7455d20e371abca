"""The state of a batcher: every transition of a request or a worker, under one lock and without threads."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from threading import Condition, Lock
from typing import Any

from subnetact.errors import BatcherClosed, BatchFailed, InvalidRequest
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.batch_job import BatchJob, is_out_of_memory
from subnetact.serving.live.failures import (
    alone_failed,
    policy_failed,
    queue_full,
    share_full,
    worker_died,
    worker_hung,
)
from subnetact.serving.live.learner import Learner
from subnetact.serving.live.outcomes import Outcomes
from subnetact.serving.live.pending_requests import PendingRequests
from subnetact.serving.live.requests import Outcome, Request
from subnetact.serving.live.stats import BatcherStats
from subnetact.serving.live.worker_states import WorkerStates
from subnetact.serving.policies.running_batch import RunningBatch
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.scheduling.dispatch import Batch, Dispatcher
from subnetact.serving.scheduling.fair_shares import FairShares

__all__ = ["Core"]

_ROOM = 64
"""Clients that add a request without the lock leave room for this many others that do so at the same time."""
_MANY_BLOCKS = 10**6
"""More layer blocks than any subnet has."""


class Core:
    """The queue, the workers and the outcomes of a batcher. Any thread may call the methods.

    Clients take the lock only if a thread has to be woken or the queue is nearly full: a new request lands in
    an inbox, and the methods that look at the queue under the lock empty the inbox into the queue first. A
    client that waited for the lock while it holds Python's global lock would stop the workers and all other
    clients.

    A request either waits or belongs to one job. The method that closes a request, under the lock, returns
    its outcome. The caller then delivers all outcomes that a call returned and calls `delivered` once.

    Args:
        policy: chooses the subnet and the batch size.
        table: the profile, or one profile per input shape, the largest shape last.
        workers: number of workers.
        max_queue: number of waiting requests from which on requests are refused.
        expired: what becomes of expired requests: `drop`, `defer` or `serve`, as in `Batcher`.
        slo_ms: the usual time that a request is given, in ms.
        clock_ms: a monotonic clock, in ms.
        watchdog_ms: time after which a batch's worker is taken to hang, in ms; if None, 20 times the expected
            latency, but at least 1 s, and 30 s if the worker has not run this subnet at this size before.
        learn: whether the policy plans with learned latencies.
        shape_of: returns the position among the profiles of an input's shape. Needed only for several.
        shares: how clients share the workers' time. If None, they do not.
        is_there: returns whether a worker has what it runs batches with. If None, every worker has.
    """

    def __init__(
        self,
        policy: Policy,
        table: LatencyTable | Sequence[LatencyTable],
        *,
        workers: int,
        max_queue: int,
        expired: str,
        slo_ms: float,
        clock_ms: Callable[[], float],
        watchdog_ms: float | None,
        learn: bool,
        shape_of: Callable[[Any], int] | None = None,
        shares: FairShares | None = None,
        is_there: Callable[[int], bool] | None = None,
    ) -> None:
        tables = [table] if isinstance(table, LatencyTable) else list(table)
        table = tables[-1]
        self._shapes = len(tables)
        self._shape_of = shape_of if len(tables) > 1 else None
        self.clock_ms = clock_ms
        self.outcomes = Outcomes()
        self.worker_states = WorkerStates(workers, is_there)
        self.closing = False
        self.lock = Lock()
        self._max_queue = max_queue
        self._accuracy = table.known_accuracy()
        self._table = table
        self._watchdog_ms = watchdog_ms
        self._expired: list[Request] = []  # taken off the queue by the dispatcher, without an outcome yet
        self._left_to_supervisor: list[Outcome] = []
        self._dispatcher: Dispatcher[Request] = Dispatcher(
            policy,
            self.worker_states.free_at_ms,
            slo_ms,
            expired,
            self._expired.extend,
            tables,
            priority=attrgetter("priority"),
            shape=attrgetter("shape"),
        )
        self._queue = self._dispatcher.queue
        self._gate = None if shares is None else self._dispatcher.share(shares)
        if self._gate is not None:
            self.outcomes.tell = self._gate.ended
        self._inbox: deque[Request] = deque()
        self._last_arrival_ms = -math.inf
        self._drops, self._defers = expired == "drop", expired == "defer"
        self._counters = self.outcomes.counters
        self.pending = PendingRequests(self._dispatcher)
        self.learner = Learner(tables, self._dispatcher, self.lock, clock_ms, learn)
        self._jobs: dict[int, BatchJob] = {}
        self._ran: set[tuple[int, int, int]] = set()
        self._work = Condition(self.lock)
        self._wanted = Condition(self.lock)
        self._idle = 0
        self._waking = False
        self._watch = Condition(self.lock)
        self._supervisor_sleeps = self._was_calm = False
        self._drained = Condition(self.lock)

    # -- clients ---------------------------------------------------------------------------------

    def admit(
        self,
        x: Any,
        deadline_ms: float,
        floor: float,
        priority: int,
        future: Any,
        loop: Any,
        client: str = "",
    ) -> Request:
        """Queue one request whose arguments were checked.

        Args:
            x: the input.
            deadline_ms: time that the request is given from now, in ms.
            floor: the minimum accuracy, in percent.
            priority: the higher, the more important.
            future: the future of the client.
            loop: the event loop of the future. If None, the future is an `AnswerFuture`.
            client: name of the client.

        Returns:
            The queued request.

        Raises:
            QueueFull: `max_queue` requests wait already.
            BatcherClosed: The batcher is closed or draining.
        """
        now = self.clock_ms()
        request = Request(x, now, now + deadline_ms, floor, priority, future, loop, client)
        if self._shape_of is not None:
            request.shape = self._shape(x)
        inbox = self._inbox
        room = len(self._queue) + len(inbox) + _ROOM < self._max_queue
        if room and not self._defers and self._gate is None:
            inbox.append(request)
        else:
            self._admit_carefully(request)
        # The flags are read after the request was added, and the threads that set them look into the inbox
        # afterwards; so one of both sides notices the other.
        if self.closing or (self._idle and not self._waking) or self._supervisor_sleeps:
            self._wake_for(request)
        return request

    def _shape(self, x: Any) -> int:
        shape: Any = self._shape_of(x) if self._shape_of is not None else 0
        if type(shape) is not int or not 0 <= shape < self._shapes:
            raise InvalidRequest(f"shape_of: the engine gave {shape!r}; there are {self._shapes} tables")
        return shape

    def _admit_carefully(self, request: Request) -> None:
        """Queue a request if there is room for one more, which only the owner of the lock can tell."""
        with self.lock:
            self._empty_inbox()
            waiting = len(self.pending) if self._defers else len(self._queue)
            if self._gate is not None:
                if not self.closing and not self._gate.has_room(request.client, self._max_queue, waiting):
                    self.outcomes.refuse_full(request)
                    raise share_full(self._max_queue)
            elif waiting >= self._max_queue and not self.closing:
                if not self._dispatcher.deferred:
                    self.outcomes.refuse_full(request)
                    raise queue_full(self._max_queue)
                self._drop_first_deferred(request.accepted_ms)
            self._inbox.append(request)

    def _wake_for(self, request: Request) -> None:
        """Wake a worker and the supervisor for a new request; refuse the request if no worker will come."""
        with self.lock:
            if self.closing and request in self._inbox:
                self._inbox.remove(request)
                raise BatcherClosed("the batcher is closed or draining; open another one")
            self._empty_inbox()
            if self._idle and not self._waking:
                self._wake_a_worker()
            if self._supervisor_sleeps:
                self._supervisor_sleeps = False
                self._watch.notify()

    def _wake_a_worker(self) -> None:
        """Wake one idle worker. Until it runs, no client has to wake it again."""
        self._waking = True
        self._work.notify()

    def _empty_inbox(self) -> None:
        """Move new requests into the queue, unless the batcher is closing: then their clients take them back.

        The caller holds the lock.
        """
        if self._inbox and not self.closing:
            self._accept_inbox()

    def _accept_inbox(self) -> None:
        inbox, push, arrived = self._inbox, self._queue.push, self._dispatcher.arrivals.append
        last, gate = self._last_arrival_ms, self._gate
        for _ in range(len(inbox)):
            request = inbox.popleft()
            now = request.accepted_ms
            if now < last:  # another thread read the clock later, but added its request first
                now = last
            last = now
            arrived(now)
            if gate is None:
                push(request.deadline_ms, request, request.floor)
            else:
                gate.push(now, request.deadline_ms, request, request.floor)
            self._counters.submitted += 1
        self._last_arrival_ms = last
        for job in self._jobs.values():  # one of the new requests may be urgent
            job.calm_ms = -math.inf

    def count_refused(self) -> None:
        """Count a request that is refused because its arguments are invalid."""
        with self.lock:
            self._counters.refused += 1

    def withdraw(self, request: Request) -> bool:
        """Close a request that its client has cancelled.

        Args:
            request: the request.

        Returns:
            Whether the request had no outcome yet.
        """
        with self.lock:
            if not request.open:
                return False
            self._empty_inbox()
            self.pending.remove(request)
            self.outcomes.cancel(request)
            self._wake_if_settled()
            return True

    # -- workers ---------------------------------------------------------------------------------

    def next_job(self, worker: int, wait: bool = True) -> tuple[BatchJob | None, list[Outcome]]:
        """Decide what an idle worker does next.

        Args:
            worker: number of the worker.
            wait: whether to wait until there is something to do.

        Returns:
            The job to run, if there is one, and the outcomes to deliver. If there is neither, the worker
            ends; with `wait=False` there may also just be nothing to do now.
        """
        with self.lock:
            while True:
                while self.worker_states.is_parked(worker) and not self._finished():
                    if not wait:
                        return None, []
                    self._waking = False  # a client may have woken this worker before it was parked
                    self._wanted.wait()
                outcomes: list[Outcome] = []
                self._waking = False  # before the inbox is read, so that later requests wake somebody again
                self._empty_inbox()
                job = self._decide(worker, outcomes) if len(self.pending) else None
                if job is not None or outcomes:
                    if self._idle and len(self.pending):
                        self._wake_a_worker()  # for the requests that came while this worker was woken
                    return job, self.outcomes.owe(outcomes)
                if not wait or self._finished():
                    return None, []
                self._idle += 1
                if not self._inbox:
                    self._work.wait(timeout=0.05 if len(self.pending) else None)
                self._idle -= 1

    def runs_in_blocks(self, job: BatchJob) -> bool:
        """Return whether the policy may suspend a job between two blocks.

        Args:
            job: the job; one that preempted another is not suspended itself.
        """
        if job.beneath is not None or not hasattr(self._dispatcher.policy_of(job.shape), "preempt"):
            return False
        return self.block_length(job, _MANY_BLOCKS) < _MANY_BLOCKS  # otherwise the whole batch is one block

    def block_length(self, job: BatchJob, layer_blocks: int) -> int:
        """Return after how many layer blocks a job asks `urgent_job`.

        Args:
            job: the job.
            layer_blocks: how many layer blocks it has.
        """
        length: Any = getattr(self._dispatcher.policy_of(job.shape), "block_length", None)
        return 1 if length is None else max(1, int(length(layer_blocks, job.expected_ms)))

    def is_calm(self, job: BatchJob, done: float) -> bool:
        """Return, without the lock, whether `urgent_job` needs no call between two blocks of a job.

        Args:
            job: the job.
            done: share of its blocks that have run, > 0.
        """
        if self._inbox or job.abandoned:
            return False
        now = self.clock_ms()
        return now + (now - job.started_ms - job.paused_ms) * (1.0 - done) / done <= job.calm_ms

    def urgent_job(self, job: BatchJob, done: float) -> tuple[BatchJob | None, list[Outcome]]:
        """Decide between two blocks of a job whether another one goes first on its worker.

        Args:
            job: the job; it is suspended until the returned one has ended.
            done: share of its blocks that have run, > 0. The end of the job is expected from it.

        Returns:
            The urgent job, if there is one, and the outcomes to deliver.
        """
        if not (self._inbox or len(self._queue)):  # without the lock: the next block looks again
            return None, []
        with self.lock:
            self._empty_inbox()
            outcomes: list[Outcome] = []
            if job.abandoned or self._idle or not len(self._queue):
                return None, outcomes
            now = self.clock_ms()
            taken_ms = now - job.started_ms - job.paused_ms
            if not self.worker_states.is_parked(job.worker):
                self.worker_states.free_at_ms[job.worker] = now + taken_ms * (1.0 - done) / done
            batch: Batch | None = None
            try:
                batch = self._urgent_batch(job, now)
            except Exception as error:
                taken, self._dispatcher.taken = self._dispatcher.taken, []
                outcomes += [self.outcomes.fail(request, policy_failed(error)) for request in taken]
            if self._expired:
                self._drop_expired(now, outcomes)
            if batch is None:
                return None, self.outcomes.owe(outcomes)
            self._counters.preempted += 1
            job.suspended_ms, job.left_ms = now, taken_ms * (1.0 - done) / done
            return self._job_of(batch, job.worker, now, job), self.outcomes.owe(outcomes)

    def urgent(self, wait_ms: float) -> tuple[int, float]:
        """Return how many requests meet their deadlines now, but not after a wait.

        Args:
            wait_ms: the time that a worker is still needed elsewhere, ms.

        Returns:
            The number, one batch at most, and the least time that they take, ms.
        """
        with self.lock:
            self._empty_inbox()
            now, queue, dispatcher = self.clock_ms(), self._queue, self._dispatcher
            found = 0
            for i in range(min(len(queue), self._table.batch_sizes[-1])):
                least_ms = dispatcher.least_ms(queue.floor(i), queue.item(i).shape)
                if queue.deadline(i) >= now + wait_ms + least_ms:
                    break
                found += queue.deadline(i) >= now + least_ms
            if not found:
                return 0, 0.0
            takes = [dispatcher.expected_ms(subnet, found) for subnet in range(len(self._accuracy))]
            return found, min((ms for ms in takes if ms == ms), default=0.0)

    def suspend(self, job: BatchJob, done: float, urgent: Callable[[float], tuple[int, float]]) -> bool:
        """Suspend a job between two blocks, if more of another batcher's requests are saved than become late.

        Args:
            job: the job.
            done: share of its blocks that have run, > 0.
            urgent: what `urgent` of the other batcher answers.

        Returns:
            Whether the job is suspended, until `resume`.
        """
        now = self.clock_ms()
        left_ms = (now - job.started_ms - job.paused_ms) * (1.0 - done) / done
        saved, takes_ms = urgent(left_ms)  # without this batcher's lock, because it takes the other's
        if not saved:
            return False
        with self.lock:
            ends_ms = now + left_ms
            late = sum(ends_ms <= r.deadline_ms < ends_ms + takes_ms for r in job.part if r.open)
            factor: float = getattr(self._dispatcher.policy_of(job.shape), "factor", 1.0)
            if job.abandoned or saved <= factor * late:
                return False
            self._counters.preempted += 1
            job.suspended_ms, job.left_ms = now, left_ms
            job.limit_ms = math.inf
            return True

    def resume(self, job: BatchJob) -> None:
        """Book a job again that `suspend` has suspended.

        Args:
            job: the job.
        """
        with self.lock:
            self._resume(job, self.clock_ms())

    def assign(self, workers: Collection[int]) -> None:
        """Let only some workers take batches; the others finish theirs and wait.

        Args:
            workers: the numbers of the workers that take batches.
        """
        with self.lock:
            self.worker_states.park_all_but(workers, self.clock_ms(), self._jobs)
            self._wake_all()

    def wait_for_work(self, worker: int) -> bool:
        """Wait until requests wait that a worker may run.

        Args:
            worker: number of the worker.

        Returns:
            Whether there are any; False if the worker ends.
        """
        with self.lock:
            while True:
                self._waking = False
                self._empty_inbox()
                if self._finished():
                    return False
                if self.worker_states.is_parked(worker):
                    self._wanted.wait()
                elif len(self.pending):
                    return True
                else:
                    self._idle += 1
                    if not self._inbox:
                        self._work.wait()
                    self._idle -= 1

    def answered(self, job: BatchJob, outputs: Any) -> list[Outcome]:
        """Answer the part of a job that ran, and go on to its next part.

        Args:
            job: the job.
            outputs: one output per request of the part.

        Returns:
            The outcomes to deliver.
        """
        now = self.clock_ms()
        with self.lock:
            if job.abandoned:
                return []
            outcomes = self.outcomes.answer(job, outputs, self._accuracy[job.subnet], now)
            self.learner.observe(job, now - job.started_ms - job.paused_ms)
            self.worker_states.succeeded(job.worker)
            self._ran.add((job.worker, job.subnet, job.size))
            self._advance(job, now)
            return outcomes

    def raised(self, job: BatchJob, error: Exception) -> list[Outcome]:
        """Split the part of a job that raised, or fail its request if it had only one.

        Args:
            job: the job.
            error: what the engine raised.

        Returns:
            The outcomes to deliver.
        """
        now = self.clock_ms()
        outcomes: list[Outcome] = []
        with self.lock:
            if job.abandoned:
                return outcomes
            counters, part = self._counters, [r for r in job.part if r.open]
            most = (len(part) + 1) // 2
            exhausted = is_out_of_memory(error)
            if exhausted:
                counters.out_of_memory += 1
                most = self.learner.limit(job.subnet, job.size, len(part))
            if len(part) > 1:
                counters.bisected += not exhausted
                job.split(part, most)
            elif part:
                outcomes.append(self.outcomes.fail(part[0], alone_failed(job, error)))
            self._advance(job, now)
            return self.outcomes.owe(outcomes)

    def died(self, worker: int, job: BatchJob | None, error: BaseException) -> list[Outcome]:
        """Give the requests of a worker whose thread ends a second try.

        Args:
            worker: number of the worker.
            job: the job that it ran, if any.
            error: the exception that ends the thread; it is no `Exception`.

        Returns:
            The outcomes to deliver.
        """
        now = self.clock_ms()
        outcomes: list[Outcome] = []
        with self.lock:
            if job is not None and job.abandoned:
                self.worker_states.hung_thread_ended(worker)
                return outcomes
            self._counters.died += 1
            self.worker_states.died(worker, now)
            lost = self._jobs.pop(worker, None)
            for one in [] if lost is None else lost.on_worker():
                for request in one.requests():
                    self._retry(request, one, now, worker_died(error), outcomes)
            self._wake_all()
            return self.outcomes.owe(outcomes)

    def entering(self, worker: int) -> None:
        """Note that a worker starts and cannot run batches yet.

        Args:
            worker: number of the worker.
        """
        with self.lock:
            self.worker_states.starting(worker)

    def entered(self, worker: int) -> None:
        """Note that a worker's thread can run batches.

        Args:
            worker: number of the worker.
        """
        with self.lock:
            self.worker_states.started(worker, self.clock_ms())

    def returned(self, job: BatchJob) -> None:
        """Note that a call that hung has returned although its worker was replaced; its thread ends.

        Args:
            job: the abandoned job.
        """
        with self.lock:
            self.worker_states.hung_thread_ended(job.worker)
            self._wake_all()

    def delivered(self) -> None:
        """Note that the outcomes of one call were delivered."""
        with self.lock:
            self.outcomes.undelivered -= 1
            self._wake_if_settled()

    # -- supervisor ------------------------------------------------------------------------------

    def tick(self) -> tuple[list[int], list[Outcome]]:
        """Do what the passage of time alone requires.

        Workers that ran past their limit are replaced, expired requests are dropped although no worker is
        idle or up, and workers whose pause is over are brought back.

        Returns:
            The numbers of the workers to start again, each to be followed by `entered`, and the outcomes to
            deliver.
        """
        with self.lock:
            self._empty_inbox()
            now = self.clock_ms()
            outcomes: list[Outcome] = []
            for job in list(self._jobs.values()):
                if now > job.limit_ms:
                    self._abandon(job, now, outcomes)
                elif now > job.started_ms + max(50.0, 5.0 * job.expected_ms):
                    self.worker_states.free_at_ms[job.worker] = math.inf
            revived = [] if self._finished() else self.worker_states.restart(now)
            self._counters.revived += len(revived)
            if self._drops:
                self._dispatcher.remove_expired(now)
                self._drop_expired(now, outcomes)
            for request, subnet in self.pending.suspects():
                if self._is_too_late(request, subnet, now):
                    self.pending.remove(request)
                    outcomes.append(self._drop(request, now))
            if not self.worker_states.up() and not self.worker_states.is_opening():
                self._end_those_without_worker(now, outcomes)
            if self._left_to_supervisor:
                outcomes += self._left_to_supervisor
                self._left_to_supervisor.clear()
                return revived, outcomes
            return revived, self.outcomes.owe(outcomes)

    def wait_until_watched(self, timeout_s: float) -> bool:
        """Sleep for one tick of the supervisor, or until there is something to supervise.

        Args:
            timeout_s: length of a tick, in s.

        Returns:
            Whether the supervisor goes on; False if the batcher is closed and everything has ended.
        """
        with self.lock:
            self._empty_inbox()
            if self._finished() and not self._jobs:
                return False
            calm = not (
                len(self.pending) or self._left_to_supervisor or self._jobs or self.worker_states.any_down()
            )
            # one more tick follows the last batch, so that what it taught is applied
            self._supervisor_sleeps, self._was_calm = calm and self._was_calm, calm
            if not (self._supervisor_sleeps and self._inbox):
                self._watch.wait(None if self._supervisor_sleeps else timeout_s)
            self._supervisor_sleeps = False
            return not self._finished() or bool(self._jobs)

    # -- ending ----------------------------------------------------------------------------------

    def stop_admitting(self) -> None:
        """Refuse all further requests."""
        with self.lock:
            if not self.closing:
                self.closing = True
                self._accept_inbox()
                everyone = range(len(self.worker_states.free_at_ms))
                self.worker_states.park_all_but(everyone, self.clock_ms(), self._jobs)
            self._wake_all()

    def wait_until_drained(self, timeout_s: float | None) -> bool:
        """Wait until every accepted request has its outcome.

        Args:
            timeout_s: longest time to wait, in s; if None, there is no limit.

        Returns:
            Whether every request has its outcome.
        """
        with self.lock:
            return self._drained.wait_for(lambda: self.outcomes.settled, timeout_s)

    def hangs(self, worker: int) -> bool:
        """Return whether a worker is down and one of its threads hangs.

        Args:
            worker: number of the worker.
        """
        with self.lock:
            return self.worker_states.hangs(worker)

    def abandon_queue(self) -> list[Outcome]:
        """Close every request that waits.

        Returns:
            The outcomes to deliver.
        """
        with self.lock:
            self._empty_inbox()
            outcomes = [self.outcomes.close(request) for request in self.pending.take_all()]
            self._wake_all()
            return self.outcomes.owe(outcomes)

    # -- at any time -----------------------------------------------------------------------------

    def stats(self) -> BatcherStats:
        """Return a consistent snapshot of the counters and histograms."""
        correction, drifted = self.learner.corrections.drift()
        with self.lock:
            self._empty_inbox()
            return self._counters.snapshot(
                queued=len(self.pending),
                running=sum(len(one.requests()) for job in self._jobs.values() for one in job.on_worker()),
                replanned=self.learner.replanned,
                workers=len(self.worker_states.free_at_ms),
                workers_up=self.worker_states.up(),
                batch_limits=dict(self._dispatcher.limits),
                correction=correction,
                drifted=drifted,
            )

    def replan(self, at_once: bool = False) -> bool:
        """Let the policy plan with what was learned, as `Learner.refresh` does.

        Args:
            at_once: whether to do so even if the last time is not long ago.

        Returns:
            Whether the policy was given other latencies.
        """
        return self.learner.refresh(at_once)

    # -- under the lock --------------------------------------------------------------------------

    def _decide(self, worker: int, outcomes: list[Outcome]) -> BatchJob | None:
        now = self.clock_ms()
        job = self._second_try(worker, now, outcomes)
        if job is not None:
            return job
        batch: Batch | None = None
        try:
            batch = self._dispatcher.next_batch(now, worker)
            if batch is None and self.closing and not self._jobs:
                batch = self._dispatcher.cheapest_batch(now)  # the policy waits for requests that cannot come
        except Exception as error:
            taken, self._dispatcher.taken = self._dispatcher.taken, []
            for request in taken + self.pending.take_all():
                outcomes.append(self.outcomes.fail(request, policy_failed(error)))
        if self._expired:
            self._drop_expired(now, outcomes)
        if batch is None:
            return None
        return self._job_of(batch, worker, now)

    def _job_of(self, batch: Batch, worker: int, now: float, beneath: BatchJob | None = None) -> BatchJob:
        counters = self._counters
        counters.batches += 1
        counters.slack_ms.add(batch.slack_ms)
        counters.queue_depth.add(batch.queued)
        counters.batch.add(len(batch.items))
        job = BatchJob(worker, batch.subnet, batch.items, batch.queued, batch.slack_ms)
        job.beneath = beneath
        self._start(job, now)
        counters.decision_ms.add(self.clock_ms() - now)
        return job

    def _urgent_batch(self, job: BatchJob, now: float) -> Batch | None:
        """Return the batch that a suspended job gives way to, or None if the policy lets it go on."""
        dispatcher = self._dispatcher
        if dispatcher.expired != "serve":
            dispatcher.remove_expired(now)
        if not len(self._queue):
            return None
        policy: Any = dispatcher.policy_of(job.shape)
        preempt: Any = getattr(policy, "preempt", None)
        if preempt is None:
            return None
        context = dispatcher.look(now, job.worker)
        calm_until: Any = getattr(policy, "calm_until", None)
        if calm_until is not None:
            calm_ms = calm_until(context)
            if self._gate is None:
                job.calm_ms = calm_ms
            if max(now, min(context.free_at_ms)) <= calm_ms:
                return None
        running = [
            RunningBatch(
                worker,
                other.subnet,
                len(other.part),
                other.started_ms,
                self.worker_states.free_at_ms[worker],
                tuple(request.deadline_ms for request in other.part),
            )
            for worker, other in self._jobs.items()
            if other.beneath is None
        ]
        if preempt(context, running) != job.worker:
            return None
        return dispatcher.next_batch(now, job.worker)

    def _resume(self, job: BatchJob, now: float) -> None:
        """Book a job again that was suspended."""
        job.paused_ms += now - job.suspended_ms
        job.calm_ms = -math.inf
        job.limit_ms = now + self._patience_ms(job)
        self._jobs[job.worker] = job
        parked = self.worker_states.is_parked(job.worker)
        self.worker_states.free_at_ms[job.worker] = math.inf if parked else now + job.left_ms

    def _second_try(self, worker: int, now: float, outcomes: list[Outcome]) -> BatchJob | None:
        free = self.worker_states.free_at_ms
        others = any(ms < math.inf for other, ms in enumerate(free) if other != worker)
        while (suspect := self.pending.next_suspect(worker, others)) is not None:
            request, subnet = suspect
            if self._is_too_late(request, subnet, now):
                outcomes.append(self._drop(request, now))
                continue
            job = BatchJob(worker, subnet, [request], len(self.pending) + 1, request.deadline_ms - now)
            self._counters.batches += 1
            self._start(job, now)
            return job
        return None

    def _start(self, job: BatchJob, now: float) -> None:
        """Book the job's current part on its worker."""
        count = len(job.part)
        job.size = self._dispatcher.padded(job.subnet, count, job.shape)
        job.started_ms = now
        expected_ms = self._dispatcher.expected_ms(job.subnet, count, job.shape)
        if not math.isnan(expected_ms):
            job.expected_ms = expected_ms
        job.limit_ms = now + self._patience_ms(job)
        job.paused_ms, job.calm_ms = 0.0, -math.inf
        ends_ms = now + job.expected_ms
        if job.beneath is not None:
            ends_ms += job.beneath.left_ms
        parked = self.worker_states.is_parked(job.worker)
        self.worker_states.free_at_ms[job.worker] = math.inf if parked else ends_ms
        self._jobs[job.worker] = job

    def _patience_ms(self, job: BatchJob) -> float:
        if self._watchdog_ms is not None:
            return self._watchdog_ms
        known = (job.worker, job.subnet, job.size) in self._ran
        return max(1000.0 if known else 30_000.0, 20.0 * job.expected_ms)

    def _advance(self, job: BatchJob, now: float) -> None:
        job.advance()
        if job.part:
            self._start(job, now)
            return
        if job.beneath is not None:
            self._resume(job.beneath, now)
            return
        del self._jobs[job.worker]
        parked = self.worker_states.is_parked(job.worker)
        self.worker_states.free_at_ms[job.worker] = math.inf if parked else now

    def _abandon(self, job: BatchJob, now: float, outcomes: list[Outcome]) -> None:
        del self._jobs[job.worker]
        self._counters.hung += 1
        self.worker_states.hung(job.worker, now)
        for one in job.on_worker():
            one.abandoned = True
            for request in one.requests():
                self._retry(request, one, now, worker_hung(job, now), outcomes)
        self._wake_all()

    def _retry(
        self, request: Request, job: BatchJob, now: float, failure: BatchFailed, outcomes: list[Outcome]
    ) -> None:
        """Give a request whose worker was lost a second try, if this is its first loss and time is left."""
        if self._is_too_late(request, job.subnet, now):
            outcomes.append(self._drop(request, now))
        elif request.retried:
            outcomes.append(self.outcomes.fail(request, failure))
        else:
            request.retried = True
            self._counters.retried += 1
            self.pending.add_suspect(request, job.subnet, job.worker)

    def _is_too_late(self, request: Request, subnet: int, now: float) -> bool:
        """Return whether a request whose worker was lost cannot be answered in time by a second try."""
        return request.deadline_ms < now + self._dispatcher.expected_ms(subnet, 1, request.shape)

    def _end_those_without_worker(self, now: float, outcomes: list[Outcome]) -> None:
        """End requests while no worker is up: those past their deadline, or all if closing is in vain."""
        if self.closing and not self.worker_states.any_helps():
            outcomes += [self.outcomes.close(request) for request in self.pending.take_all()]
            return
        for request in self.pending.requests():
            if request.deadline_ms < now:
                self.pending.remove(request)
                outcomes.append(self._drop(request, now))

    def _drop_expired(self, now: float, outcomes: list[Outcome]) -> None:
        outcomes += [self._drop(request, now) for request in self._expired]
        self._expired.clear()

    def _drop_first_deferred(self, now: float) -> None:
        """Make room in a full queue; the supervisor delivers the outcome, because clients deliver none."""
        _, [request] = self._dispatcher.deferred.take(1)
        first = not self._left_to_supervisor
        self._left_to_supervisor.append(self._drop(request, now))
        if first:
            self.outcomes.owe(self._left_to_supervisor)

    def _drop(self, request: Request, now: float) -> Outcome:
        self.learner.dropping = True
        return self.outcomes.drop(request, now, self._dispatcher.least_ms(request.floor, request.shape))

    def _finished(self) -> bool:
        return self.closing and not self._counters.unfinished and not self._left_to_supervisor

    def _wake_if_settled(self) -> None:
        if self.outcomes.settled:
            self._drained.notify_all()
            if self.closing:
                self._wake_all()

    def _wake_all(self) -> None:
        self._work.notify_all()
        self._wanted.notify_all()
        self._watch.notify_all()
        self._drained.notify_all()
