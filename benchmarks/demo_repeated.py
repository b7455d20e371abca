"""The demo several times in a row: does it answer in time on a machine whose speed changes?

    python benchmarks/demo_repeated.py [--seeds 0 1 2 3 4] [--load 0]

Every run is `python examples/demo.py` in its own process. With `--load N`, N processes compute for random
spans of up to two seconds and pause for random spans, from the start of every run to its end, so that the
machine has another speed while the demo serves than while it profiled. Runs of seeds that the file has are
kept. `--report` writes their page in results/.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from multiprocessing import Event, Process
from multiprocessing.synchronize import Event as EventType
from pathlib import Path
from typing import Any

from harness import RESULTS, read, save, table, write_section
from tqdm import tqdm


def compute(stop: EventType, seed: int) -> None:
    """Compute and pause for random spans until told to stop."""
    rng = random.Random(seed)
    while not stop.is_set():
        end = time.monotonic() + rng.uniform(0.2, 2.0)
        while time.monotonic() < end:
            sum(range(10_000))
        stop.wait(rng.uniform(0.2, 2.0))


def run(seed: int, load: int, figure: Path | None) -> dict[str, Any]:
    """Run the demo once beside `load` computing processes, and return its figures."""
    stop = Event()
    others = [Process(target=compute, args=(stop, 100 * seed + i), daemon=True) for i in range(load)]
    for process in others:
        process.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "demo.json"
            command = [sys.executable, "examples/demo.py", "--seed", str(seed), "--json", str(out)]
            command += ["--out", str(figure or Path(folder) / "demo.png")]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found: dict[str, Any] = json.loads(out.read_text())
    finally:
        stop.set()
        for process in others:
            process.join()
    return found


def report(result: dict[str, Any]) -> list[str]:
    """Return the lines of the page of a demo."""
    lines = []
    head = ["contender", "right and in time, % of each run", "in time, % of each run", "speed, of each run"]
    columns = {"right_and_in_time": ".2f", "in_time": ".1f", "slowdown": ".2f"}
    for name, runs in result.items():
        facts = runs[0]["machine"]
        lines += ["", f"{facts['device_name']}, {facts['cpus']} CPUs, torch {facts['torch']}; {name}:", ""]
        rows = []
        for i, contender in enumerate(runs[0]["contenders"]):
            found = [run["contenders"][i] for run in runs]
            cells = (", ".join(format(one[key], form) for one in found) for key, form in columns.items())
            rows.append([contender["name"], *cells])
        noted = sum(bool(run["notes"]) for run in runs)
        lines += [*table(head, rows), ""]
        lines += [f"The demo itself noted a doubtful machine in {noted} of {len(runs)} runs."]
    return lines[1:]


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="one run per seed")
    parser.add_argument("--load", type=int, default=0, help="processes that compute now and then")
    parser.add_argument("--figure", type=Path, help="file for the figure of seed 0")
    parser.add_argument("--report", action="store_true", help="write the page in results/ and stop")
    args = parser.parse_args()
    out = RESULTS / "demo.json"
    result = read(out)
    if args.report:
        write_section("demo", report(result))
        return
    name = f"beside processes that compute now and then: {args.load}" if args.load else "nothing else runs"
    runs = result.setdefault(name, [])
    known = {one.get("seed", i) for i, one in enumerate(runs)}  # in older files the seeds are 0, 1, ...
    for seed in tqdm([seed for seed in args.seeds if seed not in known], desc=name):
        runs.append(run(seed, args.load, None if seed else args.figure))
        save(out, result)
        print(runs[-1]["contenders"], runs[-1]["notes"])


if __name__ == "__main__":
    main()
