"""Measures how well `subnetact.profile` reproduces its medians: two profiles of the same subnets take turns.

    python benchmarks/profile_twice.py [--subnets 6] [--pixels 96] [--min-time-ms 15000] [--turn-s 10]
        [--out benchmarks/results/profile_twice.json]

There are two processes, and one is stopped (SIGSTOP) while the other runs. A virtual machine that is slow for
minutes is slow for both of them, so the machine does not cause their differences. The medians and the p90 are
compared. Means and higher quantiles are not: they contain the runs during which a process was stopped.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from subnetact import LatencyTable
from subnetact.device import machine

BATCH_SIZES = (1, 4)


def start(out: Path, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-W", "ignore", "-m", "subnetact.profile", "--family", "ofa_resnet50",
        "--subnets", f"random:{args.subnets}", "--input-shape", "3", str(args.pixels), str(args.pixels),
        "--batch-sizes", *map(str, BATCH_SIZES), "--threads", "1", "--windows", "60", "--max-windows", "60",
        "--min-time-ms", str(args.min_time_ms), "--out", str(out),
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def take_turns(processes: list[subprocess.Popen[bytes]], turn_s: float) -> None:
    """Let one process run at a time until all have ended."""
    try:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        while any(process.poll() is None for process in processes):
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGCONT)
                    time.sleep(turn_s)
                    if process.poll() is None:
                        process.send_signal(signal.SIGSTOP)
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit("a profile failed")


def differences(first: LatencyTable, second: LatencyTable, statistic: str) -> dict[str, Any]:
    comparison = first.compare(second, statistic)
    return {
        "ratios": comparison.ratios.round(4).tolist(),
        "largest_percent": round(100 * float(abs(comparison.ratios - 1).max()), 2),
        "within_5_percent": bool(comparison.within(5.0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--subnets", type=int, default=6)
    parser.add_argument("--pixels", type=int, default=96)
    parser.add_argument(
        "--min-time-ms", type=float, default=15_000, help="least timed running per cell, in ms"
    )
    parser.add_argument("--turn-s", type=float, default=10, help="duration of one turn, in seconds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{name}.json" for name in ("first", "second")]
        take_turns([start(out, args) for out in outs], args.turn_s)
        first, second = map(LatencyTable.load, outs)
    torch.set_num_threads(1)
    result = {
        "machine": machine(torch.device("cpu")),
        "minutes": round((time.perf_counter() - begun) / 60, 1),
        "cells": int(first.latency_ms.size),
        "medians_ms": first.statistics["p50"].round(3).tolist(),
        "stable_cells": [int(table.statistics["stable"].sum()) for table in (first, second)],
        **{statistic: differences(first, second, statistic) for statistic in ("p50", "p90")},
    }
    print(first.compare(second, "p50").report(5.0))
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
