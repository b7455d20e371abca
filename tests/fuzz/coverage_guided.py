"""Fuzzes targets guided by coverage: `python tests/fuzz/coverage_guided.py "latency table" --minutes 3`.

This needs `pip install atheris`. Atheris watches which lines of the library an input reaches, and changes the
inputs that reached new ones. Every random number that a target draws comes from the input's bytes. A kind of
finding is printed once, with its input; put the input into `corpus.json`, from where `test_fuzz.py` replays
it. An input that takes more than `--patience-s` of CPU time, or waits 15 times as long, counts as a finding,
and so does one that takes more memory than `--memory-gb`. `--results` adds the target to a file of results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["subnetact", "ofa_adapters"]):
    import torch
    from fuzz.long import ALARMS, limited, place_of
    from fuzz.targets import TARGETS, BytesRandom, Finding, run, seeds


def main() -> None:
    """Fuzz one target until the time is over, and end the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=list(TARGETS))
    parser.add_argument("--minutes", type=float, default=3.0, help="of CPU time")
    parser.add_argument("--patience-s", type=int, default=20)
    parser.add_argument("--memory-gb", type=float, default=8.0)
    parser.add_argument("--bytes", type=int, default=256, help="the longest input")
    parser.add_argument("--results", type=Path, help="add the numbers and the findings to this JSON file")
    args = parser.parse_args()
    limited(args.memory_gb)
    found, tried, begun, alarms = dict[str, str](), 0, 0.0, 0
    with atheris.instrument_imports(include=["subnetact", "ofa_adapters"]), suppress(Finding):
        seeds()
        run(args.target, BytesRandom(b""))  # It prepares and imports what all inputs need.
    start = time.process_time()

    def late(*_: Any) -> None:
        nonlocal alarms
        alarms += 1
        spent = time.process_time() - begun
        if spent > args.patience_s or alarms == ALARMS:
            raise TimeoutError(f"it took {spent:.0f} s of CPU time, {alarms * args.patience_s} s in all")
        signal.alarm(args.patience_s)  # The machine was busy with other work.

    def one(data: bytes) -> None:
        nonlocal tried, begun, alarms
        if time.process_time() - start > 60 * args.minutes:
            end()
        begun, alarms = time.process_time(), 0
        signal.signal(signal.SIGALRM, late)
        signal.alarm(args.patience_s)
        try:
            run(args.target, BytesRandom(data))
        except Finding as finding:
            where, last = place_of(finding)
            if where not in found:
                found[where] = data.hex()
                print(f"input {data.hex()!r}: {finding} ({last})", flush=True)
        finally:
            signal.alarm(0)
        tried += 1

    def end() -> None:
        print(f"{args.target}: {tried} inputs, {len(found)} kinds of findings", flush=True)
        if args.results is not None:
            versions = {"atheris": version("atheris"), "torch": torch.__version__}
            versions["python"] = platform.python_version()
            facts = json.loads(args.results.read_text()) if args.results.exists() else {}
            result = {"cpu_minutes": args.minutes, "inputs": tried, "findings": found}
            facts = {"versions": versions, "targets": {**facts.get("targets", {}), args.target: result}}
            args.results.write_text(json.dumps(facts, indent=1) + "\n")
        os._exit(1 if found else 0)  # libFuzzer would go on.

    options = ["-timeout=0", "-rss_limit_mb=0", "-len_control=0", "-seed=1"]
    atheris.Setup([sys.argv[0], *options, f"-max_len={args.bytes}", "-verbosity=0"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
