"""The headline experiments of VELTAIR, Shepherd and InferLine in kind; what blocks and preemption cost live.

In the folder benchmarks:

    python -m papers --out results/papers.json              # five minutes on two idle cores
    python -m papers --only veltair shepherd inferline      # simulations, the same everywhere
    python -m papers --only blocks urgent pipeline tenants  # live, timed

blocks: throughput of batches of 16 of the largest digits subnet, whole, in blocks and in layer blocks, when
    nothing is urgent.
urgent: how long urgent requests wait behind such batches, with and without preemption.
pipeline: the percentile of a planned pipeline of two stages, estimated and live, with engines that sleep.
tenants: two supernets of sleeping engines on one worker, of which one gets three times what a worker can do.
veltair: greatest rate at which 95 % of every class meet the SLO, for three mixes of short and long models.
shepherd: goodput of one shared group with FLEX over that of a fixed assignment of workers, over burstiness.
inferline: cost and misses of the planned pipeline and of the pipeline that is replicated as a unit.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from papers.coarse_pipeline import plan_coarsely
from papers.flex import Flex
from subnetact import Batcher, Engine, LatencyTable, calibrate
from subnetact.device import machine
from subnetact.digits import distort, load_digits_supernet, undistorted_digits
from subnetact.errors import QueueFull
from subnetact.serving import (
    CheapestFeasible,
    Fixed,
    Pipeline,
    PipelineModel,
    Preemptive,
    Stage,
    StageModel,
    Tenant,
    TenantBatcher,
    bursty,
    plan_pipeline,
    poisson,
    simulate,
    superserve_a40,
)
from subnetact.serving.pipelines.model import StageChoice, estimate_pipeline

FOREVER = 1e9
Found = dict[str, Any]


class Sleeper:
    """A runner that takes the latencies of a table, less what a batch takes beyond the sleep, ms."""

    def __init__(self, table: LatencyTable, overhead_ms: float = 0.0) -> None:
        self.keys = table.subnets
        self._table, self._overhead_ms = table, overhead_ms

    def check(self, x: Any, finite: bool = False) -> None:
        """Accept every input."""

    def run(self, subnet: int, inputs: Any, batch_size: int) -> Any:
        """Sleep, and return the inputs."""
        sizes = self._table.batch_sizes
        time.sleep((float(self._table.latency_ms[subnet, sizes.index(batch_size)]) - self._overhead_ms) / 1e3)
        return list(inputs)


# -- live ----------------------------------------------------------------------------------------------


def digits_engine() -> Engine:
    """Return the largest, a shorter and the smallest digits subnet, calibrated."""
    torch.set_num_threads(1)
    supernet = load_digits_supernet()
    space = supernet.space
    shorter = space.parse({"depth": [2, 2, 1], "expand": [0.25, 0.25, 0.25], "width": [1.0]})
    specs = [space.smallest(), shorter, space.largest()]
    train, _ = undistorted_digits()
    images = distort(train.images, torch.Generator().manual_seed(0))
    calibrate(supernet, specs, [images[i : i + 100] for i in range(0, len(images), 100)])
    return Engine(supernet, specs, example=torch.zeros(1, 1, 16, 16), memory_budget_mb=256)


def blocks(seconds: float) -> Found:
    """Measure throughput through the batcher with and without blocks, interleaved."""
    engine = digits_engine()
    table = quick_table(engine)
    xs = [torch.randn(1, 16, 16) for _ in range(16)]
    policies: dict[str, Callable[[], Any]] = {
        "whole": lambda: Fixed(table, 2),
        "blocks": lambda: Preemptive(Fixed(table, 2)),
        "layer_blocks": lambda: Preemptive(Fixed(table, 2), block_ms=0.0),
    }
    rates: dict[str, list[float]] = {name: [] for name in policies}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, make in policies.items():
            with Batcher(engine, policy=make(), slo_ms=1e4, expired="serve") as batcher:
                start = time.perf_counter()
                futures = [batcher.submit(x, FOREVER) for _ in range(20) for x in xs]
                for future in futures:
                    future.result()
                rates[name].append(len(futures) / (time.perf_counter() - start))
    per_second = {name: median(values) for name, values in rates.items()}
    whole_ms = float(table.latency_ms[2, 1])
    count = engine.start(2, xs, len(xs)).blocks
    each = Preemptive(Fixed(table, 2)).block_length(count, whole_ms)
    batch_ms = {name: 16e3 / value for name, value in per_second.items()}
    return {
        **{f"{name}_per_s": value for name, value in per_second.items()},
        "cost": 1.0 - per_second["blocks"] / per_second["whole"],
        "cost of layer blocks": 1.0 - per_second["layer_blocks"] / per_second["whole"],
        "look_ms": (batch_ms["layer_blocks"] - batch_ms["whole"]) / (count - 1),
        "batch_ms": whole_ms,
        "number of layer blocks": count,
        "layer blocks per block": each,
        "repetitions": len(rates["whole"]),
    }


def quick_table(engine: Engine) -> LatencyTable:
    """Measure every subnet at batch sizes 1 and 16."""
    x = torch.randn(16, 1, 16, 16)
    for subnet in engine.ids:
        engine.pin(subnet)
    cells = []
    for subnet in engine.ids:
        row = []
        for size in (1, 16):
            times = []
            for _ in range(30):
                start = time.perf_counter()
                engine.run(subnet, list(x[:size]), size)
                times.append((time.perf_counter() - start) * 1e3)
            row.append(median(times))
        cells.append(row)
    return LatencyTable(list(engine.keys), [80.0, 90.0, 95.0], [1, 16], cells)


def urgent(count: int) -> Found:
    """Measure how long urgent requests wait behind batches of 16 of the largest subnet."""
    engine = digits_engine()
    table = quick_table(engine)
    whole_ms, one_ms = float(table.latency_ms[2, 1]), float(table.latency_ms[0, 0])
    xs = [torch.randn(1, 16, 16) for _ in range(16)]
    count_of = engine.start(2, xs, len(xs)).blocks
    found: Found = {"batch_ms": whole_ms, "number of layer blocks": count_of}
    rng = np.random.default_rng(0)
    for name, policy in (
        ("whole", Fixed(table, 2)),
        ("blocks", Preemptive(Fixed(table, 2))),
        ("layer blocks", Preemptive(Fixed(table, 2), block_ms=0.0)),
    ):
        waits = []
        with Batcher(engine, policy=policy, slo_ms=1e4, expired="serve") as batcher:
            for _ in range(count):
                slow = [batcher.submit(x, FOREVER) for x in xs]
                time.sleep(float(rng.uniform(0.1, 0.5)) * whole_ms / 1e3)
                future = batcher.submit(xs[0], one_ms + 0.35 * whole_ms)
                waits.append(future.result().waited_ms)
                for one in slow:
                    one.result()
            stats = batcher.stats()
        found[name] = {
            "waited_p50_ms": float(np.percentile(waits, 50)),
            "waited_p99_ms": float(np.percentile(waits, 99)),
            "preempted": stats.preempted,
            "urgent": count,
        }
        if isinstance(policy, Preemptive):
            found[name] |= _block_times(engine, xs, policy.block_length(count_of, whole_ms))
    return found


def _block_times(engine: Engine, xs: list[Any], length: int) -> Found:
    """Measure how long the blocks of a batch of the largest subnet take."""
    times: list[float] = []
    for _ in range(30):
        run, done = engine.start(2, xs, len(xs)), False
        while not done:
            start = time.perf_counter()
            done = run.step(length)
            times.append((time.perf_counter() - start) * 1e3)
    each = len(times) // 30
    return {
        "layer blocks per block": length,
        "longest_block_ms": max(median(times[i::each]) for i in range(each)),
        "block_p99_ms": float(np.percentile(times, 99)),
    }


def two_stages(overhead_ms: float = 0.0) -> tuple[PipelineModel, Any]:
    """Return two stages, of which only the second gains much from the dear hardware, and a bursty trace."""
    a40 = superserve_a40()
    small = LatencyTable(["find"], [99.0], [1, 4, 16], [[2.0, 4.0, 10.0]])

    def slower(table: LatencyTable) -> LatencyTable:
        return replace(table, latency_ms=table.latency_ms + overhead_ms)

    find = {"cpu": slower(small.scaled(1.5)), "gpu": slower(small)}
    read = {"cpu": slower(a40.scaled(10.0)), "gpu": slower(a40)}
    model = PipelineModel(
        (StageModel("find", find), StageModel("read", read, {"find": 0.9}, (1, 2, 3, 4), 78.0)),
        {"cpu": 1.0, "gpu": 5.0},
        150.0,
    )
    return model, bursty(60.0, 120.0, 8.0, 20.0, seed=4)


def batch_overhead_ms() -> float:
    """Measure what a batch takes in a batcher beyond its table, with an engine that sleeps."""
    table = LatencyTable(["a"], [90.0], [1, 4], [[2.0, 5.0]])
    policy = Fixed(table, 0)
    with Batcher(Sleeper(table), policy=policy, slo_ms=1e4, expired="serve", learn=False) as batcher:
        start = time.perf_counter()
        for future in [batcher.submit(i, FOREVER) for i in range(800)]:
            future.result()
        took_ms = (time.perf_counter() - start) * 1e3
        batches = batcher.stats().batches
    return max(0.0, took_ms / batches - 5.0)


def pipeline() -> Found:
    """Serve the planned pipeline live with engines that sleep, and compare its percentile with the plan's.

    The tables that are planned with have what a batch takes beyond the sleep.
    """
    overhead_ms = batch_overhead_ms()
    model, arrivals = two_stages(overhead_ms)
    plan = plan_pipeline(arrivals, model, 99.0, most_workers=32)
    coarse = plan_coarsely(arrivals, model, 99.0, most_workers=32)
    tables = model.chosen_tables(plan.choices)
    rng = np.random.default_rng(0)
    counts = rng.choice(np.array(model.stages[1].inputs), len(arrivals))
    takes = rng.random(len(arrivals)) < 0.9
    choice = plan.choices
    stages = [
        Stage(
            "find", Sleeper(tables["find"], overhead_ms), table=tables["find"], workers=choice["find"].workers
        ),
        Stage(
            "read",
            Sleeper(tables["read"], overhead_ms),
            after={"find": lambda x: x[1]},
            prepare=lambda x: [x] * x[0],
            each=True,
            inputs=model.stages[1].mean_inputs,
            table=tables["read"],
            workers=choice["read"].workers,
            min_accuracy=choice["read"].min_accuracy or None,
        ),
    ]
    latencies: list[float] = []
    with Pipeline(stages, slo_ms=model.slo_ms, sample=(1, True), learn=False) as live:
        start, futures = time.perf_counter(), []
        for at, count, taken in zip((arrivals - arrivals[0]) / 1e3, counts, takes, strict=True):
            time.sleep(max(0.0, start + at - time.perf_counter()))
            futures.append(live.submit((int(count), bool(taken))))
        for future in futures:
            error = future.exception()
            latencies.append(float("inf") if error is not None else future.result().latency_ms)
    live_p99_ms = float(np.percentile(latencies, 99, method="inverted_cdf"))
    return {
        "slo_ms": model.slo_ms,
        "overhead_ms": overhead_ms,
        "choices": {name: chosen._asdict() for name, chosen in choice.items()},
        "cost": plan.cost,
        "coarse_cost": coarse.cost,
        "cost ratio": plan.cost / coarse.cost,
        "planned_p99_ms": plan.estimate.percentile_ms(99.0),
        "live_p99_ms": live_p99_ms,
        "planned over live": plan.estimate.percentile_ms(99.0) / live_p99_ms,
        "live_attainment": float(np.mean(np.array(latencies) <= model.slo_ms)),
    }


def _capacity_qps(table: LatencyTable) -> float:
    """Return how many requests one worker answers per second, in the best batches of the best subnet."""
    return float(np.nanmax(np.array(table.batch_sizes) / table.latency_ms)) * 1e3


def tenants(seconds: float) -> Found:
    """Flood one of two tenants with three times what a worker can do."""
    first = LatencyTable(["a", "b"], [70.0, 80.0], [1, 4], [[4.0, 8.0], [8.0, 16.0]])
    other = LatencyTable(["x"], [90.0], [1, 2], [[5.0, 8.0]])
    quiet: Found = {"learn": False}
    found: Found = {}
    for name, flood in (("calm", 0.25), ("flooded", 3.0)):
        given = [
            Tenant("first", Sleeper(first), 80.0, first, options=quiet),
            Tenant("second", Sleeper(other), 80.0, other, options=quiet),
        ]
        rates = [flood * _capacity_qps(first), 0.25 * _capacity_qps(other)]
        events = sorted((at, i) for i in (0, 1) for at in poisson(rates[i], seconds, seed=i).tolist())
        futures = []
        with TenantBatcher(given) as batcher:
            start = time.perf_counter()
            for at, i in events:
                time.sleep(max(0.0, start + at / 1e3 - time.perf_counter()))
                with contextlib.suppress(QueueFull):
                    futures.append(batcher.submit(given[i].name, i, 80.0))
            for future in futures:
                future.exception()
            stats = batcher.stats()
        found[name] = {
            one: {"attainment": figures.batcher.attainment, "used_ms": figures.used_ms}
            for one, figures in stats.items()
        }
    return found


# -- simulated -------------------------------------------------------------------------------------------


def veltair() -> Found:
    """Find the greatest rate at which 95 % of each class meet the SLO, for three mixes and granularities."""
    layers, cost = 50, 0.0025  # a cut costs 0.25 % of a batch; `blocks` measures about that
    base = LatencyTable(["short", "long"], [70.0, 80.0], [1], [[4.0], [60.0]])
    found: Found = {}
    for mix, long_share in (("light", 0.02), ("medium", 0.06), ("heavy", 0.2)):
        found[mix] = {}
        for name, cuts in (
            ("model-wise", 1),
            ("layer-wise", layers),
            ("blocks of 5", 10),
            ("blocks of 2", 25),
        ):
            table = base.scaled(1.0 + cost * (cuts - 1))
            found[mix][name] = _greatest_rate(table, cuts, long_share)
        best = max(found[mix]["model-wise"], found[mix]["layer-wise"])
        blocks = max(found[mix]["blocks of 5"], found[mix]["blocks of 2"])
        found[mix]["gain of blocks"] = blocks / best - 1.0
    return found


def _greatest_rate(table: LatencyTable, cuts: int, long_share: float) -> float:
    rng = np.random.default_rng(0)
    unit = np.cumsum(rng.exponential(1.0, 4000))
    is_long = rng.random(4000) < long_share
    slo, floors = np.where(is_long, 400.0, 30.0), np.where(is_long, 80.0, 0.0)

    def meets(rate: float) -> bool:
        policy = CheapestFeasible(table)
        options: Found = {"expired": "defer", "min_accuracy": floors, "requests": True}
        arrivals = unit * 1e3 / rate
        if cuts == 1:
            result = simulate(arrivals, table, policy, slo, **options)
        else:
            cut = Preemptive(policy, block_ms=0.0)
            result = simulate(arrivals, table, cut, slo, blocks=cuts, **options)
        assert result.log is not None
        met = result.log.finish_ms <= arrivals + slo
        return bool(met[is_long].mean() >= 0.95 and met[~is_long].mean() >= 0.95)

    low, high = 0.5, 400.0
    while high - low > 0.01 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def shepherd() -> Found:
    """Compare one shared group under FLEX with a fixed assignment of two workers to each of four streams."""
    table = superserve_a40().select([0])
    streams, workers, slo = 4, 2, 36.0
    capacity = _capacity_qps(table)
    found: Found = {}
    for cv2 in (1.0, 4.0, 16.0, 64.0):
        rate = 0.9 * capacity * workers
        traces = [bursty(0.0, rate, cv2, 10.0, seed=i) for i in range(streams)]
        alone = [simulate(trace, table, Fixed(table, 0), slo, workers) for trace in traces]
        merged = np.sort(np.concatenate(traces))
        shared = simulate(merged, table, Fixed(table, 0), slo, workers * streams)
        flex = simulate(merged, table, Flex(table, 0), slo, workers * streams, blocks=10)
        per_s = {
            "fixed": sum(r.met for r in alone) / 10.0,
            "shared": shared.met / 10.0,
            "flex": flex.met / 10.0,
        }
        found[f"cv2 {cv2:g}"] = {
            **per_s,
            "gain": per_s["flex"] / per_s["fixed"],
            "offered": len(merged) / 10.0,
        }
    return found


def inferline() -> Found:
    """Compare the planned pipeline with one that is replicated as a unit, on the planned and a new trace."""
    model, arrivals = two_stages()
    fresh = bursty(60.0, 120.0, 8.0, 20.0, seed=5)
    plans = {"plan": plan_pipeline(arrivals, model, 99.0, most_workers=32)}
    plans["coarse, peak"] = plan_coarsely(arrivals, model, 99.0, most_workers=32)
    calm = poisson(len(arrivals) / 20.0, 20.0, seed=4)
    plans["coarse, mean"] = plan_coarsely(calm, model, 99.0, most_workers=32)
    found: Found = {}
    for name, plan in plans.items():
        choices: dict[str, StageChoice] = plan.choices
        missed = {
            kind: 1.0 - estimate_pipeline(trace, model, choices).attainment
            for kind, trace in (("planned trace", arrivals), ("new trace", fresh))
        }
        found[name] = {
            "cost": plan.cost,
            "missed": missed,
            "plan": {k: c._asdict() for k, c in choices.items()},
        }
    found["cost ratio"] = found["plan"]["cost"] / found["coarse, peak"]["cost"]
    return found


def main() -> None:
    """Run the experiments and print or write their figures."""
    everything: dict[str, Callable[[], Found]] = {
        "blocks": lambda: blocks(60.0),
        "urgent": lambda: urgent(300),
        "pipeline": pipeline,
        "tenants": lambda: tenants(5.0),
        "veltair": veltair,
        "shepherd": shepherd,
        "inferline": inferline,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=everything, default=list(everything))
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON; others in it stay")
    options = parser.parse_args()
    found: Found = {}
    if options.out is not None and options.out.exists():
        found = json.loads(options.out.read_text())
    found["machine"] = machine(torch.device("cpu"))
    for name in options.only:
        gc.collect()
        gc.freeze()  # a full collection of torch's objects would stop the batchers for longer than their SLOs
        start = time.perf_counter()
        found[name] = everything[name]()
        print(
            f"{name} ({time.perf_counter() - start:.1f} s)\n{json.dumps(found[name], indent=1)}", flush=True
        )
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
