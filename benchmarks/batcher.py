"""The batcher beside the usual ways to batch: what it costs, and what it answers right and in time.

    python benchmarks/batcher.py                   # everything, fifteen minutes on two idle cores (Linux)
    python benchmarks/batcher.py --only null       # one section; the others keep their earlier numbers
    python benchmarks/batcher.py --report          # draw --out, write README.md and stop

null: a model that does nothing, SlackFit deciding; requests a second and added latency.
digits: the embedded supernet in this process; SlackFit, HullFit, every fixed subnet, and first in, first
out, on the same bursty arrivals; and what the simulator predicted for each of our runs.
replay: the simulator beside the batcher, on an engine that takes what its table says.
http: `examples/fastapi_server.py` beside LitServe (`pip install litserve`), the same client for both.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from batcher_digits import digits_section
from batcher_http import http_section
from batcher_null import null_section
from batcher_replay import replay_section
from batcher_report import report

from subnetact import __version__
from subnetact.device import machine

#: of the interpreter; a model of many short operations asks for it back after each of them
SWITCH_MS = {"null": 5.0, "digits": 0.5, "replay": 5.0, "http": 0.5}


def _versions() -> dict[str, str]:
    found = {"subnetact": __version__}
    for name in ("fastapi", "uvicorn", "uvloop", "litserve"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Measure, or report what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SWITCH_MS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="of what the model that does nothing does")
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="length of a trace over HTTP; a burst takes a third"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[150, 300], help="over HTTP, per second")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "batcher.json")
    parser.add_argument("--report", action="store_true", help="draw --out, write README.md and stop")
    args = parser.parse_args()
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.report:
        return report(result, args.out)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a full collection of what is imported stops everything for a tenth of a second
    seeds = range(args.seeds)
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "null": lambda: null_section(args.repeats),
        "digits": lambda: digits_section(seeds, args.seconds / 3),
        "replay": lambda: replay_section(seeds),
        "http": lambda: http_section(seeds, args.seconds, args.rates),
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
