"""How long batches take inside a running batcher, and what lies between them, to predict live runs with."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from load_generator import ask_batcher
from torch import Tensor

from subnetact import Batcher, Engine, LatencyTable
from subnetact.digits import Digits
from subnetact.serving.context import Context

__all__ = ["InService", "Recorder", "measured_in_service"]

HIGH = 1.88  # the 97th percentile of a normal distribution, in standard deviations
STAY = 25


class Recorder:
    """The engine, noting (subnet, inputs, start, end in ms) of every batch."""

    def __init__(self, engine: Engine) -> None:
        self.keys = engine.keys
        self.fingerprint = engine.fingerprint
        self.check = engine.check
        self._engine = engine
        self.batches: list[tuple[int, int, float, float]] = []

    def run(self, subnet: int, inputs: Sequence[Tensor], batch_size: int) -> Sequence[Tensor]:
        """Run and note."""
        start = time.perf_counter()
        outputs = self._engine.run(subnet, inputs, batch_size)
        self.batches.append((subnet, len(inputs), start * 1e3, time.perf_counter() * 1e3))
        return outputs


class Anything:
    """A policy that stays with a subnet for some batches, as live ones do, then tries another."""

    def __init__(self, table: LatencyTable) -> None:
        self.table = table
        self._rng = random.Random(0)
        self._decided = 0
        self._subnet = 0

    def decide(self, context: Context) -> tuple[int, int]:
        """Answer (subnet, batch size): half of the time all that wait, otherwise some of them."""
        if self._decided % STAY == 0:
            self._subnet = self._rng.randrange(len(self.table.subnets))
        self._decided += 1
        most = min(context.queued, self.table.batch_sizes[-1])
        return self._subnet, most if self._rng.random() < 0.5 else self._rng.randint(1, most)


class InService(NamedTuple):
    """What a live run adds to the profile.

    Attributes:
        expected: mean times in service.
        cautious: their 97th percentiles, for policies.
        factor: mean time = `factor` x profiled + `added_ms`.
        added_ms: see `factor`.
        noise: standard deviation of a batch's time, as a share.
        overhead_ms: mean time between two batches while requests wait.
    """

    expected: LatencyTable
    cautious: LatencyTable
    factor: float
    added_ms: float
    noise: float
    overhead_ms: float


def measured_in_service(
    engine: Engine, profile: LatencyTable, data: Digits, arrivals_ms: Sequence[float]
) -> InService:
    """Serve a trace with batches of every kind, and fit the profile to the times they take.

    Args:
        engine: the subnets.
        profile: their table, measured with nothing else going on; every batch size up to the largest.
        data: inputs.
        arrivals_ms: when they come.
    """
    recorder = Recorder(engine)
    policy: Any = Anything(profile)
    with Batcher(recorder, policy=policy, slo_ms=1e4, learn=False) as batcher:
        asyncio.run(ask_batcher(batcher, list(data.images), arrivals_ms, 1e4))
    subnets, inputs, start, end = (np.array(column) for column in zip(*recorder.batches, strict=True))
    profiled = profile.latency_ms[subnets, inputs - 1]
    took = end - start
    kept = took < np.percentile(took / profiled, 97) * profiled
    terms = np.stack([profiled, np.ones_like(profiled)], 1)
    (factor, added_ms), *_ = np.linalg.lstsq(terms[kept], took[kept], rcond=None)
    expected = factor * profile.latency_ms + added_ms
    noise = float((took / (factor * profiled + added_ms))[kept].std())
    gaps = start[1:] - end[:-1]
    busy = gaps < np.percentile(gaps, 90)
    return InService(
        _table(profile, expected),
        _table(profile, expected * (1 + HIGH * noise)),
        float(factor),
        float(added_ms),
        noise,
        float(gaps[busy].mean()),
    )


def _table(like: LatencyTable, latency_ms: npt.NDArray[np.float64]) -> LatencyTable:
    return LatencyTable.from_arrays(
        like.subnets, like.accuracy, like.batch_sizes, latency_ms, stamp=dict(like.stamp)
    )
