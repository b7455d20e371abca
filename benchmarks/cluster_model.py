"""A model of many replicas behind routers that know the queues only from old reports.

Every replica has a deadline queue and a policy, the same code as the live batcher's. Requests reach one of
several routers at random, and the router sends each to one replica at once. A replica reports its queue and
when it is free every `period_ms`; the reports of the replicas are not aligned. Between two reports a router
knows of a replica only what it has itself sent there and which of these requests were answered.

* `central`: one queue for all workers, as in the paper; the routers know everything.
* `slack`: the one that holds less work of two replicas that are drawn at random, as `SlackRouter` ranks them:
  the other routers are taken to have sent in the same proportion since the last report.
* `two`: the same without this assumption.
* `naive`: the one of all replicas that holds the least by the last report and what this router has sent.
* `random`: any replica.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from subnetact import LatencyTable, SlackFit, simulate
from subnetact.serving.scheduling.dispatch import Dispatcher

TABLE = (
    Path(__file__).resolve().parents[1]
    / "profiling"
    / "tables"
    / "nvidia-a40_torch2.9.1_ofa_resnet50_224px.json"
)
SLO_MS = 36.0
BUCKETS = 16
WORKERS = {0.8: (1, 4, 16, 64, 256, 1024), 0.5: (1, 4, 16)}
"""Numbers of workers per load."""
INFORMATION = ((0.0, 1), (5.0, 1), (5.0, 64), (20.0, 1), (20.0, 64), (100.0, 1), (100.0, 64))
"""Periods of the reports, in ms, and numbers of routers."""
LARGE = ((20.0, 1), (5.0, 64), (20.0, 64), (100.0, 64))
"""The same for more than 64 workers, whose simulation takes minutes."""
SETTINGS = ("routing", "period_ms", "routers", "load", "workers")
MOST = 700_000


class Fleet:
    """Replicas with a queue each, and routers.

    Args:
        table: the latency table of every replica.
        workers: number of replicas.
        routing: `slack`, `naive`, `two` or `random`.
        routers: number of routers.
        period_ms: time between two reports of a replica; 0 if routers always know the present state.
        seed: of the choices of the routers.
    """

    def __init__(
        self, table: LatencyTable, workers: int, routing: str, routers: int, period_ms: float, seed: int = 0
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._routing, self._period_ms = routing, period_ms
        self._workers, self._routers = workers, routers
        self._accuracy = np.array(table.accuracy)
        self._free = [[0.0] for _ in range(workers)]
        policy = SlackFit(table, SLO_MS, BUCKETS)
        self._dispatchers: list[Dispatcher[tuple[float, int]]] = [
            Dispatcher(policy, free, SLO_MS, "drop", table=table) for free in self._free
        ]
        self._busy = [False] * workers
        self._count = [0] * workers
        self._queued = np.zeros(workers)  # as last reported
        self._running = np.zeros(workers)
        self._sent = np.zeros((routers, workers))  # since the last report
        self._done = np.zeros((routers, workers))
        self._order = self._rng.random((routers, workers)) * 1e-3  # breaks ties, differently per router
        self._ends: list[tuple[float, int, int, float, Any]] = []
        self.met = 0
        self.accuracy = 0.0

    def run(self, arrivals_ms: np.ndarray[Any, Any]) -> dict[str, float]:
        """Serve arrivals; return attainment and accuracies in percent.

        Args:
            arrivals_ms: arrival times, ms, ascending.
        """
        period, workers = self._period_ms, self._workers
        phases = self._rng.random(workers) * period
        reports = [(phase, worker) for worker, phase in enumerate(phases.tolist())] if period else []
        heapq.heapify(reports)
        at = self._rng.integers(0, self._routers, len(arrivals_ms)).tolist()
        pairs = self._rng.integers(0, workers, (len(arrivals_ms), 2)).tolist()
        for now, router, pair in zip(arrivals_ms.tolist(), at, pairs, strict=True):
            while self._ends and self._ends[0][0] <= now:
                self._end(reports)
            while reports and reports[0][0] <= now:
                _, replica = heapq.heapreplace(reports, (reports[0][0] + period, reports[0][1]))
                self._report(replica)
            worker = self._choose(router, pair)
            self._sent[router, worker] += 1
            dispatcher = self._dispatchers[worker]
            dispatcher.queue.push(now + SLO_MS, (now, router))
            dispatcher.arrivals.append(now)
            if not self._busy[worker]:
                self._start(worker, now)
            elif not period:
                self._queued[worker] += 1
        while self._ends:
            self._end([])
        count = len(arrivals_ms)
        return {
            "attainment": 100 * self.met / count,
            "accuracy": self.accuracy / max(1, self.met),
            "effective": self.accuracy / count,
        }

    def _choose(self, router: int, pair: list[int]) -> int:
        if self._routing == "random" or self._workers == 1:
            return pair[0]
        if self._routing in ("two", "slack"):
            a, b = pair
            return a if self._known(router, a) <= self._known(router, b) else b
        held = self._queued + self._running
        if self._period_ms:
            held = np.maximum(held + self._sent[router] - self._done[router], 0.0)
        return int((held + self._order[router]).argmin())

    def _known(self, router: int, worker: int) -> float:
        """Return how many requests a worker holds, as far as a router knows."""
        held = float(self._queued[worker] + self._running[worker])
        if self._period_ms:
            own = float(self._sent[router, worker] - self._done[router, worker])
            held += own * (self._routers if self._routing == "slack" else 1)
        return max(0.0, held)

    def _report(self, worker: int) -> None:
        self._queued[worker] = len(self._dispatchers[worker])
        self._running[worker] = self._count[worker] if self._busy[worker] else 0.0
        self._sent[:, worker] = self._done[:, worker] = 0.0

    def _start(self, worker: int, now: float) -> None:
        batch = self._dispatchers[worker].next_batch(now, 0)
        self._busy[worker] = batch is not None
        if batch is not None:
            end = now + batch.expected_ms
            self._free[worker][0] = end
            self._count[worker] = len(batch.items)
            accuracy = float(self._accuracy[batch.subnet])
            heapq.heappush(self._ends, (end, worker, len(batch.items), accuracy, batch.items))
        if not self._period_ms:
            self._report(worker)

    def _end(self, reports: list[tuple[float, int]]) -> None:
        """Finish the batch that ends first; reports due before are sent first."""
        end, worker, _, accuracy, items = heapq.heappop(self._ends)
        while reports and reports[0][0] <= end:
            _, other = heapq.heapreplace(reports, (reports[0][0] + self._period_ms, reports[0][1]))
            self._report(other)
        for arrived, router in items:
            self._done[router, worker] += 1
            if end <= arrived + SLO_MS + 1e-9:
                self.met += 1
                self.accuracy += accuracy
        self._busy[worker] = False
        self._start(worker, end)


def central(table: LatencyTable, workers: int, arrivals_ms: np.ndarray[Any, Any]) -> dict[str, float]:
    """Serve arrivals with one queue for all workers, by the simulator.

    Args:
        table: the latency table.
        workers: number of workers.
        arrivals_ms: arrival times, ms, ascending.
    """
    policy = SlackFit(table, SLO_MS, BUCKETS)
    found = simulate(arrivals_ms, table, policy, SLO_MS, workers=workers, progress=False)
    return {
        "attainment": 100 * found.attainment,
        "accuracy": found.mean_accuracy,
        "effective": found.effective_accuracy,
    }


def arrivals_of(table: LatencyTable, workers: int, load: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return Poisson arrivals at a share of the rate that the fastest subnet can answer.

    Args:
        table: the latency table.
        workers: number of workers.
        load: the share.
        seed: of the arrivals.
    """
    rate_per_ms = load * workers / float(np.nanmin(table.latency_ms / np.array(table.batch_sizes)))
    count = int(np.clip(3000 * workers, 20_000, MOST))
    gaps = np.random.default_rng(seed).exponential(1.0 / rate_per_ms, count)
    return np.asarray(np.cumsum(gaps))


