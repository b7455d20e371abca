"""Serve a burst of requests live on an embedded model, beside fixed subnets, and draw a figure.

The demo loads the supernet that was trained on handwritten digits, repairs the accuracy of its subnets by
calibration, profiles them on this machine, and serves a burst of real digit images under deadlines. The same
arrivals are served several times: with all subnets, and with single ones.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from subnetact.command import reported
from subnetact.demo.digits_demo import PROFILE_MS, demonstrate_digits


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a demonstration with the options of `sys.argv` if None are given; return the exit status."""
    parser = argparse.ArgumentParser("python -m subnetact.demo", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("subnetact_demo.png"), help="file of the figure")
    add("--json", type=Path, help="also write the figures of every contender to this file")
    add("--candidates", type=int, default=40, help="subnets to choose from")
    add("--seconds", type=float, default=9.0, help="length of the trace")
    add("--profile-ms", type=float, default=PROFILE_MS, help="time spent per cell of the latency table")
    add("--seed", type=int, default=0, help="seed of candidates, requests and arrivals")
    args = parser.parse_args(arguments)
    folders = all(path is None or path.parent.is_dir() for path in (args.out, args.json))
    times = all(0 < time < math.inf for time in (args.seconds, args.profile_ms))
    if not folders or not times or args.candidates < 2:
        parser.error(
            "--out and --json need folders that exist, --seconds and --profile-ms finite numbers above 0, "
            "--candidates at least 2"
        )
    return demonstrate(demonstrate_digits, args, "subnetact.demo")


def demonstrate(run: Callable[[argparse.Namespace], None], args: argparse.Namespace, name: str) -> int:
    """Run a demonstration on one thread, without the notes of the service; return the exit status."""
    log = logging.getLogger("subnetact.serving")
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        stack.callback(log.setLevel, log.level)
        torch.set_num_threads(1)
        sys.setswitchinterval(5e-4)  # the client shares the interpreter with the server
        log.setLevel(logging.ERROR)  # a machine that changed its speed gets a note at the end
        return reported(run, args, name)
