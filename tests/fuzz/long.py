"""Fuzzes every target for a long time: `python tests/fuzz/long.py --minutes 60`, or `--inputs 10000`.

Findings are printed with the seed that makes them again; put the seeds into `corpus.json`, from where
`test_fuzz.py` replays them. An input that takes more than `--patience-s` of CPU time, or waits 15 times as
long, counts as a finding, and so does one that takes more memory than `--memory-gb`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from fuzz.targets import TARGETS, Finding, close, run, seeds

ALARMS = 15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--inputs", type=int, help="of every target, instead of minutes")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of every target")
    parser.add_argument("--patience-s", type=int, default=20)
    parser.add_argument("--memory-gb", type=float, default=8.0)
    parser.add_argument("--only", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--results", type=Path, help="write the number of inputs and the findings as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    limit = int(args.memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    seeds()

    def late(*_: Any) -> None:
        raise TimeoutError(f"it took more than {args.patience_s} s")

    signal.signal(signal.SIGALRM, late)
    signal.signal(signal.SIGPROF, late)
    end, found, tried = time.monotonic() + 60 * args.minutes, dict[str, int](), Counter[str]()
    accepted = Counter[str]()
    number = args.seed
    while number - args.seed < args.inputs if args.inputs else time.monotonic() < end:
        for name in args.only:
            signal.setitimer(signal.ITIMER_PROF, args.patience_s)
            signal.alarm(ALARMS * args.patience_s)  # for what waits, on a machine that is busy otherwise
            try:
                accepted[name] += run(name, random.Random(number))
            except Finding as finding:
                cause = finding.__cause__
                last = traceback.extract_tb(cause.__traceback__)[-1] if cause else None
                where = f"{name}: {type(cause).__name__} at {last.name if last else '?'}"
                if where not in found:
                    found[where] = number
                    print(f"seed {number}: {finding} ({last})", flush=True)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.alarm(0)
            tried[name] += 1
        number += 1
    close()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{sum(tried.values())} inputs, {len(found)} kinds of findings, {peak_mb} MB of memory at most")
    if args.results is not None:
        facts = {"inputs": dict(tried), "accepted": dict(accepted), "peak_mb": peak_mb, "findings": found}
        args.results.write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
