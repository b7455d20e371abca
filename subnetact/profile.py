"""Latency tables measured on the user's device; `python -m subnetact.profile` from the shell."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from tqdm import tqdm

from subnetact._version import __version__
from subnetact.engine import Engine
from subnetact.errors import SubnetActError, TableError, UncalibratedSubnetWarning
from subnetact.latency import LatencyTable
from subnetact.staging import Stager, shapes
from subnetact.supernet import Supernet
from subnetact.timing import machine, measure

__all__ = ["main", "profile_latency"]

STATISTICS: dict[str, Callable[[Any], Any]] = {
    "mean": np.mean,
    "std": np.std,
    "min": np.min,
    **{f"p{q}": partial(np.percentile, q=q) for q in (50, 90, 95, 99)},
}


Runs: TypeAlias = dict[str, np.ndarray]


def profile_latency(
    engine: Engine,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16),
    accuracy: Sequence[float] | None = None,
    statistic: str = "p50",
    warmup_ms: float = 20.0,
    min_time_ms: float = 100.0,
    rounds: int = 3,
    progress: bool = True,
) -> LatencyTable:
    """Measure every registered subnet at every batch size on the engine's device.

    Rounds over all cells are interleaved, so that a machine that speeds up or slows down does so for
    every cell. Times are synchronised host times of `engine(x, subnet)` with x already on the device; on
    cuda the statistics of the time between CUDA events stand beside them as `device_p50` and so on.

    Args:
        engine: the subnets.
        batch_sizes: ascending.
        accuracy: percent, one a subnet; unknown where left out.
        statistic: which one becomes `latency_ms`: mean, p50, p90, p95 or p99. All are kept.
        warmup_ms: untimed running before each cell of each round.
        min_time_ms: timed running of each cell, over all rounds.
        rounds: how often to come back to each cell.
        progress: whether to show a progress bar.

    Raises:
        TableError: an argument that no table can be made of.
    """
    if statistic not in STATISTICS or statistic in ("std", "min"):
        raise TableError(f"statistic: {statistic!r} is unknown; choose from mean, p50, p90, p95, p99")
    if rounds < 1 or not 0 <= warmup_ms < math.inf or not 0 <= min_time_ms < math.inf:
        raise TableError(
            f"rounds must be >= 1 and times finite and >= 0, got {rounds}, {warmup_ms} and {min_time_ms}"
        )
    known = [math.nan] * len(engine) if accuracy is None else list(accuracy)
    LatencyTable.from_arrays(engine.keys, known, batch_sizes, np.ones((len(engine), len(batch_sizes))))
    cells = [(i, b) for i in range(len(engine)) for b in batch_sizes]
    runs: dict[tuple[int, int], list[Runs]] = {cell: [] for cell in cells}
    stager = Stager(engine.device)
    inputs = {b: stager.stack([engine.example], b) for b in batch_sizes}
    for _, (i, b) in tqdm(
        [(r, cell) for r in range(rounds) for cell in cells if cell[0] in engine.ids],
        desc="profiling",
        disable=not progress,
    ):
        try:
            taken = measure(
                partial(engine, inputs[b], subnet=i),
                engine.device,
                warmup_ms=warmup_ms,
                min_time_ms=min_time_ms / rounds,
                min_runs=3,
            )
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        runs[i, b].append(taken)
    shape = len(engine), len(batch_sizes)
    clocks = {"host_ms": "", "device_ms": "device_"} if engine.device.type == "cuda" else {"host_ms": ""}
    statistics = {
        prefix + name: np.array([_of(function, runs[cell], clock) for cell in cells]).reshape(shape)
        for clock, prefix in clocks.items()
        for name, function in STATISTICS.items()
    }
    stamp = {
        **machine(engine.device),
        "supernet": engine.fingerprint,
        "space": engine.supernet.space.id,
        "dtype": str(next(engine.supernet.parameters()).dtype).removeprefix("torch."),
        "input_shape": shapes(engine.example),
        "statistic": statistic,
        "warmup_ms": warmup_ms,
        "min_time_ms": min_time_ms,
        "rounds": rounds,
        "runs_per_cell": [
            [sum(len(taken["host_ms"]) for taken in runs[i, b]) for b in batch_sizes]
            for i in range(len(engine))
        ],
        "subnetact": __version__,
        "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return LatencyTable.from_arrays(
        engine.keys, known, batch_sizes, statistics[statistic], statistics=statistics, stamp=stamp
    )


def _of(function: Callable[[Any], Any], runs: list[Runs], clock: str) -> float:
    return float(function(np.concatenate([taken[clock] for taken in runs]))) if runs else float("nan")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 when the table is written, 2 for arguments that cannot work."""
    parser = argparse.ArgumentParser(
        "python -m subnetact.profile",
        description="Measure a latency table, subnet x batch size, and write it as JSON.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--family", help="a family of ofa_adapters; the embedded digits supernet if left out")
    parser.add_argument("--checkpoint", help="its weights; random ones, as fast, if left out")
    parser.add_argument("--constructor", type=json.loads, default={}, help="its constructor arguments, JSON")
    parser.add_argument("--subnets", type=int, default=8, help="how many: smallest, largest, random ones")
    parser.add_argument("--accuracy", type=float, nargs="+", help="percent of each subnet, if known")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--input-shape", type=int, nargs="+", help="of one input, 3 224 224 for example")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads of one forward pass")
    parser.add_argument("--statistic", default="p50", help="mean, p50, p90, p95 or p99")
    parser.add_argument("--warmup-ms", type=float, default=20.0)
    parser.add_argument("--min-time-ms", type=float, default=200.0, help="per cell")
    parser.add_argument("--seed", type=int, default=0, help="of the random subnets")
    parser.add_argument("--out", type=Path, default=Path("latency.json"), help="file to write")
    args = parser.parse_args(arguments)
    try:
        _check(args)
        table = _profile(args)
    except (SubnetActError, ValueError, TypeError, RuntimeError, IndexError) as error:
        print(f"subnetact.profile: {error}", file=sys.stderr)
        return 2
    table.save(args.out)
    print(f"{args.out}: {table}")
    for key, row in zip(table.subnets, table.latency_ms, strict=True):
        print("  " + "  ".join(f"{ms:8.2f}" for ms in row) + f"  ms  {key}")
    return 0


