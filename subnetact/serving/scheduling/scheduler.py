"""`Scheduler`: every transition of a request and of a worker, without a lock, a thread, a future or a clock.

Whoever drives it calls its methods one at a time and tells it the time. The live batcher is a lock, threads
and a clock around it (`live/driver`), the simulator is a heap of events around it (`simulation/simulator`).

A request either waits or belongs to one job. A job runs in one step or in several: `idle` hands it out,
`step_done` may hand out a more urgent job that goes first on the same worker, and `finished`, `failed` or
`lost` end it. Requests that end without an answer are collected in `ended`, for the driver to take.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    QueueFull,
    RequestError,
    WorkerDied,
    WorkerHung,
    failure_text,
)
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.scheduling.dispatch import Dispatcher
from subnetact.serving.scheduling.fair_shares import SLOWNESS, FairShares, ShareMeter
from subnetact.serving.scheduling.request import BEYOND_SHARE, Job, Request
from subnetact.serving.scheduling.worker_states import WorkerStates, patience_ms

Ended = tuple[Request, str, RequestError | None]
"""A request without an answer, how it ended, and its error; that of a dropped one is made when it is told."""

_NO_PLACE = "queue: %s requests wait already, as many as max_queue allows; retry later, or raise max_queue"
_NO_SHARE = (
    "queue: half of its %s places are taken, and this client has had its share of the workers' time; "
    "wait for answers first"
)
_MANY_BLOCKS = 10**6
"""More layer blocks than any subnet has."""


class Scheduler:
    """Decides which requests run when, on which worker and on which subnet.

    Args:
        policy: chooses the subnet and the batch size.
        tables: one profile per input shape, the largest shape last.
        workers: number of workers.
        slo_ms: the usual time that a request is given, in ms.
        expired: what becomes of expired requests: `drop`, `defer` or `serve`, as in `Batcher`.
        max_queue: number of waiting requests from which on `make_room` refuses further ones.
        watchdog_ms: time after which a batch's worker is taken to hang, in ms; if None, 20 times the expected
            latency, but at least 1 s, and 30 s if the worker has not run this subnet at this size before.
        shares: how clients share the workers' time. If None, they do not.

    Attributes:
        dispatcher: holds the requests that wait, and forms batches.
        workers: the states of the workers.
        jobs: the job that every busy worker runs now.
        tables: the profiles.
        closing: whether no further request comes.
        ended: the requests that ended without an answer since the driver emptied the list.
        counts: how often what happened, under the names of `BatcherStats`.
        shares_workers: whether other schedulers use the same workers.
        warnings: what the driver should log: text, arguments, exception.
    """

    def __init__(
        self,
        policy: Policy,
        tables: Sequence[LatencyTable],
        *,
        workers: int,
        slo_ms: float,
        expired: str = "drop",
        max_queue: float = math.inf,
        watchdog_ms: float | None = None,
        shares: FairShares | None = None,
    ) -> None:
        self.workers = WorkerStates(workers)
        free_at_ms = self.workers.free_at_ms
        self.dispatcher = Dispatcher(policy, tables, free_at_ms, slo_ms, expired, self._drop_all)
        self._shares = None if shares is None else ShareMeter(shares, slo_ms, free_at_ms)
        self.dispatcher.slowness = 1.0 if shares is None else SLOWNESS
        self.jobs: dict[int, Job] = {}
        self.closing = self.shares_workers = False
        self.ended: list[Ended] = []
        self.counts: Counter[str] = Counter()
        self.warnings: list[tuple[str, tuple[object, ...], Exception | None]] = []
        self.tables = tables
        self.max_queue = max_queue
        self._watchdog_ms = watchdog_ms
        self._queue = self.dispatcher.queue
        self._suspects: list[tuple[Request, int, int]] = []
        self._ran: set[tuple[int, int, int]] = set()
        self._heard = True  # whether what the policies observe is of use to them

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return len(self.dispatcher) + len(self._suspects)

    # -- requests ----------------------------------------------------------------------------------

    def check_room(self, count: int) -> None:
        """Refuse requests that belong together if not all may wait."""
        if len(self._queue) + count > self.max_queue:
            raise self._full(_NO_PLACE)

    def make_room(self, client: str) -> None:
        """Make room for one more request of a client; a deferred request may be dropped for it."""
        waiting = len(self) if self.dispatcher.expired == "defer" else len(self._queue)
        least_ms = SLOWNESS * self.dispatcher.plans[-1].work[0]
        beyond = self._shares is not None and not self._shares.has_left(client, least_ms)
        if beyond and waiting >= self.max_queue / 2:
            raise self._full(_NO_SHARE)
        if waiting >= self.max_queue:
            if not self.dispatcher.deferred:
                raise self._full(_NO_PLACE)
            self._drop_all(self.dispatcher.deferred.take(1))

    def _full(self, text: str) -> QueueFull:
        """Count a request that finds the queue full, and return its error."""
        self.counts.update(("refused", "full"))
        return QueueFull(text % self.max_queue)

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests to those that wait, in the order in which they arrived."""
        self.counts["submitted"] += len(requests)
        times = self.dispatcher.arrivals.extend([request.accepted_ms for request in requests])
        for request, now in zip(requests, times, strict=True):
            if self._shares is not None:
                cost_ms = self.dispatcher.work_ms(request)
                if not self._shares.take(request.ask.client, cost_ms, now):
                    request.rank -= BEYOND_SHARE
            self._queue.push(request)

    def withdraw(self, request: Request) -> None:
        """End a request that its client has cancelled, unless it has an outcome."""
        if request.open:
            self._remove(request)
            self._end(request, "cancelled")

    def reject(self, request: Request, error: RequestError) -> None:
        """End a request that ran with an error because of its output, which is not finite."""
        self.counts["not_finite"] += 1
        self._end(request, "failed", error)

    def close_all(self) -> None:
        """End every request that waits with `BatcherClosed`."""
        for request in self._take_all():
            text = "the batcher was closed before this request ran; open another one"
            self._end(request, "closed", BatcherClosed(text))

    def policy_failed(self, error: Exception, waiting: bool = True) -> None:
        """End requests with `BatchFailed` because the policy raised: those taken, and all that wait if so."""
        taken, self.dispatcher.taken = self.dispatcher.taken, []
        text = f"the policy failed: {failure_text(error)}; correct the policy, or give another one"
        for request in taken + (self._take_all() if waiting else []):
            self._end(request, "failed", _caused(BatchFailed(text), error))

    # -- jobs --------------------------------------------------------------------------------------

    def idle(self, worker: int, now_ms: float) -> Job | None:
        """Return the job that an idle worker runs next, or None if there is nothing to do now."""
        job = self._second_try(worker, now_ms)
        if job is not None or not len(self.dispatcher):
            return job
        job = self.dispatcher.next_batch(now_ms, worker)
        if job is None and self.closing and not self.jobs:
            job = self.dispatcher.cheapest_batch(now_ms, worker)  # the policy waits for what cannot come
        return None if job is None else self._begun(job, now_ms)

    def block_length(self, job: Job, layer_blocks: int) -> int:
        """Return after how many of its layer blocks a job asks `step_done`; all of them if never."""
        plan = self.dispatcher.plans[job.shape]
        if job.preempted is not None or plan.preempt is None:
            return layer_blocks
        return max(1, int(plan.block_length(layer_blocks, job.expected_ms)))

    def runs_in_blocks(self, job: Job) -> bool:
        """Return whether a job may be suspended between two layer blocks."""
        return self.block_length(job, _MANY_BLOCKS) < _MANY_BLOCKS

    def step_done(self, job: Job, done: float, now_ms: float) -> Job | None:
        """Return the urgent job that goes first on the worker of a job between two steps, or None.

        The job is suspended until the urgent one has ended. Its own end is expected from `done`, the share of
        its steps that have run, > 0.
        """
        if job.abandoned or not len(self._queue):
            return None
        dispatcher, free = self.dispatcher, enumerate(self.workers.free_at_ms)
        if not self.shares_workers and any(ms <= now_ms and worker not in self.jobs for worker, ms in free):
            return None
        left_ms = (now_ms - job.started_ms - job.paused_ms) * (1.0 - done) / done
        self.workers.free_at_ms[job.worker] = now_ms + left_ms
        if dispatcher.expired != "serve":
            dispatcher.remove_expired(now_ms)
        if not len(self._queue):
            return None
        context = dispatcher.look(now_ms, job.worker)
        running = [other for other in self.jobs.values() if other.preempted is None]
        if dispatcher.plans[job.shape].preempt(context, running) != job.worker:
            return None
        urgent = dispatcher.next_batch(now_ms, job.worker)
        if urgent is None:
            return None
        self.counts["preempted"] += 1
        job.suspended_ms, job.left_ms = now_ms, left_ms
        urgent.preempted = job
        return self._begun(urgent, now_ms)

    def finished(self, job: Job, now_ms: float) -> list[Request]:
        """Close the requests of the part of a job that ran, and go on to its next part."""
        if job.abandoned:
            return []
        answered = [request for request in job.part if request.open]
        for request in answered:
            request.open = False
        self.counts["answered"] += len(answered)
        self._observe(job, now_ms - job.started_ms - job.paused_ms)
        self.workers.succeeded(job.worker)
        self._ran.add((job.worker, job.subnet, job.size))
        self._advance(job, now_ms)
        return answered

    def failed(self, job: Job, error: Exception, now_ms: float) -> None:
        """Split the part of a job that raised, or fail its request if it had only one."""
        if job.abandoned:
            return
        part = [request for request in job.part if request.open]
        most = (len(part) + 1) // 2
        kinds = {kind.__name__ for kind in type(error).__mro__}
        exhausted = bool(kinds & {"OutOfMemoryError", "MemoryError"})  # torch's, or Python's
        if exhausted:
            self.counts["out_of_memory"] += 1
            most = self._limit(job.subnet, job.size, len(part))
        if len(part) > 1:
            self.counts["bisected"] += not exhausted
            job.split(part, most)
        elif part:
            text = f"subnet {job.subnet} failed on this request, alone in its batch: {failure_text(error)}"
            failure = BatchFailed(f"{text}; look at the input and the engine")
            self._end(part[0], "failed", _caused(failure, error))
        self._advance(job, now_ms)

    def lost(self, worker: int, error: BaseException, now_ms: float) -> None:
        """Give the requests of a worker that died a second try."""
        self.counts["died"] += 1
        self.workers.lost(worker, now_ms)
        text = f"a worker died over this request, twice: {failure_text(error)}"
        if job := self.jobs.pop(worker, None):
            text = f"{text}; look at the input and the engine"
            self._retry(job, now_ms, lambda: _caused(WorkerDied(text), error))

    def tick(self, now_ms: float) -> tuple[list[int], list[Job]]:
        """Do what the passage of time alone requires; return the workers to start, and the jobs that hang.

        Workers that ran past their limit are taken to hang, expired requests are dropped although no worker
        is idle or up, and workers whose pause is over are brought back.
        """
        hung = [job for job in self.jobs.values() if now_ms > job.limit_ms]
        for job in hung:
            self._abandon(job, now_ms)
        for job in self.jobs.values():
            if now_ms > job.started_ms + max(50.0, 5.0 * job.expected_ms):
                self.workers.free_at_ms[job.worker] = math.inf
        revived = [] if self.is_over else self.workers.restart(now_ms)
        self.counts["revived"] += len(revived)
        if self.dispatcher.expired == "drop":
            self.dispatcher.remove_expired(now_ms)
        for request, subnet, _ in list(self._suspects):
            if self._is_too_late(request, subnet, now_ms):
                self._remove(request)
                self._end(request, "dropped")
        if len(self) and not self.workers.up() and not self.workers.is_opening():
            self._end_those_without_worker(now_ms)
        return revived, hung

    # -- at any time ---------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Number of requests without an outcome."""
        counts = self.counts
        ended = sum(counts[how] for how in ("answered", "dropped", "failed", "cancelled", "closed"))
        return counts["submitted"] - ended

    @property
    def is_over(self) -> bool:
        """Whether no request is left, and none comes."""
        return self.closing and not self.unfinished

    @property
    def running(self) -> int:
        """Number of requests that are on a worker."""
        return sum(len(one.requests()) for job in self.jobs.values() for one in job.on_worker())

    # -- within --------------------------------------------------------------------------------------

    def _end(self, request: Request, how: str, error: RequestError | None = None) -> None:
        request.open = False
        self.counts[how] += 1
        self.ended.append((request, how, error))

    def _drop_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._end(request, "dropped")

    def _remove(self, request: Request) -> None:
        """Remove a request from wherever it waits."""
        if not self._queue.remove(request):
            self.dispatcher.deferred.remove(request)
        self._suspects = [entry for entry in self._suspects if entry[0] is not request]

    def _waiting(self) -> list[Request]:
        queue, deferred = self._queue, self.dispatcher.deferred
        waiting = queue.requests(0, len(queue)) + deferred.requests(0, len(deferred))
        return waiting + [request for request, _, _ in self._suspects]

    def _take_all(self) -> list[Request]:
        requests = self._waiting()
        self._queue.take(len(self._queue))
        self.dispatcher.deferred.take(len(self.dispatcher.deferred))
        self._suspects.clear()
        return requests

    def _begun(self, job: Job, now_ms: float) -> Job:
        self.counts["batches"] += 1
        self._start(job, now_ms)
        return job

    def _start(self, job: Job, now_ms: float) -> None:
        """Book the job's current part on its worker."""
        job.size, expected_ms = self.dispatcher.plans[job.shape].batch(job.subnet, len(job.part))
        if not math.isnan(expected_ms):
            job.expected_ms = expected_ms
        job.started_ms, job.paused_ms = now_ms, 0.0
        job.limit_ms = now_ms + self._patience_ms(job)
        left_ms = 0.0 if job.preempted is None else job.preempted.left_ms
        self.workers.free_at_ms[job.worker] = now_ms + job.expected_ms + left_ms
        self.jobs[job.worker] = job

    def _patience_ms(self, job: Job) -> float:
        known = (job.worker, job.subnet, job.size) in self._ran
        return patience_ms(self._watchdog_ms, job.expected_ms, known)

    def _advance(self, job: Job, now_ms: float) -> None:
        job.advance()
        if job.part:
            self._start(job, now_ms)
        elif job.preempted is not None:  # which goes on
            suspended = job.preempted
            suspended.paused_ms += now_ms - suspended.suspended_ms
            suspended.limit_ms = now_ms + self._patience_ms(suspended)
            self.jobs[job.worker] = suspended
            self.workers.free_at_ms[job.worker] = now_ms + suspended.left_ms
        else:
            del self.jobs[job.worker]
            self.workers.free_at_ms[job.worker] = now_ms

    def _second_try(self, worker: int, now_ms: float) -> Job | None:
        """Return the job of a request whose worker was lost: alone, the same subnet, another worker.

        So a request that breaks its worker harms no other. If no other worker is up, the same one does.
        """
        if not self._suspects:
            return None
        others = any(ms < math.inf for other, ms in enumerate(self.workers.free_at_ms) if other != worker)
        for entry in list(self._suspects):
            request, subnet, lost_worker = entry
            if lost_worker != worker or not others:
                self._suspects.remove(entry)
                if self._is_too_late(request, subnet, now_ms):
                    self._end(request, "dropped")
                    continue
                job = Job(worker, subnet, [request], len(self) + 1, request.deadline_ms - now_ms)
                return self._begun(job, now_ms)
        return None

    def _retry(self, lost: Job, now_ms: float, failure: Callable[[], BatchFailed]) -> None:
        """Give requests whose worker was lost a second try, if it is their first loss and time is left."""
        for request, job in [(request, one) for one in lost.on_worker() for request in one.requests()]:
            if self._is_too_late(request, job.subnet, now_ms):
                self._end(request, "dropped")
            elif request.retried:
                self._end(request, "failed", failure())
            else:
                request.retried = True
                self.counts["retried"] += 1
                self._suspects.append((request, job.subnet, job.worker))

    def _is_too_late(self, request: Request, subnet: int, now_ms: float) -> bool:
        """Return whether a request whose worker was lost cannot be answered in time by a second try."""
        return request.deadline_ms < now_ms + self.dispatcher.plans[request.shape].batch(subnet, 1)[1]

    def _abandon(self, job: Job, now_ms: float) -> None:
        del self.jobs[job.worker]
        self.counts["hung"] += 1
        self.workers.lost(job.worker, now_ms, hangs=True)
        text = (
            f"subnet {job.subnet}: a worker hung over this request, twice; the last was replaced after "
            f"{now_ms - job.started_ms:.0f} ms, but {job.expected_ms:.1f} ms were expected; look at the "
            "input and the engine, or raise watchdog_ms"
        )
        for one in job.on_worker():
            one.abandoned = True
        self._retry(job, now_ms, lambda: WorkerHung(text))

    def _end_those_without_worker(self, now_ms: float) -> None:
        """End requests while no worker is up: those past their deadline, or all if closing is in vain."""
        if self.closing and not self.workers.any_helps():
            self.close_all()
            return
        for request in self._waiting():
            if request.deadline_ms < now_ms:
                self._remove(request)
                self._end(request, "dropped")

    def _observe(self, job: Job, took_ms: float) -> None:
        """Tell the policy how long a part of a job took, if it wants to know."""
        observe = self.dispatcher.plans[job.shape].observe
        if observe is None or not self._heard:
            return
        table = self.tables[job.shape]
        profiled_ms = float(table.latency_ms[job.subnet, table.pad_index[job.size]])
        try:
            observe(job.subnet, job.size, profiled_ms, took_ms)
        except Exception as error:
            self.warnings.append(("the policy's observe(...) raised; it is not called again", (), error))
            self._heard = False

    def _limit(self, subnet: int, size: int, count: int) -> int:
        """Limit the batch size of a subnet that ran out of memory with `count` requests; return the limit."""
        smaller = [b for b in self.tables[-1].batch_sizes if b <= size // 2]
        most = smaller[-1] if smaller else max(1, count // 2)
        limits = self.dispatcher.limits
        limits[subnet] = most = min(most, limits.get(subnet, most))
        message = "subnet %s ran out of memory at batch size %d; it gets %d from now on"
        self.warnings.append((message, (subnet, size, most), None))
        return most


def _caused(error: BatchFailed, cause: BaseException) -> BatchFailed:
    error.__cause__ = cause
    return error
