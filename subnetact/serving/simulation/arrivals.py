"""Arrivals of a simulation, handed out in time order from arrays, a chunk of Python numbers at a time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from subnetact.serving.simulation.scenario import Scenario

__all__ = ["ArrivalFeed", "RealLatency", "noise_factors"]

_CHUNK = 32768
_LEAST_FACTOR = 0.1


class ArrivalFeed:
    """The arrivals not yet queued; memory is one chunk whatever the length of the trace."""

    def __init__(self, scenario: Scenario) -> None:
        self._arrivals = scenario.arrivals_ms
        self._slo_ms = scenario.slo_ms
        self._floors = scenario.floors
        self._some_floor = not isinstance(scenario.floors, float) or scenario.floors > 0
        self._start = 0
        self._at = 0
        self._times: list[float] = []
        #: time of the next arrival; inf when all have been taken
        self.next_ms = 0.0
        self._load(0)

    @property
    def taken(self) -> int:
        """How many arrivals have been handed out."""
        return self._start + self._at

    def until(self, now_ms: float) -> tuple[list[float], list[float], int, list[float] | None]:
        """Arrivals up to `now_ms`, one chunk at most: times, deadlines, number of the first, floors."""
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
    """What a batch really takes, which the policy does not know beforehand."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        self._overhead_ms = scenario.overhead_ms
        self._noise = noise_factors(scenario.noise, rng) if scenario.noise else None
        self._co_runners = scenario.co_runners
        self._table = scenario.table
        self._columns = {size: j for j, size in enumerate(scenario.table.batch_sizes)}
        self._co_runner_ms: dict[float, list[list[float]]] = {}

    def __call__(self, now_ms: float, subnet: int, batch_size: int, expected_ms: float) -> float:
        """Milliseconds one batch takes that starts at `now_ms`."""
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
    """Endless normal factors of mean 1 and standard deviation `noise`, none below 0.1."""
    while True:
        yield from np.maximum(rng.normal(1.0, noise, 4096), _LEAST_FACTOR).tolist()
