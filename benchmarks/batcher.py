"""Compares the batcher with the usual ways to batch: the answers that are right and in time.

    python benchmarks/batcher.py                   # everything, 15 minutes on two idle cores (Linux)
    python benchmarks/batcher.py --only digits     # one section; the others keep their earlier figures
    python benchmarks/batcher.py --report          # plots, and writes results/batcher.md

digits: the embedded supernet in this process. SlackFit, HullFit, every fixed subnet and a first-in, first-out
queue serve the same bursty arrivals.
http: `python -m subnetact.serve` compared with LitServe (`pip install litserve`), with the same client.

What the batcher itself costs, and how well the simulator predicts it, is `batcher_overhead` in
results/trials.json.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

from batcher_digits import digits_section
from batcher_http import http_section
from batcher_report import report
from harness import Run, header, options_of, run

SWITCH_MS = 0.5
"""The interpreter's switch interval; a model of many short operations needs the GIL back after each."""
PACKAGES = ("subnetact", "starlette", "uvicorn", "uvloop", "litserve")


def _facts() -> dict[str, Any]:
    sys.setswitchinterval(SWITCH_MS / 1e3)
    gc.collect()
    gc.freeze()  # a full collection of all imported modules would stop everything for 0.1 s
    found = header(PACKAGES)
    return {
        "versions": {name: found[name] for name in PACKAGES if name in found},
        "switch_interval_ms": SWITCH_MS,
    }


def digits(this: Run) -> dict[str, Any]:
    return {**_facts(), **digits_section(range(this.args.seeds), this.args.seconds / 3)}


def http(this: Run) -> dict[str, Any]:
    args = this.args
    return {**_facts(), **http_section(range(args.seeds), args.seconds, args.rates, args.fixed)}


def main() -> None:
    """Measure the sections, or write the report."""
    parts = {"digits": digits, "http": http}
    parser = options_of(__doc__, "batcher", parts)
    add = parser.add_argument
    add("--seeds", type=int, default=3)
    add(
        "--seconds",
        type=float,
        default=1.5,
        help="of a trace over HTTP; bursts of digits last a third",
    )
    add("--rates", type=float, nargs="+", default=[150, 300], help="requests per second over HTTP")
    add("--fixed", type=int, nargs="+", default=range(6), help="what servers of one subnet run over HTTP")
    run(parser, "batcher", parts, report)


if __name__ == "__main__":
    main()
