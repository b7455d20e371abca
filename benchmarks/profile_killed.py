"""Profiles a Pareto bundle from an OFA-ResNet50 checkpoint with one command, which is killed repeatedly.

    python benchmarks/profile_killed.py [--subnets 100] [--pixels 96] [--seed 0]
        [--out benchmarks/results/profile_killed.json]

The checkpoint has upstream's layout and random weights. One run of `python -m subnetact.profile` is sent
SIGKILL at random moments and is resumed each time. At the first kill after the measurements that the search's
latency predictors are fitted to, its folder is copied, and the copy is resumed without further kills. The
results of both are compared. The time of the copy plus the time before that kill is the command's time.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peers import upstream_network
from safetensors.torch import load_file

import subnetact
from subnetact.device import machine

BATCH_SIZES = (1, 2, 4)
FIT_WINDOWS = 3
FITTED = 32
"""Subnets measured to fit the latency predictors, each at the smallest and the largest batch size."""


def write_checkpoint(path: Path) -> None:
    torch.save({"state_dict": upstream_network("ofa_resnet50").state_dict()}, path)


class Command:
    """The command line with all its files in one folder."""

    def __init__(self, folder: Path, checkpoint: Path, subnets: int, pixels: int) -> None:
        self.folder = folder
        self.journal = folder / "table.json.work" / "journal.jsonl"
        self.arguments = [
            "--family", "ofa_resnet50", "--checkpoint", str(checkpoint), "--subnets", str(subnets),
            "--input-shape", "3", str(pixels), str(pixels), "--batch-sizes", *map(str, BATCH_SIZES),
            "--calibrate-on", "random:16", "--fit-subnets", str(FITTED), "--threads", "1",
            "--min-time-ms", "250", "--max-windows", "5",
            "--resume", "--out", str(folder / "table.json"), "--save-bundle", str(folder / "bundle"),
        ]  # fmt: skip

    def start(self) -> subprocess.Popen[bytes]:
        self.folder.mkdir(exist_ok=True)
        command = [sys.executable, "-W", "ignore", "-m", "subnetact.profile", *self.arguments]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def records(self) -> list[str]:
        """Return the names of the journal's complete records: fit, chosen, window ..."""
        if not self.journal.exists():
            return []
        text = self.journal.read_text()
        return [json.loads(line).get("record", "") for line in text[: text.rfind("\n") + 1].splitlines()]


def run(command: Command) -> float:
    start = time.perf_counter()
    if command.start().wait():
        raise SystemExit("the command failed")
    return time.perf_counter() - start


def run_killed(command: Command, twin: Path, rng: random.Random) -> dict[str, Any]:
    """Kill and resume the command until it ends; copy its folder at the first kill after the fitting."""
    seconds, moments, before_twin = 0.0, [], None
    fitted = FITTED * 2 * FIT_WINDOWS
    while True:
        start, process = time.perf_counter(), command.start()
        try:
            status = process.wait(timeout=rng.uniform(20, 200))
            seconds += time.perf_counter() - start
            if status:
                raise SystemExit(f"the command failed with {status}")
            break
        except subprocess.TimeoutExpired:
            kept = command.journal.read_bytes() if command.journal.exists() else b""
            process.kill()
            process.wait()
            seconds += time.perf_counter() - start
        whole = kept[: kept.rfind(b"\n") + 1]
        if whole and not command.journal.read_bytes().startswith(whole):
            raise SystemExit("a kill has lost records of the journal")
        records = command.records()
        moments.append({"after_s": round(seconds), "records": len(records), "last": (records or [""])[-1]})
        if before_twin is None and ("chosen" in records or records.count("fit") == fitted):
            before_twin = seconds
            shutil.copytree(command.folder, twin)
    return {"seconds": seconds, "kills": moments, "seconds_before_copy": before_twin}


def same(first: Path, second: Path) -> dict[str, bool]:
    """Return which results of two runs are equal. The measured times are not compared."""
    tables = [subnetact.LatencyTable.load(folder / "table.json") for folder in (first, second)]
    found = {
        "subnets": tables[0].subnets == tables[1].subnets,
        "batch_sizes": tables[0].batch_sizes == tables[1].batch_sizes,
        "stamp": all(
            tables[0].stamp[key] == tables[1].stamp[key] for key in set(tables[0].stamp) - {"measured"}
        ),
    }
    for name in ("weights", "norms"):
        one, other = (load_file(folder / "bundle" / f"{name}.safetensors") for folder in (first, second))
        found[name] = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--subnets", type=int, default=100)
    parser.add_argument("--pixels", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint, killed, twin = folder / "ofa.pth", folder / "killed", folder / "twin"
        write_checkpoint(checkpoint)
        command = Command(killed, checkpoint, args.subnets, args.pixels)
        found = run_killed(command, twin, random.Random(args.seed))
        if found["seconds_before_copy"] is None:
            raise SystemExit("the command ended before it was killed; give more --subnets")
        rest = run(Command(twin, checkpoint, args.subnets, args.pixels))
        table = subnetact.LatencyTable.load(twin / "table.json")
        result = {
            "machine": machine(torch.device("cpu")),
            "arguments": command.arguments[4:-4],
            "subnets": len(table.subnets),
            "cells": int(table.latency_ms.size),
            "killed_once_minutes": round((found["seconds_before_copy"] + rest) / 60, 2),
            "killed_often_minutes": round(found["seconds"] / 60, 2),
            "kills": found["kills"],
            "same": same(killed, twin),
        }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
