"""Compares the simulator with the live batcher, on an engine that takes exactly the time its table says.

The engine sleeps for the A40 latencies that SuperServe's authors measured, so that the comparison does not
depend on how steady this machine's processor is.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from batcher_client import ask_batcher
from in_service import InService, measured_in_service
from open_loop import trace
from torch import Tensor
from tqdm import tqdm

from subnetact import Batcher, HullFit, LatencyTable, SlackFit, simulate
from subnetact.serving import Fixed, Policy

__all__ = ["replay_section"]

TABLE = Path(__file__).parents[1] / "profiling" / "tables" / "nvidia-a40_torch2.9.1_ofa_resnet50_224px.json"
SLO_MS = 36.0
#: request rates over what the largest subnet sustains
LOADS = (0.7, 1.0, 1.4, 2.0)
CV2 = 4.0


class Sleeper:
    """A runner that returns its inputs after the time that its table says."""

    def __init__(self, table: LatencyTable) -> None:
        self.keys = table.subnets
        self._table = table

    def check(self, x: Any) -> None:
        """Accept everything."""

    def run(self, subnet: int, inputs: Sequence[Tensor], batch_size: int) -> Sequence[Tensor]:
        """Sleep for the latency of the batch."""
        time.sleep(float(self._table.latency_ms[subnet, self._table.pad_index[batch_size]]) / 1e3)
        return list(inputs)


def measured(told: LatencyTable) -> LatencyTable:
    """Measure the time that the sleeper really takes: medians of ten runs."""
    engine = Sleeper(told)
    latency_ms = told.latency_ms.copy()
    for subnet in range(len(told.subnets)):
        for column, size in enumerate(told.batch_sizes):
            taken = []
            for _ in range(10):
                start = time.perf_counter()
                engine.run(subnet, [], size)
                taken.append((time.perf_counter() - start) * 1e3)
            latency_ms[subnet, column] = median(taken)
    return LatencyTable(told.subnets, told.accuracy, told.batch_sizes, latency_ms)


def policies(table: LatencyTable) -> dict[str, Policy]:
    """Make the policies that choose, and three fixed ones."""
    return {
        "SlackFit": SlackFit(table, slo_ms=SLO_MS, margin_ms=1.0),
        "HullFit": HullFit(table, slo_ms=SLO_MS),
        **{f"fixed {i}": Fixed(table, i) for i in (0, len(table.subnets) // 2, len(table.subnets) - 1)},
    }


def replay_section(seeds: Sequence[int], seconds: float = 3.0) -> dict[str, Any]:
    """Compare predicted and live attainment, in percent, for every policy, load and seed."""
    told = LatencyTable.load(TABLE)
    table = measured(told)
    inputs = list(torch.arange(64.0).unsqueeze(1))
    capacity = 1e3 * table.batch_sizes[-1] / float(table.latency_ms[-1, -1])
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        learned = trace("bursty", 0.6 * capacity, 5.0, CV2, 99).tolist()
        live = measured_in_service(Sleeper(told), table, inputs, learned, Path(folder) / "corrections.json")
        for load, seed in tqdm([(load, seed) for load in LOADS for seed in seeds], desc="replay"):
            arrivals = [float(t) for t in trace("bursty", load * capacity, seconds, CV2, seed)]
            for name in policies(table):
                gc.collect()
                runs.append(
                    {
                        "load": load,
                        "seed": seed,
                        "policy": name,
                        **_both(name, told, table, live, inputs, arrivals),
                    }
                )
    return {
        "slo_ms": SLO_MS,
        "cv2": CV2,
        "seconds": seconds,
        "capacity_qps": capacity,
        "overhead_ms": live.overhead_ms,
        "factor": live.factor,
        "runs": runs,
    }


def _both(
    name: str,
    told: LatencyTable,
    table: LatencyTable,
    live: InService,
    inputs: list[Tensor],
    arrivals: list[float],
) -> dict[str, float]:
    with Batcher(Sleeper(told), policy=policies(table)[name], slo_ms=SLO_MS) as batcher:
        batcher.corrections.load(live.corrections)
        sent = asyncio.run(ask_batcher(batcher, inputs, arrivals, SLO_MS))
    predicted = simulate(
        arrivals,
        table,
        policies(live.planned)[name],
        slo_ms=SLO_MS,
        workers=1,
        expired="drop",
        overhead_ms=live.overhead_ms,
    )
    return {
        "real": 100 * batcher.stats().met / len(arrivals),
        "predicted": 100 * predicted.attainment,
        "client_lag_p99_ms": float(np.percentile([s.lag_ms for s in sent], 99)),
    }
