"""The event loop of `simulate`: arrivals, workers, and what is counted."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from subnetact.errors import PolicyError
from subnetact.serving.policies.running_batch import RunningBatch
from subnetact.serving.scheduling.dispatch import Batch, Dispatcher
from subnetact.serving.simulation.result import Decision, RequestLog, SimulationResult
from subnetact.serving.simulation.scenario import Scenario, WorkerEvent

__all__ = ["EventLoop", "Running"]

_CHUNK = 32768
_LEAST_FACTOR = 0.1


class Running(NamedTuple):
    """A batch that runs on a worker.

    Attributes:
        serial: number of the batch, which distinguishes it from earlier batches of the same worker.
        batch: the batch.
        start_ms: when the batch started, or went on after it was suspended.
        finish_ms: when the batch ends.
        began_ms: when the batch started first; None if it was not suspended.
        ran_ms: how long it ran before it was suspended, ms.
    """

    serial: int
    batch: Batch
    start_ms: float
    finish_ms: float
    began_ms: float | None = None
    ran_ms: float = 0.0


class EventLoop:
    """One simulation.

    Time advances only when no idle worker has anything to serve. Requests are numbered by arrival.

    Args:
        scenario: the input.
        expired: the rule for expired requests.
        rng: the source of the noise.
        decisions: whether to keep every decision.
        requests: whether to keep the outcome of every request.
        progress: whether to show a progress bar.

    Attributes:
        watches_arrivals: whether the loop stops at every arrival although all workers are busy.
    """

    watches_arrivals = False

    def __init__(
        self,
        scenario: Scenario,
        *,
        expired: str,
        rng: np.random.Generator,
        decisions: bool = False,
        requests: bool = False,
        progress: bool = True,
    ) -> None:
        workers, count = scenario.workers, len(scenario.arrivals_ms)
        self.scenario = scenario
        self.free_at = [0.0] * workers
        usual_slo = float(np.median(scenario.slo_ms))
        self.dispatcher: Dispatcher[int] = Dispatcher(
            scenario.policy, self.free_at, usual_slo, expired, self._count_dropped, scenario.table
        )
        self.result = SimulationResult(requests=count, served_by=[0] * len(scenario.table.subnets))
        if decisions:
            self.result.decisions = []
        if requests:
            self.result.log = RequestLog(
                np.full(count, np.nan), np.full(count, np.nan), np.full(count, -1, dtype=np.int32)
            )
        self.now = 0.0
        self.idle = list(range(workers))
        self.busy: list[tuple[float, int, int]] = []
        self.running: list[Running | None] = [None] * workers
        self._parked: list[int] = []
        self._down: set[int] = set()
        self._last_subnet = [-1] * workers
        self._serial = 0
        self._feed = ArrivalFeed(scenario)
        self._real_ms = RealLatency(scenario, rng)
        self._observe: Any = getattr(scenario.policy, "observe", None)
        self._bar = tqdm(total=count, unit="req", unit_scale=True, delay=1, disable=not progress or None)

    def run(self) -> SimulationResult:
        """Simulate until the trace and the queue are empty.

        Returns:
            What was counted.

        Raises:
            PolicyError: the policy answered with something that cannot run, or left requests waiting forever.
        """
        feed, busy, idle = self._feed, self.busy, self.idle
        events = list(reversed(self.scenario.events))
        following = min(feed.next_ms, events[-1].t_ms if events else math.inf)
        while following < math.inf:
            self.now = now = following
            while busy and busy[0][0] <= now:
                self._complete(*heappop(busy))
            while events and events[-1].t_ms <= now:
                self._worker_event(events.pop())
            if feed.next_ms <= now:
                self._arrive(now)
            self.serve()
            event_ms = events[-1].t_ms if events else math.inf
            finish_ms = busy[0][0] if busy else math.inf
            if self._parked or self.watches_arrivals:
                following = min(feed.next_ms, finish_ms, event_ms)
            elif idle:
                following = min(feed.next_ms, event_ms)
                if following == math.inf:
                    following = finish_ms
            else:
                following = min(finish_ms, event_ms)
        self._bar.close()
        return self._finished()

    def _arrive(self, now: float) -> None:
        feed, dispatcher = self._feed, self.dispatcher
        while feed.next_ms <= now:
            times, deadlines, first, floors = feed.until(now)
            dispatcher.queue.extend(deadlines, range(first, first + len(times)), floors)
            dispatcher.arrivals.extend(times)
            if not self._bar.disable:
                self._bar.update(len(times))

    def serve(self) -> None:
        """Form batches for idle workers while requests wait."""
        if self._parked:
            self.idle.extend(self._parked)
            heapify(self.idle)
            self._parked.clear()
        dispatcher, idle = self.dispatcher, self.idle
        while idle and len(dispatcher):
            worker = heappop(idle)
            batch = dispatcher.next_batch(self.now, worker)
            if batch is not None:
                self.start(worker, batch)
            elif len(dispatcher):
                self._parked.append(worker)
            else:
                heappush(idle, worker)

    def take_idle(self) -> int:
        """Remove the idle worker with the lowest number from the idle ones and return it."""
        return heappop(self.idle)

    def return_idle(self, worker: int) -> None:
        """Make a worker idle again that got no batch."""
        heappush(self.idle, worker)

    def running_batches(self, without: Container[int] = ()) -> list[RunningBatch]:
        """Return the batches that run now, as a policy that preempts sees them.

        Args:
            without: workers to leave out.
        """
        return [
            RunningBatch(
                worker,
                run.batch.subnet,
                len(run.batch.items),
                run.start_ms,
                self.free_at[worker],
                tuple(run.batch.deadlines_ms),
            )
            for worker, run in enumerate(self.running)
            if run is not None and worker not in without
        ]

    def start(
        self, worker: int, batch: Batch, remaining_ms: float | None = None, lost_ms: float = 0.0
    ) -> None:
        """Start a batch on a worker now.

        Args:
            worker: index of the worker.
            batch: the batch.
            remaining_ms: time that a preempted batch still needs, ms. If None, the batch takes its latency.
            lost_ms: time added to that latency, ms, which the policy does not expect.
        """
        now, subnet = self.now, batch.subnet
        took = remaining_ms
        if took is None:
            took = self._real_ms(now, subnet, batch.batch_size, batch.expected_ms) + lost_ms
        if self._last_subnet[worker] != subnet:
            if self._last_subnet[worker] >= 0:
                self.result.switches += 1
                took += self.scenario.switch_ms
            self._last_subnet[worker] = subnet
        finish = now + took
        self._serial = serial = self._serial + 1
        self.free_at[worker] = now + (batch.expected_ms if remaining_ms is None else remaining_ms)
        self.running[worker] = Running(serial, batch, now, finish)
        heappush(self.busy, (finish, worker, serial))
        if self.result.decisions is not None:
            self.result.decisions.append(
                Decision(
                    now,
                    worker,
                    batch.queued,
                    batch.slack_ms,
                    subnet,
                    batch.batch_size,
                    len(batch.items),
                    finish,
                )
            )

    def _complete(self, finish: float, worker: int, serial: int) -> None:
        running = self.running[worker]
        if running is None or running.serial != serial:
            return
        batch, start = running.batch, running.start_ms
        self.running[worker] = None
        heappush(self.idle, worker)
        result, count = self.result, len(batch.items)
        late = bisect_left(batch.deadlines_ms, finish)
        result.met += count - late
        result.late += late
        result.accuracy_sum += (count - late) * self.scenario.table.accuracy[batch.subnet]
        result.batches += 1
        result.busy_ms += finish - start
        result.served_by[batch.subnet] += count
        result.end_ms = finish
        if result.log is not None:
            result.log.start_ms[batch.items] = start if running.began_ms is None else running.began_ms
            result.log.finish_ms[batch.items] = finish
            result.log.subnet[batch.items] = batch.subnet
        if self._observe is not None:
            took = finish - start + running.ran_ms
            self._observe(batch.subnet, batch.batch_size, batch.expected_ms, took)

    def interrupt(self, worker: int) -> Running | None:
        """Stop the batch of a worker and return it, without returning its requests to the queue."""
        running = self.running[worker]
        self.running[worker] = None
        if running is not None:
            self.result.preempted += 1
            self.result.busy_ms += self.now - running.start_ms
        return running

    def requeue(self, batch: Batch) -> None:
        """Return the requests of an interrupted batch to the queue."""
        floors = self.scenario.floors
        for deadline, item in zip(batch.deadlines_ms, batch.items, strict=True):
            self.dispatcher.queue.push(
                deadline, item, floors if isinstance(floors, float) else float(floors[item])
            )

    def _worker_event(self, event: WorkerEvent) -> None:
        worker = event.worker
        if event.up:
            if worker in self._down:
                self._down.remove(worker)
                self.free_at[worker] = self.now
                self._last_subnet[worker] = -1
                heappush(self.idle, worker)
            return
        if worker in self._down:
            return
        self._down.add(worker)
        self.free_at[worker] = math.inf
        if worker in self._parked:
            self._parked.remove(worker)
        elif worker in self.idle:
            self.idle.remove(worker)
            heapify(self.idle)
        running = self.interrupt(worker)
        if running is not None:
            self.requeue(running.batch)

    def _count_dropped(self, items: list[int]) -> None:
        self.result.dropped += len(items)

    def _finished(self) -> SimulationResult:
        result, waiting = self.result, len(self.dispatcher)
        if waiting and self._parked:
            raise PolicyError(
                f"{type(self.scenario.policy).__name__} left {waiting} requests waiting on idle workers; "
                "decide() must answer a batch if no batch is running and no request will arrive"
            )
        result.unserved = waiting + result.requests - self._feed.taken
        return result


class ArrivalFeed:
    """Hands out arrivals in order of time.

    Arrays are converted to Python numbers one chunk at a time, so that memory does not grow with the trace.

    Attributes:
        next_ms: time of the next arrival, ms; inf if all have been handed out.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._arrivals = scenario.arrivals_ms
        self._slo_ms = scenario.slo_ms
        self._floors = scenario.floors
        self._some_floor = not isinstance(scenario.floors, float) or scenario.floors > 0
        self._start = 0
        self._at = 0
        self._times: list[float] = []
        self.next_ms = 0.0
        self._load(0)

    @property
    def taken(self) -> int:
        """Number of arrivals that have been handed out."""
        return self._start + self._at

    def until(self, now_ms: float) -> tuple[list[float], list[float], int, list[float] | None]:
        """Hand out the arrivals up to `now_ms`, at most one chunk.

        Returns:
            (times, deadlines, number of the first arrival, floors); floors are None if no request has one.
        """
        at, end = self._at, bisect_right(self._times, now_ms, self._at)
        first = self._start + at
        times, deadlines = self._times[at:end], self._deadlines[at:end]
        floors = self._chunk_floors[at:end] if self._chunk_floors is not None else None
        self._at = end
        if end < len(self._times):
            self.next_ms = self._times[end]
        else:
            self._load(self._start + end)
        return times, deadlines, first, floors

    def _load(self, start: int) -> None:
        end = min(start + _CHUNK, len(self._arrivals))
        chunk = self._arrivals[start:end]
        slo_ms = self._slo_ms if isinstance(self._slo_ms, float) else self._slo_ms[start:end]
        self._start, self._at = start, 0
        self._times = chunk.tolist()
        self._deadlines: list[float] = (chunk + slo_ms).tolist()
        self._chunk_floors: list[float] | None = None
        if self._some_floor:
            floors = self._floors if isinstance(self._floors, float) else self._floors[start:end]
            self._chunk_floors = np.broadcast_to(floors, chunk.shape).tolist()
        self.next_ms = self._times[0] if self._times else math.inf


