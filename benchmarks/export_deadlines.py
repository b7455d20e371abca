"""Compares the deadlines that a C++ program meets with those that the simulator says, at five loads.

    python benchmarks/export_deadlines.py [--models ...] [--repeats 5] [--seconds 6] [--out FILE.json]
    python benchmarks/export_deadlines.py --report

`to_torchscript` writes a file, `profile_latency` measures it, and examples/cpp/deadlines.cpp serves random
arrivals with it: one worker, and `choose` for every batch. The SLO is three times the longest latency. Load
1 is the most requests per second that the table allows, for any subnet at any batch size. There, and
somewhat below, SlackFit runs single requests after any delay, because the slack is short then, and no
longer keeps up.

`simulate` gets the same arrivals and the file's table, and both assume latencies that are longer by
`--margin`. It runs twice: as if every batch took what the table says, and with the median of what the full
batches of this run took, and their spread. A machine may run slower during a repeat than when it was
measured. A repeat whose batches took longer than the margin allows, in the median, says nothing about the
table: it is in the file, and the section says how many there were, but the medians leave it out. All loads
run once in every repeat, with arrivals of its own.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import tempfile
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export import build_driver
from harness import write_section
from torch import Tensor
from tqdm import tqdm

import subnetact
from ofa_adapters import load
from subnetact.device import machine
from subnetact.digits import load_digits_supernet, read_digits
from subnetact.export import to_torchscript
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.slackfit import SlackFit
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

RESULTS = Path(__file__).parent / "results"
LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 1.0)


def model_of(name: str) -> tuple[Supernet, list[SubnetSpec], list[float], Tensor, list[int]]:
    """Return supernet, subnets, accuracies, samples and batch sizes; those of OFA-ResNet50 are random."""
    torch.manual_seed(0)
    if name == "digits":
        supernet, (training, held_out) = load_digits_supernet(), read_digits()
        calibration, x, sizes = training.images[:600], held_out.images[:32], [1, 4, 16]
    else:
        supernet, calibration = load(name), torch.randn(4, 3, 96, 96)
        x, sizes = torch.randn(8, 3, 96, 96), [1, 2, 4]
    specs = [supernet.space.smallest(), supernet.space.sample(3), supernet.space.largest()]
    subnetact.calibrate(supernet, specs, [calibration], progress=False)
    return supernet, specs, [60.0, 70.0, 80.0], x, sizes


def latencies_of(rows: list[dict[str, str]], table: LatencyTable) -> tuple[LatencyTable, float, float]:
    """Return the medians of full batches that ran, their spread, and how many times the table's they took."""
    batches = {
        (int(row["subnet"]), int(row["batch_size"]), float(row["batch_ms"])) for row in rows if row["ms"]
    }
    latency_ms, ratios, slower = table.latency_ms.copy(), [], []
    for subnet, (column, size) in product(range(len(latency_ms)), enumerate(table.batch_sizes)):
        if taken := [ms for *cell, ms in batches if cell == [subnet, size]]:
            latency_ms[subnet, column] = statistics.median(taken)
            ratios += [ms / statistics.median(taken) for ms in taken]
            slower += [ms / table.latency_ms[subnet, column] for ms in taken]
    ran = LatencyTable(table.subnets, table.accuracy, table.batch_sizes, latency_ms)
    return ran, statistics.pstdev(ratios), statistics.median(slower)


