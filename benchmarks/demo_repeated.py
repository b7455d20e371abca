"""The demo several times in a row: does it answer in time on a machine whose speed changes?

    python benchmarks/demo_repeated.py [--runs 5] [--load 0] [--out benchmarks/results/demo.json]

Every run is `python -m subnetact.demo` in a process of its own. With `--load N`, N processes compute for
random spans of up to two seconds and pause for random spans, from the start of every run to its end, so that
the machine has another speed while the demo serves than while it profiled. `--report` writes the section of
README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from multiprocessing import Event, Process
from multiprocessing.synchronize import Event as EventType
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from subnetact.files.atomic import replacing

BEGIN, END = "<!-- demo: begin -->", "<!-- demo: end -->"


def compute(stop: EventType, seed: int) -> None:
    """Compute and pause for random spans until told to stop."""
    rng = random.Random(seed)
    while not stop.is_set():
        end = time.monotonic() + rng.uniform(0.2, 2.0)
        while time.monotonic() < end:
            sum(range(10_000))
        stop.wait(rng.uniform(0.2, 2.0))


def run(seed: int, load: int) -> dict[str, Any]:
    """Run the demo once beside `load` computing processes, and return its figures."""
    stop = Event()
    others = [Process(target=compute, args=(stop, 100 * seed + i), daemon=True) for i in range(load)]
    for process in others:
        process.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "demo.json"
            command = [sys.executable, "-m", "subnetact.demo", "--seed", str(seed), "--json", str(out)]
            command += ["--out", str(Path(folder) / "demo.png")]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found: dict[str, Any] = json.loads(out.read_text())
    finally:
        stop.set()
        for process in others:
            process.join()
    return found


def report(result: dict[str, Any]) -> None:
    """Put the figures into benchmarks/README.md."""
    lines = []
    for name, runs in result.items():
        facts = runs[0]["machine"]
        lines += ["", f"{facts['device_name']}, {facts['cpus']} CPUs, torch {facts['torch']}; {name}:", ""]
        lines += ["| contender | in time, % of each run | right and in time, median % | speed, of each run |"]
        lines += ["|---|---|---|---|"]
        for i, contender in enumerate(runs[0]["contenders"]):
            found = [run["contenders"][i] for run in runs]
            in_time = ", ".join(f"{one['in_time']:.1f}" for one in found)
            right = median(one["right_and_in_time"] for one in found)
            slowdown = ", ".join(f"{one['slowdown']:.2f}" for one in found)
            lines.append(f"| {contender['name']} | {in_time} | {right:.1f} | {slowdown} |")
        noted = sum(bool(run["notes"]) for run in runs)
        lines += ["", f"The demo itself noted a doubtful machine in {noted} of {len(runs)} runs."]
    page = Path("benchmarks/README.md")
    text = page.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    page.write_text(text[:start] + "\n".join(lines) + "\n" + text[end:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--load", type=int, default=0, help="processes that compute now and then")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/demo.json"))
    parser.add_argument("--report", action="store_true", help="write the section of README.md and stop")
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.report:
        report(result)
        return
    name = f"beside processes that compute now and then: {args.load}" if args.load else "nothing else runs"
    result[name] = [run(seed, args.load) for seed in tqdm(range(args.runs), desc=name)]
    with replacing(args.out) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    for one in result[name]:
        print([round(contender["in_time"], 2) for contender in one["contenders"]], one["notes"])


if __name__ == "__main__":
    main()
