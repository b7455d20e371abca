"""HullFit without a hand-set reserve compared, live, with SlackFit under several hand-set reserves.

    python benchmarks/policy_live.py                      # five minutes on two idle cores (Linux)
    python benchmarks/policy_live.py --only sleeper --seeds 1 --reserves 0 1
    python benchmarks/policy_live.py --report             # write results/policy_live.md and stop

A section that is not measured keeps its earlier results.

pages: the digits supernet serves pages of 16 digits, as in `batcher.py --only digits`; right and in time, %.
sleeper: an engine that sleeps for the latencies of an A40; effective accuracy by the table, %.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import batcher_digits
import batcher_replay
import torch
from batcher_client import ask_batcher
from in_service import measured_in_service
from open_loop import trace
from results_section import write_section
from tqdm import tqdm

from subnetact import Batcher, HullFit, LatencyTable, SlackFit, __version__
from subnetact.device import machine
from subnetact.serving import Policy

HERE = Path(__file__).parent
LOADS = (1.0, 1.4, 2.0)


def contenders(table: LatencyTable, slo_ms: float, reserves: list[float]) -> dict[str, Policy]:
    """Make HullFit, and SlackFit for every reserve, which is given in percent of the SLO."""
    slackfits = {f"SlackFit, {r:g} %": SlackFit(table, slo_ms, margin_ms=0.01 * r * slo_ms) for r in reserves}
    return {"HullFit": HullFit(table, slo_ms), **slackfits}


def pages(seeds: int, part_s: float, reserves: list[float]) -> list[dict[str, Any]]:
    """Serve pages of digits; every contender serves the arrivals of every seed, in random order."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        contest = batcher_digits.Contest(part_s, Path(folder))

        def policies(table: LatencyTable) -> dict[str, Policy]:
            return contenders(table, batcher_digits.SLO_MS, reserves)

        contest.policies = policies  # type: ignore[method-assign]
        for seed in tqdm(range(seeds), desc="pages"):
            live = contest.learn(seed)
            bursts = random.Random(seed).sample(batcher_digits.BURSTS, len(batcher_digits.BURSTS))
            parts = contest.arrivals(live, bursts, seed)
            names = list(policies(contest.profile))
            random.Random(seed).shuffle(names)
            for name in names:
                gc.collect()
                found = contest.serve(name, live, parts)
                rows.append({"policy": name, "seed": seed, "effective_accuracy": found["effective_accuracy"]})
    return rows


def sleeper(seeds: int, seconds: float, reserves: list[float]) -> list[dict[str, Any]]:
    """Serve through an engine that takes the time its table says; the batcher learns latencies first."""
    told = LatencyTable.load(batcher_replay.TABLE)
    table = batcher_replay.measured(told)
    slo_ms = batcher_replay.SLO_MS
    inputs = list(torch.arange(64.0).unsqueeze(1))
    capacity = 1e3 * table.batch_sizes[-1] / float(table.latency_ms[-1, -1])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        learned = trace("bursty", 0.6 * capacity, 5.0, batcher_replay.CV2, 99).tolist()
        engine = batcher_replay.Sleeper(told)
        live = measured_in_service(engine, table, inputs, learned, Path(folder) / "corrections.json")
        for load, seed in tqdm([(load, seed) for load in LOADS for seed in range(seeds)], desc="sleeper"):
            arrivals = [float(t) for t in trace("bursty", load * capacity, seconds, batcher_replay.CV2, seed)]
            names = list(contenders(table, slo_ms, reserves))
            random.Random(seed).shuffle(names)
            for name in names:
                gc.collect()
                policy = contenders(table, slo_ms, reserves)[name]
                with Batcher(batcher_replay.Sleeper(told), policy=policy, slo_ms=slo_ms) as batcher:
                    batcher.corrections.load(live.corrections)
                    asyncio.run(ask_batcher(batcher, inputs, arrivals, slo_ms))
                    stats = batcher.stats()
                rows.append(
                    {
                        "policy": name,
                        "load": load,
                        "seed": seed,
                        "effective_accuracy": stats.accuracy_sum / len(arrivals),
                        "attainment": stats.met / len(arrivals),
                    }
                )
    return rows


def report(document: dict[str, Any]) -> None:
    """Write the means into results/policy_live.md, and the spread of the means of single seeds."""
    sections = [(name, document[name]) for name in ("pages", "sleeper") if name in document]
    reserves = {float(name.split()[1]): name for name in sections[0][1]["means"] if name != "HullFit"}
    names = ["HullFit", *(reserves[share] for share in sorted(reserves))]
    lines = ["| section | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for section, found in sections:
        runs = found["runs"]
        loads = sorted({run["load"] for run in runs if "load" in run})
        for load in [*loads, None]:
            cells = []
            for name in names:
                mine = [r for r in runs if r["policy"] == name and load in (None, r.get("load"))]
                seeds = [
                    mean(r["effective_accuracy"] for r in mine if r["seed"] == seed)
                    for seed in sorted({r["seed"] for r in mine})
                ]
                spread = f" ± {stdev(seeds):.2f}" if len(seeds) > 1 else ""
                cells.append(f"{mean(seeds):.2f}{spread}")
            lines.append(
                f"| {section}{'' if load is None else f', load {load:g}'} | " + " | ".join(cells) + " |"
            )
    machines = {
        f"{found['machine']['device_name']}, torch {found['machine']['torch']}" for _, found in sections
    }
    lines += ["", f"{'; '.join(sorted(machines))}."]
    write_section("policy_live", lines)


def main() -> None:
    """Measure, print the mean of every contender and write all runs, or write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=("pages", "sleeper"), default=["pages", "sleeper"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a trace of the section sleeper")
    parser.add_argument(
        "--reserves", type=float, nargs="+", default=[0, 2.5, 5, 10, 20], help="percent of the SLO"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "policy_live.json")
    parser.add_argument("--report", action="store_true", help="write the page in results/ and stop")
    args = parser.parse_args()
    document: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.report:
        return report(document)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    sections: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "pages": lambda: pages(args.seeds, 0.5, args.reserves),
        "sleeper": lambda: sleeper(args.seeds, args.seconds, args.reserves),
    }
    for name in args.only:
        sys.setswitchinterval(5e-4 if name == "pages" else 5e-3)
        rows = sections[name]()
        means = {
            policy: mean(row["effective_accuracy"] for row in rows if row["policy"] == policy)
            for policy in dict.fromkeys(row["policy"] for row in rows)
        }
        document[name] = {
            "subnetact": __version__,
            "machine": machine(torch.device("cpu")),
            "means": means,
            "runs": rows,
        }
        print(name, json.dumps(means, indent=1), flush=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
