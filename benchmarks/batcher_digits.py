"""The digits supernet served live in this process: every way of serving it, on the same arrivals."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from digits_engine import digits_engine, unseen_digits
from fifo import FifoBatcher
from in_service import InService, measured_in_service
from load_generator import ask_batcher, trace
from open_loop import Reply, Sent, run_open_loop, summary
from torch import Tensor
from tqdm import tqdm

from subnetact import Batcher, Engine, Fixed, HullFit, SlackFit, profile_latency, simulate
from subnetact.digits import Digits
from subnetact.serving.context import Policy

__all__ = ["digits_section"]

SLO_MS = 36.0
SIZES = tuple(range(1, 17))
#: a burst's load, as a share of what the largest subnet sustains in service; it lasts a third of the trace
LEVELS = (1.0, 1.4, 1.8)
LULL = 0.4
CV2 = 4.0
FIFO_DELAY_MS = 2.0


class Contest:
    """The engine, its tables, and how each contender serves a trace."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.data: Digits = unseen_digits()
        self.labels: list[int] = self.data.labels.tolist()
        self.engine: Engine = digits_engine()
        self.engine.prepare(SIZES)
        accuracy = [float(known or "nan") for known in self.engine.accuracy]
        self.profile = profile_latency(
            self.engine, SIZES, accuracy, statistic="p50", warmup_ms=1, min_time_ms=40
        )
        gc.collect()
        gc.freeze()
        self.in_service = self._measure()

    @property
    def capacity_qps(self) -> float:
        """What the largest subnet sustains at the largest batch."""
        found = self.in_service
        return 1e3 * SIZES[-1] / float(found.expected.latency_ms[-1, -1] + found.overhead_ms)

    def _measure(self) -> InService:
        capacity = 1e3 * SIZES[-1] / self.profile.latency_ms[-1, -1]
        arrivals = trace("bursty", 0.6 * capacity, 3.0, CV2, 99).tolist()
        return measured_in_service(self.engine, self.profile, self.data, arrivals)

    def arrivals(self, level: float, seed: int) -> list[float]:
        """A lull, a burst and a lull, each of them bursty in itself."""
        part_s = self.seconds / 3
        parts = [
            1e3 * part_s * i + trace("bursty", load * self.capacity_qps, part_s, CV2, 3 * seed + i)
            for i, load in enumerate((LULL, level, LULL))
        ]
        return [float(t) for part in parts for t in part]

    def policies(self) -> dict[str, Callable[[], Policy]]:
        """Those that choose, and every fixed subnet."""
        table = self.in_service.cautious
        choosing: dict[str, Callable[[], Policy]] = {
            "SlackFit": lambda: SlackFit(table, slo_ms=SLO_MS, buckets=4, margin_ms=4.0),
            "HullFit": lambda: HullFit(table, slo_ms=SLO_MS),
        }
        return choosing | {f"fixed {i}": partial(Fixed, table, i) for i in range(len(self.engine))}

    def serve(self, policy: Policy, arrivals_ms: list[float]) -> dict[str, Any]:
        """Serve a trace live, simulate the same, and compare."""
        with Batcher(self.engine, policy=policy, slo_ms=SLO_MS) as batcher:
            sent = asyncio.run(ask_batcher(batcher, list(self.data.images), arrivals_ms, SLO_MS))
        found = summary(sent, self.labels, SLO_MS)
        found["attainment_in_batcher"] = batcher.stats().met / len(arrivals_ms)
        return found

    def predict(self, policy: Policy, arrivals_ms: list[float]) -> dict[str, float]:
        """Simulate what `serve` does."""
        live = self.in_service
        result = simulate(
            arrivals_ms,
            live.expected,
            policy,
            slo_ms=SLO_MS,
            workers=1,
            hopeless="drop",
            noise=live.noise,
            overhead_ms=live.overhead_ms,
        )
        return {"attainment": result.attainment, "effective_accuracy": result.effective_accuracy}

    def serve_fifo(self, subnet: int, arrivals_ms: list[float]) -> dict[str, Any]:
        """Send a trace to the usual dynamic batcher with one subnet."""
        images, engine = list(self.data.images), self.engine

        def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            return engine.run(subnet, inputs, len(inputs))

        async def main() -> list[Sent]:
            async with FifoBatcher(run, SIZES[-1], FIFO_DELAY_MS) as fifo:

                async def send(i: int, left_ms: float) -> Reply:  # noqa: ARG001
                    output = await fifo.infer(images[i % len(images)])
                    return Reply(int(output.argmax()), subnet, self.profile.accuracy[subnet])

                return await run_open_loop(arrivals_ms, send, SLO_MS)

        return summary(asyncio.run(main()), self.labels, SLO_MS)


def digits_section(seeds: Sequence[int], seconds: float) -> dict[str, Any]:
    """Every contender at every level and seed, in random order; medians over the seeds."""
    contest = Contest(seconds)
    live = contest.in_service
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    rng = random.Random(0)
    fifo = (0, len(contest.engine) // 2, len(contest.engine) - 1)
    plan = [(level, seed) for level in LEVELS for seed in seeds]
    for level, seed in tqdm(plan, desc="digits"):
        arrivals = contest.arrivals(level, seed)
        calls: dict[str, Callable[[], dict[str, Any]]] = {
            f"FIFO, fixed {i}": partial(contest.serve_fifo, i, arrivals) for i in fifo
        }
        policies = contest.policies()
        calls |= {name: partial(_live, contest, make, arrivals) for name, make in policies.items()}
        order = list(calls)
        rng.shuffle(order)
        for name in order:
            gc.collect()
            runs.setdefault(f"{level:g}", {}).setdefault(name, []).append(calls[name]())
    return {
        "slo_ms": SLO_MS,
        "seconds": seconds,
        "cv2": CV2,
        "lull": LULL,
        "capacity_qps": contest.capacity_qps,
        "accuracy": contest.profile.accuracy,
        "profile_ms": contest.profile.latency_ms[:, [0, 3, 7, 15]].tolist(),
        "in_service": {
            "factor": live.factor,
            "added_ms": live.added_ms,
            "noise": live.noise,
            "overhead_ms": live.overhead_ms,
        },
        "fifo_delay_ms": FIFO_DELAY_MS,
        "levels": {
            level: {name: _medians(found) for name, found in by_name.items()}
            for level, by_name in runs.items()
        },
    }


def _live(contest: Contest, make: Callable[[], Policy], arrivals: list[float]) -> dict[str, Any]:
    found = contest.serve(make(), arrivals)
    found["predicted"] = contest.predict(make(), arrivals)
    found["off_points"] = 100 * abs(found["predicted"]["attainment"] - found["attainment_in_batcher"])
    return found


def _medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("attainment", "measured_accuracy", "effective_accuracy", "attainment_in_batcher", "off_points")
    result: dict[str, Any] = {name: median(run[name] for run in found) for name in names if name in found[0]}
    result["requests"] = median(run["requests"] for run in found)
    result["latency_p99_ms"] = median(run["latency_ms"].get("p99", float("nan")) for run in found)
    if "predicted" in found[0]:
        result["predicted_attainment"] = median(run["predicted"]["attainment"] for run in found)
        result["worst_off_points"] = max(run["off_points"] for run in found)
    result["effective_accuracy_by_seed"] = [run["effective_accuracy"] for run in found]
    return result