class RealLatency:
    """The latency that a batch takes, with noise, overhead and co-runners, which the policy does not see."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        self._overhead_ms = scenario.overhead_ms
        self._noise = noise_factors(scenario.noise, rng) if scenario.noise else None
        self._co_runners = scenario.co_runners
        self._table = scenario.table
        self._columns = {size: j for j, size in enumerate(scenario.table.batch_sizes)}
        self._co_runner_ms: dict[float, list[list[float]]] = {}

    def __call__(self, now_ms: float, subnet: int, batch_size: int, expected_ms: float) -> float:
        """Return the latency, ms, of a batch that starts at `now_ms`."""
        if self._co_runners:
            number = sum(r.number for r in self._co_runners if r.start_ms <= now_ms < r.end_ms)
            expected_ms = self._under(number)[subnet][self._columns[batch_size]]
        if self._noise is not None:
            expected_ms *= next(self._noise)
        return expected_ms + self._overhead_ms

    def _under(self, number: float) -> list[list[float]]:
        if number not in self._co_runner_ms:
            self._co_runner_ms[number] = self._table.at_co_runners(number).latency_ms.tolist()
        return self._co_runner_ms[number]


def noise_factors(noise: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield normally distributed factors of mean 1 and standard deviation `noise`, none below 0.1."""
    while True:
        yield from np.maximum(rng.normal(1.0, noise, 4096), _LEAST_FACTOR).tolist()
