"""The event loop of `simulate`: a heap of arrivals and of steps that end, around the scheduler."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from subnetact.errors import PolicyError, WorkerDied
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.scheduling.request import Ask, Job, Request
from subnetact.serving.scheduling.scheduler import Scheduler
from subnetact.serving.simulation.result import Decision, SimulationResult, count_batch

_CHUNK = 32768
_LEAST_FACTOR = 0.1


class WorkerEvent(NamedTuple):
    """A worker comes up or goes down.

    Attributes:
        t_ms: when, ms.
        worker: index of the worker.
        up: True if the worker comes up, False if it goes down.
    """

    t_ms: float
    worker: int
    up: bool


class _Run:
    """A job on a worker, which runs in `steps` steps, of which `done` have ended.

    It started at `began_ms` for the first time, and at `start_ms` since it was suspended last. `before` is
    the job that waits for its end, if it preempted one.
    """

    __slots__ = ("before", "began_ms", "done", "finish_ms", "job", "start_ms", "step_ms", "steps")

    def __init__(self, job: Job, now_ms: float, took_ms: float, steps: float, before: _Run | None) -> None:
        self.job, self.steps, self.done, self.before = job, steps, 0, before
        self.start_ms = self.began_ms = now_ms
        self.finish_ms = now_ms + took_ms
        self.step_ms = took_ms / steps


@dataclass(eq=False)
class EventLoop:
    """One simulation.

    Time advances only when no idle worker has anything to serve. Requests are numbered by arrival. A job of a
    policy that preempts runs in steps of layer blocks; after each of them the scheduler may let an urgent job
    go first, and the suspended one goes on afterwards on the same worker. `feed` are the requests as they
    arrive, which are counted in `result`, and `factors` those of their latencies. The other arguments are as
    in `simulate`, which checks them.
    """

    policy: Policy
    scheduler: Scheduler
    feed: Iterator[Request]
    result: SimulationResult
    _: KW_ONLY
    factors: Iterator[float] = field(default_factory=lambda: repeat(1.0))
    overhead_ms: float = 0.0
    events: Sequence[WorkerEvent] = ()
    blocks: int = 1
    look_ms: float = 0.0
    progress: bool = False

    def __post_init__(self) -> None:
        getattr(self.policy, "reset", lambda: None)()
        self._accuracy = self.scheduler.tables[-1].known_accuracy()
        self._switch_ms = float(getattr(self.policy, "switch_ms", 0.0))
        self._now = 0.0
        self._idle = list(range(len(self.scheduler.workers.free_at_ms)))
        #: what happens when: ends of steps, by worker, and after those of the same time the events of workers
        self._agenda: list[tuple[float, float, int, _Run | WorkerEvent]] = [
            (event.t_ms, math.inf, i, event) for i, event in enumerate(self.events)
        ]
        heapify(self._agenda)
        self._between: list[_Run] = []  # jobs that are between two steps now
        self._last_subnet = [-1] * len(self._idle)
        self._serial = count(1)
        self._next = next(self.feed, None)  # the request that arrives next
        self._bar = tqdm(
            total=self.result.requests,
            unit="req",
            unit_scale=True,
            delay=1,
            disable=not self.progress or None,
        )

    def run(self) -> SimulationResult:
        """Simulate until the trace and the queue are empty, and return what was counted.

        Raises:
            PolicyError: the policy answered with something that cannot run, or left requests waiting forever.
        """
        agenda = self._agenda
        in_steps = hasattr(self.policy, "preempt") and self.blocks > 1
        while True:
            now = agenda[0][0] if agenda else math.inf
            if self._next is not None and (self._idle or in_steps):  # otherwise no arrival can be served yet
                now = min(now, self._next.accepted_ms)
            if now == math.inf:
                break
            self._now = now
            if requests := self._arrived(now):
                self.scheduler.submit(requests)
                self._bar.update(len(requests))
            while agenda and agenda[0][0] <= now:
                ends = heappop(agenda)[-1]
                if isinstance(ends, _Run):
                    self._step_ends(ends)
                else:
                    self._worker_event(ends)
            self._serve(now)
        self._bar.close()
        return self._finished()

    def _arrived(self, now: float) -> list[Request]:
        arrived: list[Request] = []
        feed, request = self.feed, self._next
        while request is not None and request.accepted_ms <= now:
            arrived.append(request)
            request = next(feed, None)
        self._next = request
        return arrived

    def _serve(self, now: float) -> None:
        """Give jobs to idle workers while requests wait, then to those that are between two steps."""
        idle, scheduler = self._idle, self.scheduler
        waiting: list[int] = []  # workers whose policy waits
        while idle and len(scheduler):
            worker = heappop(idle)
            job = scheduler.idle(worker, now)
            if job is None:
                waiting.append(worker)
            else:
                self._start(job)
        for worker in waiting:
            heappush(idle, worker)
        between, self._between = self._between, []
        for run in between:
            urgent = scheduler.step_done(run.job, run.done / run.steps, now)
            if urgent is None:
                self._plan_step(run)
            else:
                run.start_ms = now  # until it goes on
                self._start(urgent, run)
        scheduler.ended.clear()

    def _start(self, job: Job, before: _Run | None = None) -> None:
        now, worker, subnet = self._now, job.worker, job.subnet
        took = job.expected_ms * next(self.factors) + self.overhead_ms  # which the policy does not see
        if self._last_subnet[worker] != subnet:
            if self._last_subnet[worker] >= 0:
                self.result.switches += 1
                took += self._switch_ms
            self._last_subnet[worker] = subnet
        blocks = self.blocks
        steps = blocks / self.scheduler.block_length(job, blocks)
        run = _Run(job, now, took + self.look_ms * (math.ceil(steps) - 1), steps, before)
        self._plan_step(run)
        if self.result.decisions is not None:
            asked = worker, job.queued, job.slack_ms, subnet, job.size, len(job.part)
            self.result.decisions.append(Decision(now, *asked, run.finish_ms))

    def _plan_step(self, run: _Run) -> None:
        """Note when the next step of a job ends."""
        end = self._now + run.step_ms
        last = run.done + 1 >= run.steps or end >= run.finish_ms - 1e-9
        heappush(self._agenda, (run.finish_ms if last else end, run.job.worker, next(self._serial), run))

    def _step_ends(self, run: _Run) -> None:
        now, worker = self._now, run.job.worker
        if self.scheduler.jobs.get(worker) is not run.job:
            return  # the worker went down meanwhile
        if now < run.finish_ms:
            run.done += 1
            self._between.append(run)
            return
        self._count(run)
        self.scheduler.finished(run.job, now)
        if (before := run.before) is not None:  # a suspended job goes on
            before.finish_ms += now - before.start_ms
            before.start_ms = now
            self._last_subnet[worker] = before.job.subnet
            self._plan_step(before)
        else:
            heappush(self._idle, worker)

    def _count(self, run: _Run) -> None:
        result, job, finish = self.result, run.job, run.finish_ms
        late = bisect_left(job.part, finish, key=lambda request: request.deadline_ms)
        count_batch(result, job.subnet, self._accuracy[job.subnet], len(job.part) - late, late, finish)
        if result.log is not None:
            numbers = [request.x for request in job.part]
            result.log.start_ms[numbers] = run.began_ms
            result.log.finish_ms[numbers] = finish
            result.log.subnet[numbers] = job.subnet

    def _worker_event(self, event: WorkerEvent) -> None:
        worker = event.worker
        if event.up == self.scheduler.workers.is_up(worker):
            return
        if event.up:
            self.scheduler.workers.started(worker, self._now)
            self._last_subnet[worker] = -1
            heappush(self._idle, worker)
            return
        if worker in self._idle:
            self._idle.remove(worker)
            heapify(self._idle)
        self._between = [run for run in self._between if run.job.worker != worker]
        self.scheduler.lost(worker, WorkerDied(f"worker {worker} went down"), self._now)

    def _finished(self) -> SimulationResult:
        result, counts, waiting = self.result, self.scheduler.counts, len(self.scheduler)
        if waiting and self._idle:
            raise PolicyError(
                f"{type(self.policy).__name__} left {waiting} requests waiting on idle workers; "
                "decide() must answer a batch if no batch is running and no request will arrive"
            )
        result.preempted, result.dropped = counts["preempted"], counts["dropped"]
        result.unserved = result.missed - result.late - result.dropped
        return result


def arriving(clients: Sequence[str] | None, *columns: npt.ArrayLike) -> Iterator[Request]:
    """Yield requests as they arrive, made in chunks so that memory does not grow with the trace.

    Of each request, or of all, `columns` are the arrival, ms, and the fields of an `Ask` but the client.
    """
    whole = np.broadcast_arrays(*columns)
    for start in range(0, len(whole[0]), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        times, *asked = (column[chunk].tolist() for column in whole)
        names = repeat("") if clients is None else clients[chunk]
        yield from map(Request, map(Ask, *asked, names), times, count(start))


def noise_factors(noise: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield normally distributed factors of mean 1 and standard deviation `noise`, none below 0.1."""
    while True:
        yield from np.maximum(rng.normal(1.0, noise, 4096), _LEAST_FACTOR).tolist()