def _check(args: argparse.Namespace) -> None:
    if not args.out.parent.is_dir() or args.out.is_dir():
        raise ValueError(f"--out: {args.out} is not a file in a folder that exists")
    if args.checkpoint and not args.family:
        raise ValueError("--checkpoint: say with --family what it is a checkpoint of")
    if args.subnets < 1 or (args.threads is not None and args.threads < 1):
        raise ValueError("--subnets and --threads must be at least 1")
    if args.input_shape and min(args.input_shape) < 1:
        raise ValueError(f"--input-shape: {args.input_shape} must be positive")
    if args.threads:
        torch.set_num_threads(args.threads)


def _profile(args: argparse.Namespace) -> LatencyTable:
    supernet: Supernet
    if args.family is None:
        supernet = import_module("subnetact.digits").load_digits_supernet()
        shape = args.input_shape or [1, 16, 16]
    else:
        supernet = import_module("ofa_adapters").load(args.family, args.checkpoint, **args.constructor)
        shape = args.input_shape or [3, 224, 224]
    space = supernet.space
    rng = np.random.default_rng(args.seed)
    specs = dict.fromkeys([space.smallest(), space.largest()])
    while len(specs) < min(args.subnets, space.size()):
        specs[space.sample(rng)] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncalibratedSubnetWarning)
        engine = Engine(
            supernet,
            list(specs)[: args.subnets],
            example=torch.zeros(shape),
            device=args.device,
            allow_uncalibrated=True,
        )
        return profile_latency(
            engine,
            args.batch_sizes,
            args.accuracy,
            statistic=args.statistic,
            warmup_ms=args.warmup_ms,
            min_time_ms=args.min_time_ms,
        )


if __name__ == "__main__":
    sys.exit(main())
