"""Measures how long batches, and the gaps between them, take in a running batcher, to predict live runs."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from batcher_client import ask_batcher
from torch import Tensor

from subnetact import Batcher, LatencyTable
from subnetact.serving import Context

__all__ = ["InService", "Recorder", "measured_in_service"]

BATCHES_EACH = 25


class Recorder:
    """A runner that records subnet, number of inputs, start and end (in ms) of every batch."""

    def __init__(self, engine: Any) -> None:
        self.keys = engine.keys
        self.check = engine.check
        self._engine = engine
        self.batches: list[tuple[int, int, float, float]] = []

    def run(self, subnet: int, inputs: Sequence[Tensor], batch_size: int) -> Sequence[Tensor]:
        """Run a batch and record it."""
        start = time.perf_counter()
        outputs: Sequence[Tensor] = self._engine.run(subnet, inputs, batch_size)
        self.batches.append((subnet, len(inputs), start * 1e3, time.perf_counter() * 1e3))
        return outputs


class RandomPolicy:
    """A policy that tries random subnets, each for `BATCHES_EACH` batches, as live policies stay with one.

    `more_waited` says of every batch whether requests waited that it did not hold.
    """

    def __init__(self, table: LatencyTable) -> None:
        self.table = table
        self._rng = random.Random(0)
        self.more_waited: list[bool] = []
        self._subnet = 0

    def decide(self, context: Context) -> tuple[int, int]:
        """Answer (subnet, batch size); half of the batches take all requests that wait, the others a part."""
        if len(self.more_waited) % BATCHES_EACH == 0:
            self._subnet = self._rng.randrange(len(self.table.subnets))
        most = min(context.queued, self.table.batch_sizes[-1])
        size = most if self._rng.random() < 0.5 else self._rng.randint(1, most)
        self.more_waited.append(context.queued > size)
        return self._subnet, size


class InService(NamedTuple):
    """The latencies of a live run.

    Attributes:
        corrections: file of the learned corrections, which later batchers load at their start.
        expected: mean latencies in service, without the slowest 3 % of the batches.
        planned: the latencies that policies plan with, about the 97th percentiles.
        factor: mean latency in service over the profiled latency.
        noise: standard deviation of a batch's latency over the expected one, without the slowest 3 %.
        overhead_ms: median time between two batches while requests wait, in ms.
    """

    corrections: Path
    expected: LatencyTable
    planned: LatencyTable
    factor: float
    noise: float
    overhead_ms: float


def measured_in_service(
    engine: Any,
    profile: LatencyTable,
    inputs: Sequence[Tensor],
    arrivals_ms: Sequence[float],
    corrections: Path,
) -> InService:
    """Serve a trace with batches of every kind, and save what the batcher learned.

    Args:
        engine: the runner.
        profile: its latency table, measured while nothing else ran.
        inputs: the inputs to send.
        arrivals_ms: times at which to send, ascending, in ms.
        corrections: the file of corrections to write.

    Returns:
        The latencies in service.
    """
    recorder, policy = Recorder(engine), RandomPolicy(profile)
    with Batcher(recorder, policy=policy, slo_ms=1e4, learn=False) as batcher:
        asyncio.run(ask_batcher(batcher, inputs, arrivals_ms, 1e4))
    batcher.corrections.save(corrections)
    learned = batcher.corrections.snapshot()
    subnets, sizes, start, end = (np.array(column) for column in zip(*recorder.batches, strict=True))
    typical = profile.latency_ms * learned.mean
    share = (end - start) / typical[subnets, np.array(profile.pad_index)[sizes]]
    kept = share[share < np.percentile(share, 97)]
    expected = typical * float(kept.mean())
    gaps = (start[1:] - end[:-1])[policy.more_waited[:-1]]
    return InService(
        corrections,
        _table(profile, expected),
        _table(profile, profile.latency_ms * learned.planned),
        float((expected / profile.latency_ms).mean()),
        float(kept.std() / kept.mean()),
        float(np.median(gaps)),
    )


def _table(like: LatencyTable, latency_ms: npt.NDArray[np.float64]) -> LatencyTable:
    return LatencyTable(like.subnets, like.accuracy, like.batch_sizes, latency_ms, stamp=dict(like.stamp))
