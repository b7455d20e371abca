"""Compares latency tables with a stopwatch that knows nothing of them, alone and beside busy processes.

    python benchmarks/table_truth.py [--family digits] [--pixels 64] [--rounds 9] [--busy 2]
        [--only fused zero-copy view extract]

For every mode, `profile_latency` and the stopwatch take turns: a loop of `perf_counter` around what a user
calls, `engine(x, subnet=i)`, `supernet.subnet(spec)(x)` or `supernet.extract(spec)(x)`. There are ten subnets
at three batch sizes, 30 cells. Then the table is measured again while `--busy` processes count: cells must be
suspect, or within 10 % of what they were before. Its front is compared with that of the stopwatch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from harness import Run, options_of, run
from scipy.stats import spearmanr

import subnetact
from ofa_adapters import load
from subnetact.digits import load_digits_supernet

MODES = ("fused", "zero-copy", "view", "extract")
RUNS = 10
Cell: TypeAlias = tuple[int, int]
"""A subnet and a batch size."""


def stopwatch(calls: dict[Cell, Callable[[], Any]], taken: dict[Cell, list[float]]) -> None:
    """Time every call a few times after a warm-up, and again after all others."""
    with torch.inference_mode():
        for _ in range(3):
            for cell, call in calls.items():
                warm = time.perf_counter() + 0.02  # Right after another network, caches are cold.
                while time.perf_counter() < warm:
                    call()
                for _ in range(RUNS):
                    begun = time.perf_counter()
                    call()
                    taken.setdefault(cell, []).append(1e3 * (time.perf_counter() - begun))


def dominated(ms: np.ndarray, accuracy: list[float], i: int) -> list[float]:
    """Return the latencies, relative to that of a subnet, of those that are faster and more accurate."""
    return [ms[j] / ms[i] for j in range(len(ms)) if ms[j] < ms[i] and accuracy[j] > accuracy[i]]


def compared(mode: str, engine: subnetact.Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Return how far the table of a mode is from the stopwatch."""
    supernet, cells = engine.supernet, dict[Cell, Callable[[], Any]]()
    inputs = {size: torch.randn(size, *engine.sample.shape) for size in args.batch_sizes}
    networks = {"view": supernet.subnet, "extract": supernet.extract}
    for i, spec in zip(engine.ids, engine.specs, strict=True):
        network = networks[mode](spec) if mode in networks else None
        for size, x in inputs.items():
            cells[i, size] = partial(engine, x, subnet=i) if network is None else partial(network, x)
    accuracy, tables, watched = [70.0 + 0.5 * i for i in engine.ids], [], []
    before = os.getloadavg()[0]
    how: dict[str, Any] = {"mode": mode, "min_time_ms": 60.0, "max_windows": 5}
    for _ in range(args.rounds):
        tables.append(subnetact.profile_latency(engine, args.batch_sizes, accuracy, **how))
        times: dict[Cell, list[float]] = {}
        stopwatch(cells, times)
        watched.append([[np.median(times[i, size]) for size in args.batch_sizes] for i in engine.ids])
    measured, stable = (
        np.array([table.latency_ms for table in tables]),
        np.array([table.statistics["stable"] == 1 for table in tables]),
    )
    ratios = measured / np.array(watched)
    ms: np.ndarray = np.median(measured, axis=0)
    by_stopwatch: np.ndarray = np.median(np.array(watched), axis=0)
    fronts = []
    for column, size in enumerate(args.batch_sizes):
        front = replace(tables[0], latency_ms=ms).front(size)
        brute = [i for i in engine.ids if not dominated(by_stopwatch[:, column], accuracy, i)]
        ties = [
            min(dominated(by_stopwatch[:, column], accuracy, i), default=1.0) for i in set(front) - set(brute)
        ]
        ties += [min(dominated(ms[:, column], accuracy, i), default=1.0) for i in set(brute) - set(front)]
        fronts.append({"table": front, "stopwatch": brute, "apart_percent": [100 * (1 - t) for t in ties]})
    result = {
        "conditions": tables[0].conditions,
        "cells": int(ms.size),
        "median_ratio": float(np.median(ms / by_stopwatch)),
        "rank_correlation": float(spearmanr(ms.ravel(), by_stopwatch.ravel())[0]),
        "stable": {  # cells of single rounds that their table calls stable, with the stopwatch right after it
            "cells": int(stable.sum()),
            "of": int(stable.size),
            "median_ratio": float(np.median(ratios[stable])),
            "within_5_percent": float(np.mean(np.abs(ratios[stable] - 1) < 0.05)),
        },
        "unstable_within_5_percent": float(np.mean(np.abs(ratios[~stable] - 1) < 0.05)),
        "suspect_cells": [int((t.statistics["busy"] > 0.05).sum()) for t in tables],
        "fronts": fronts,
        "load_average": [before, os.getloadavg()[0]],
    }
    if args.busy:
        loop = [sys.executable, "-c", "while True: pass"]
        others = [subprocess.Popen(loop) for _ in range(args.busy)]
        try:
            table = subnetact.profile_latency(engine, args.batch_sizes, accuracy, **how)
        finally:
            for other in others:
                other.kill()
        apart, suspect = table.latency_ms / ms - 1, table.statistics["stable"] == 0
        result["busy"] = {
            "processes": args.busy,
            "median_ratio": float(np.median(1 + apart)),
            "suspect_cells": int(suspect.sum()),
            "neither_suspect_nor_within_10_percent": int((~suspect & (np.abs(apart) > 0.1)).sum()),
        }
    return result


def compared_in(mode: str, this: Run) -> dict[str, Any]:
    args = this.args
    digits = args.family == "digits"
    supernet = load_digits_supernet() if digits else load(args.family)
    example = torch.randn(1, 1, 16, 16) if digits else torch.randn(1, 3, args.pixels, args.pixels)
    specs = supernet.space.sample(3, 10)
    subnetact.calibrate(supernet, specs, [torch.randn(8, *example.shape[1:])], progress=False)
    room = 2048.0 if mode == "fused" else 0.0
    engine = subnetact.Engine(supernet, specs, example=example, check=False, memory_budget_mb=room)
    this.known["family"] = args.family
    return compared(mode, engine, args)


def main() -> None:
    parts = {mode: partial(compared_in, mode) for mode in MODES}
    parser = options_of(__doc__, "table_truth", parts)
    parser.add_argument("--family", default="ofa_resnet50", help="a family, or digits")
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--busy", type=int, default=2)
    run(parser, "table_truth", parts, machine_of_each=False)


if __name__ == "__main__":
    main()