def model_section(known: Sequence[dict[str, Any]], keep: Callable[[dict[str, Any]], None]) -> None:
    """Find attainment and accuracy of every routing, number of workers, of routers, period and load.

    Args:
        known: cells that were found before; they are not simulated again.
        keep: gets the results after every new cell.
    """
    table = LatencyTable.load(TABLE)
    rate = float(1e3 / np.nanmin(table.latency_ms / np.array(table.batch_sizes)))
    cells = list(known)
    done = {tuple(cell.get(name) for name in SETTINGS) for cell in cells}
    for load, counts in WORKERS.items():
        for count in counts:
            arrivals = arrivals_of(table, count, load)
            for routing, period, routers in _kinds(count):
                settings = dict(zip(SETTINGS, (routing, period, routers, load, count), strict=True))
                if tuple(settings.values()) in done:
                    continue
                if routing == "central":
                    found = central(table, count, arrivals)
                else:
                    fleet = Fleet(table, count, routing, routers or 1, period or 0.0)
                    found = fleet.run(arrivals)
                    if count == 1 and abs(found["effective"] - cells[-1]["effective"]) > 1e-3:
                        raise AssertionError(f"one replica is not the simulator: {found}, {cells[-1]}")
                shown = {name: value for name, value in settings.items() if value is not None}
                cells.append({**shown, **{name: round(value, 3) for name, value in found.items()}})
                print(cells[-1], flush=True)
                keep({"slo_ms": SLO_MS, "table": TABLE.name, "capacity_per_worker": rate, "cells": cells})


def _kinds(workers: int) -> list[tuple[str, float | None, int | None]]:
    """Return routing, period and number of routers of every simulation of so many workers."""
    found: list[tuple[str, float | None, int | None]] = [("central", None, None), ("random", None, None)]
    information = INFORMATION if workers <= 64 else LARGE
    if workers > 1:
        found += [(routing, *known) for routing in ("slack", "naive", "two") for known in information]
    return found
