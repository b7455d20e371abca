"""The event loop behind `simulate`."""

from __future__ import annotations

import math
from bisect import bisect_left
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from subnetact.errors import PolicyError
from subnetact.serving.scheduling.dispatch import Batch, Dispatcher
from subnetact.serving.simulation.arrivals import ArrivalFeed, RealLatency
from subnetact.serving.simulation.metrics import Decision, RequestLog, SimulationResult
from subnetact.serving.simulation.scenario import Scenario, WorkerEvent

__all__ = ["EventLoop", "Running"]


class Running(NamedTuple):
    """A batch on a worker; `serial` tells it from earlier batches there."""

    serial: int
    batch: Batch
    start_ms: float
    finish_ms: float


class EventLoop:
    """One simulation: arrivals, workers, the dispatcher, and the account of what happened.

    Time moves only when no idle worker has anything to serve. Requests are numbered by arrival.
    """

    watches_arrivals = False

    def __init__(
        self,
        scenario: Scenario,
        *,
        hopeless: str,
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
            scenario.policy, self.free_at, usual_slo, hopeless, self._count_dropped, scenario.table
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
        """Simulate to the end of the trace and of the queue."""
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
        """Give work to idle workers while there is any."""
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
        """The lowest-numbered idle worker, no longer idle."""
        return heappop(self.idle)

    def return_idle(self, worker: int) -> None:
        """Make a worker idle that got nothing to do."""
        heappush(self.idle, worker)

    def start(self, worker: int, batch: Batch, remaining_ms: float | None = None) -> None:
        """Run a batch on a worker from now on, for its real latency or for what remains of it."""
        now, subnet = self.now, batch.subnet
        took = remaining_ms
        if took is None:
            took = self._real_ms(now, subnet, batch.batch_size, batch.expected_ms)
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
        _, batch, start, _ = running
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
            result.log.start_ms[batch.items] = start
            result.log.finish_ms[batch.items] = finish
            result.log.subnet[batch.items] = batch.subnet
        if self._observe is not None:
            self._observe(batch.subnet, batch.batch_size, batch.expected_ms, finish - start)

    def interrupt(self, worker: int) -> Running | None:
        """Stop what a worker runs, without returning its requests to the queue."""
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
                f"{type(self.scenario.policy).__name__} left {waiting} requests waiting on idle workers"
            )
        result.unserved = waiting + result.requests - self._feed.taken
        return result
