"""Serves the digits supernet live in this process, in every way and on the same arrivals.

A request is a page of 16 digits, so that the model costs more than the client in the same process.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from batcher_client import ask_batcher
from fifo import FifoBatcher
from in_service import InService, measured_in_service
from open_loop import Reply, Sent, run_open_loop, trace
from torch import Tensor
from tqdm import tqdm

from subnetact import Batcher, HullFit, LatencyTable, SlackFit, profile_latency, simulate
from subnetact.errors import InvalidRequest
from subnetact.serve.digits_engine import digits_engine, unseen_digits
from subnetact.serving import Answer, Fixed, Policy

__all__ = ["digits_section"]

SLO_MS = 100.0
PAGE = 16
SIZES = tuple(range(1, 17))
#: load of each burst over what the largest subnet sustains in service; lulls lie between the bursts
BURSTS = (1.0, 2.0, 3.0, 4.0)
LULL = 0.6
CV2 = 4.0
FIFO_DELAY_MS = 2.0
MARGIN_MS = 10.0


class Pages:
    """A runner for pages of digits: the input is (PAGE, 1, 16, 16), the output PAGE labels."""

    def __init__(self) -> None:
        self._engine = digits_engine()
        self.keys = self._engine.keys
        self.accuracy = [float(known or "nan") for known in self._engine.accuracy]

    def profile(self) -> LatencyTable:
        """Measure the latency of batches of pages while nothing else runs."""
        digits = [PAGE * size for size in SIZES]
        self._engine.prepare(digits)
        found = profile_latency(
            self._engine, digits, self.accuracy, statistic="p50", warmup_ms=1, min_time_ms=100
        )
        return LatencyTable(self.keys, self.accuracy, SIZES, found.latency_ms)

    def check(self, page: Any) -> None:
        """Refuse inputs that are not a page."""
        if not isinstance(page, Tensor) or page.shape[:1] != (PAGE,):
            raise InvalidRequest(f"page: expected a tensor of {PAGE} digits")
        self._engine.check(page[0])

    def run(self, subnet: int, inputs: Sequence[Tensor], batch_size: int) -> Sequence[Tensor]:  # noqa: ARG002
        """Return the labels of every page."""
        digits: Tensor = self._engine(torch.cat(list(inputs)), subnet).argmax(1)
        return list(digits.view(len(inputs), PAGE))


class Contest:
    """The engine, its tables, and the ways to serve a trace.

    Args:
        part_s: length of a burst, in s; a lull lasts twice as long.
        folder: where to keep the learned latencies.
    """

    def __init__(self, part_s: float, folder: Path) -> None:
        self.part_s = part_s
        self.folder = folder
        data = unseen_digits()
        pages = len(data.images) // PAGE
        self.pages = list(data.images[: pages * PAGE].view(pages, PAGE, *data.images.shape[1:]))
        self.labels = list(data.labels[: pages * PAGE].view(pages, PAGE))
        self.engine = Pages()
        self.profile = self.engine.profile()
        gc.collect()
        gc.freeze()

    def learn(self, seed: int) -> InService:
        """Measure the latencies of batches in service, on the machine as it is now."""
        capacity = 1e3 * SIZES[-1] / self.profile.latency_ms[-1, -1]
        arrivals = trace("bursty", 0.6 * capacity, 3.0, CV2, 99 + seed).tolist()
        file = self.folder / f"corrections-{seed}.json"
        return measured_in_service(self.engine, self.profile, self.pages, arrivals, file)

    def arrivals(self, live: InService, bursts: Sequence[float], seed: int) -> list[list[float]]:
        """Make a trace as a list of parts: lulls and bursts in turn, with bursty arrivals inside each."""
        capacity = capacity_qps(live)
        loads = [LULL, *(load for burst in bursts for load in (burst, LULL))]
        parts, start_ms = [], 0.0
        for i, load in enumerate(loads):
            seconds = self.part_s * (2 if load == LULL else 1)
            times = trace("bursty", load * capacity, seconds, CV2, 100 * seed + i)
            parts.append([start_ms + float(t) for t in times])
            start_ms += 1e3 * seconds
        return parts

    def policies(self, table: LatencyTable) -> dict[str, Policy]:
        """Make the policies that choose, and one fixed policy per subnet."""
        choosing: dict[str, Policy] = {
            "SlackFit": SlackFit(table, slo_ms=SLO_MS, margin_ms=MARGIN_MS),
            "HullFit": HullFit(table, slo_ms=SLO_MS),
        }
        return choosing | {f"fixed {i}": Fixed(table, i) for i in range(len(self.engine.keys))}

    def serve(self, name: str, live: InService, parts: list[list[float]]) -> dict[str, Any]:
        """Serve a trace live and simulate the same trace."""
        arrivals = [t for part in parts for t in part]
        with Batcher(self.engine, policy=self.policies(self.profile)[name], slo_ms=SLO_MS) as batcher:
            batcher.corrections.load(live.corrections)
            sent = asyncio.run(ask_batcher(batcher, self.pages, arrivals, SLO_MS, read=self._read))
        found = self.judged(sent, parts)
        predicted = simulate(
            arrivals,
            live.expected,
            self.policies(live.planned)[name],
            slo_ms=SLO_MS,
            workers=1,
            expired="drop",
            noise=live.noise,
            overhead_ms=live.overhead_ms,
        )
        found["attainment_in_batcher"] = batcher.stats().met / len(arrivals)
        found["predicted_attainment"] = predicted.attainment
        return found

    def _read(self, i: int, answer: Answer) -> Reply:
        return self._marked(i, answer.output, answer.subnet)

    def _marked(self, i: int, output: Tensor, subnet: int) -> Reply:
        right = int((output == self.labels[i % len(self.labels)]).sum())
        return Reply(right, subnet, self.profile.accuracy[subnet])

    def judged(self, sent: Sequence[Sent], parts: list[list[float]]) -> dict[str, Any]:
        """Summarise a run; effective accuracy is the percentage of digits that are right and in time."""
        right = [s.reply.label if s.reply is not None and s.latency_ms <= SLO_MS else None for s in sent]
        met = [r for r in right if r is not None]
        ends = list(itertools.accumulate(map(len, parts)))
        return {
            "attainment": len(met) / len(sent),
            "measured_accuracy": 100 * sum(met) / (PAGE * max(1, len(met))),
            "effective_accuracy": 100 * sum(met) / (PAGE * len(sent)),
            "latency_p99_ms": float(np.percentile([s.latency_ms for s in sent if s.reply is not None], 99)),
            "parts": [
                100 * sum(filter(None, right[end - len(part) : end])) / (PAGE * len(part))
                for part, end in zip(parts, ends, strict=True)
            ],
        }

    def serve_fifo(self, subnet: int, parts: list[list[float]]) -> dict[str, Any]:
        """Send a trace to the first-in, first-out batcher with one subnet."""
        arrivals_ms = [t for part in parts for t in part]

        def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            return self.engine.run(subnet, inputs, len(inputs))

        async def main() -> list[Sent]:
            async with FifoBatcher(run, SIZES[-1], FIFO_DELAY_MS) as fifo:

                async def send(i: int, left_ms: float) -> Reply:  # noqa: ARG001
                    return self._marked(i, await fifo.infer(self.pages[i % len(self.pages)]), subnet)

                return await run_open_loop(arrivals_ms, send, SLO_MS)

        return self.judged(asyncio.run(main()), parts)


def capacity_qps(live: InService) -> float:
    """Return the pages per second that the largest subnet sustains at the largest batch size."""
    return 1e3 * SIZES[-1] / float(live.expected.latency_ms[-1, -1] + live.overhead_ms)


def digits_section(seeds: Sequence[int], part_s: float) -> dict[str, Any]:
    """Run every contender on the trace of every seed, in random order; return medians over the seeds."""
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(part_s, Path(folder))
        found, facts = _runs(contest, seeds)
    return {
        "slo_ms": SLO_MS,
        "part_s": part_s,
        "bursts": BURSTS,
        "lull": LULL,
        "cv2": CV2,
        "accuracy": contest.profile.accuracy,
        "profile_ms": contest.profile.latency_ms[:, [0, 3, 7, 15]].tolist(),
        "fifo_delay_ms": FIFO_DELAY_MS,
        "margin_ms": MARGIN_MS,
        "seeds": facts,
        "contenders": {name: _medians(runs) for name, runs in found.items()},
    }


def _runs(
    contest: Contest, seeds: Sequence[int]
) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {}
    facts = []
    rng = random.Random(0)
    for seed in tqdm(seeds, desc="digits"):
        live = contest.learn(seed)
        order_of_bursts = random.Random(seed).sample(BURSTS, len(BURSTS))
        parts = contest.arrivals(live, order_of_bursts, seed)
        facts.append(
            {
                "capacity_qps": capacity_qps(live),
                "requests": sum(map(len, parts)),
                "bursts_in_order": order_of_bursts,
                "factor": live.factor,
                "noise": live.noise,
                "overhead_ms": live.overhead_ms,
            }
        )
        calls: dict[str, Callable[[], dict[str, Any]]] = {
            f"FIFO, fixed {i}": partial(contest.serve_fifo, i, parts) for i in range(len(contest.engine.keys))
        }
        calls |= {name: partial(contest.serve, name, live, parts) for name in contest.policies(live.planned)}
        order = list(calls)
        rng.shuffle(order)
        for name in order:
            gc.collect()
            one = calls[name]()
            bursts = zip(order_of_bursts, one.pop("parts")[1::2], strict=True)
            one["by_burst"] = {f"{load:g}": percent for load, percent in sorted(bursts)}
            runs.setdefault(name, []).append(one)
    return runs, facts


def _medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("attainment", "measured_accuracy", "effective_accuracy", "latency_p99_ms")
    result: dict[str, Any] = {name: median(run[name] for run in found) for name in names}
    result["effective_accuracy_by_seed"] = [run["effective_accuracy"] for run in found]
    result["by_burst"] = {
        load: median(run["by_burst"][load] for run in found) for load in found[0]["by_burst"]
    }
    if "predicted_attainment" in found[0]:
        result["attainment_in_batcher"] = [run["attainment_in_batcher"] for run in found]
        result["predicted_attainment"] = [run["predicted_attainment"] for run in found]
    return result