def trial(
    folder: Path, arrivals: Any, policy: SlackFit, slo_ms: float, cases: dict[str, Any], driver: Path
) -> dict[str, Any]:
    count = len(arrivals)
    timed = {
        "arrivals_ms": torch.from_numpy(arrivals),
        "slo_ms": torch.full((count,), slo_ms, dtype=torch.float64),
        "min_accuracy": torch.zeros(count, dtype=torch.float64),
    }
    torch.save({**cases, **timed}, folder / "cases.pt")
    files = (str(folder / name) for name in ("model.pt", "cases.pt", "outcomes.csv"))
    command = [str(driver), *files, str(policy.margin)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    with (folder / "outcomes.csv").open() as file:
        rows = list(csv.DictReader(file))
    counts = Counter(row["outcome"] for row in rows)
    choose_us = float(done.stdout.split("choose_us ")[1])
    ran, spread, slower = latencies_of(rows, policy.table)
    simulated = partial(subnetact.simulate, arrivals, policy=policy, slo_ms=slo_ms, progress=False)
    return {
        "met": counts["met"] / count,
        "simulated_met": simulated(table=policy.table).met / count,
        "simulated_as_ran": simulated(table=ran, noise=spread, overhead_ms=choose_us / 1e3).met / count,
        "slower": slower,
        "spread": spread,
        "late": counts["late"] / count,
        "refused": counts["refused"] / count,
        "choose_us": choose_us,
    }


def measured(
    name: str, repeats: int, seconds: float, margin: float, driver: Path, folder: Path
) -> dict[str, Any]:
    supernet, specs, accuracy, x, sizes = model_of(name)
    engine = subnetact.Engine(supernet, specs, example=x[:1], accuracy=accuracy, memory_budget_mb=0)
    table = subnetact.profile_latency(to_torchscript(engine, folder / "model.pt"), sizes)
    slo_ms = 3 * float(np.nanmax(table.latency_ms))
    to_torchscript(engine, folder / "model.pt", table=table, slo_ms=slo_ms)
    most_per_second = 1e3 * float(np.nanmax(np.array(sizes) / table.latency_ms))
    with torch.no_grad():
        cases = {"inputs": [x], "outputs": [supernet.subnet(spec)(x) for spec in specs]}
    trials = []
    bar = tqdm([(r, load) for r in range(repeats) for load in LOADS], desc=name, disable=None)
    for repeat, share in bar:
        rate = share * most_per_second
        gaps = np.random.default_rng(repeat).exponential(1e3 / rate, max(20, int(rate * seconds)))
        arrivals = np.cumsum(gaps)
        policy = subnetact.SlackFit(table, slo_ms, margin=margin)
        served = trial(folder, arrivals, policy, slo_ms, cases, driver)
        trials.append({"load": share, "repeat": repeat, "requests": len(arrivals), **served})
    rows = []
    for share in LOADS:
        of_load = [one for one in trials if one["load"] == share]
        kept = [one for one in of_load if one["slower"] <= 1 + margin]
        medians = {key: statistics.median(one[key] for one in kept or of_load) for key in of_load[0]}
        rate = share * most_per_second
        rows.append({**medians, "requests_per_second": rate, "repeats": len(kept)})
    return {
        "model": name,
        "slo_ms": slo_ms,
        "batch_sizes": sizes,
        "latency_ms": table.latency_ms.tolist(),
        "rows": rows,
        "trials": trials,
    }


def report() -> str:
    document = json.loads((RESULTS / "export_deadlines.json").read_text())
    about = document["machine"]
    lines = [
        f"{about['device_name']}, {about['threads']} thread(s), torch {about['torch']}; "
        f"{document['beside']}. Medians of those of {document['repeats']} repeats in which the machine was "
        f"as fast as when it was measured, within the margin of {document['margin']:g}.",
        "",
        "| model | SLO ms | load | requests/s | repeats | met in C++ | simulated "
        "| simulated with the latencies of the run | late | refused | choose us |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model in document["models"]:
        for row in model["rows"]:
            what = f"{model['model']} | {model['slo_ms']:.1f} | {row['load']:g}"
            lines.append(
                f"| {what} | {row['requests_per_second']:.0f} | {row['repeats']} "
                f"| {row['met']:.1%} | {row['simulated_met']:.1%} | {row['simulated_as_ran']:.1%} "
                f"| {row['late']:.1%} | {row['refused']:.1%} "
                f"| {row['choose_us']:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["digits", "ofa_resnet50"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of arrivals per load and repeat")
    parser.add_argument("--margin", type=float, default=0.1, help="of SlackFit, in C++ and in the simulator")
    parser.add_argument("--driver", type=Path, help="the program, if it is built already")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        write_section("export_deadlines", report().splitlines())
        return
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "machine": machine(torch.device("cpu")),
        "repeats": args.repeats,
        "margin": args.margin,
        "models": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        driver = args.driver or build_driver(folder / "build").with_name("deadlines")
        before = os.getloadavg()[0]
        for model in args.models:
            result["models"].append(measured(model, args.repeats, args.seconds, args.margin, driver, folder))
        after = os.getloadavg()[0]
        result["beside"] = f"load average {before:.1f} before and {after:.1f} after on {os.cpu_count()} cores"
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps({"machine": result["machine"], "models": [m["rows"] for m in result["models"]]}, indent=1)
    )


if __name__ == "__main__":
    main()
