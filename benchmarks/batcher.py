"""Compares the batcher with the usual ways to batch: its cost, and the answers that are right and in time.

    python benchmarks/batcher.py                   # everything, 15 minutes on two idle cores (Linux)
    python benchmarks/batcher.py --only null       # one section; the others keep their earlier figures
    python benchmarks/batcher.py --report          # plot --out, write results/batcher.md and stop

null: requests per second and added latency with a model that does nothing; SlackFit decides.
digits: the embedded supernet in this process. SlackFit, HullFit, every fixed subnet and a first-in, first-out
queue serve the same bursty arrivals; for each policy, the simulator's prediction is compared with the run.
replay: the simulator compared with the batcher, on an engine that takes exactly the time its table says.
http: `python -m subnetact.serve` compared with LitServe (`pip install litserve`), with the same client.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from batcher_digits import digits_section
from batcher_http import http_section
from batcher_null import null_section
from batcher_replay import replay_section
from batcher_report import report

from subnetact import __version__
from subnetact.device import machine

#: the interpreter's switch interval; a model of many short operations needs the GIL back after each of them
SWITCH_MS = {"null": 5.0, "digits": 0.5, "replay": 5.0, "http": 0.5}


def _versions() -> dict[str, str]:
    found = {"subnetact": __version__}
    for name in ("starlette", "uvicorn", "uvloop", "litserve"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Measure the sections, or write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SWITCH_MS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="of every measurement of the section null")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.5,
        help="length of a trace over HTTP; each burst of the section digits is a third of this",
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[150, 300], help="requests per second over HTTP"
    )
    parser.add_argument(
        "--fixed",
        type=int,
        nargs="+",
        default=range(6),
        help="the subnets that servers of one fixed subnet run over HTTP",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "batcher.json")
    parser.add_argument("--report", action="store_true", help="plot, write the page in results/ and stop")
    args = parser.parse_args()
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.report:
        return report(result, args.out)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a full collection of all imported modules would stop everything for 0.1 s
    seeds = range(args.seeds)
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "null": lambda: null_section(args.repeats),
        "digits": lambda: digits_section(seeds, args.seconds / 3),
        "replay": lambda: replay_section(seeds),
        "http": lambda: http_section(seeds, args.seconds, args.rates, args.fixed),
    }
    facts = {"machine": machine(torch.device("cpu")), "versions": _versions()}
    for name in args.only or sections:
        sys.setswitchinterval(SWITCH_MS[name] / 1e3)
        result[name] = {**facts, "switch_interval_ms": SWITCH_MS[name], **sections[name]()}
        print(json.dumps(result[name], indent=1))
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
