"""The command line `python -m subnetact.profile`: from a checkpoint to a latency table and a bundle."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from subnetact.command import INTERRUPTED, OptionFormatter, reported
from subnetact.device import find_device, machine
from subnetact.errors import DeviceError, InvalidRequest, SubnetActError
from subnetact.latency.origin import count_stable, unsure
from subnetact.latency.table import AS_SERVED, LatencyTable
from subnetact.operators.kernel_table import kernel_here, why_not
from subnetact.profile.modes import BESIDE, MODES
from subnetact.profile.options import add_options, arguments_of, call_with_options
from subnetact.profile.pipeline import ProfileJob, run_profile
from subnetact.profile.selection import SelectionRequest
from subnetact.profile.source import load_source
from subnetact.profile.sweep import SweepSettings
from subnetact.spec import FLOAT32, PRECISIONS

DONE, USAGE, UNSTABLE = 0, 2, 3
ROWS_SHOWN = 24
USERS_MISTAKES = (SubnetActError, ValueError, TypeError, RuntimeError, IndexError, OSError)
"""Errors whose message is enough. Others are shown with their place, and the exit status is 1."""
EPILOG = f"""exit status:
  {DONE}    done; with --compare: every cell is within the tolerance
  {USAGE}    an error; the message says which
  {UNSTABLE}    with --strict: a cell is unstable; with --compare: a cell is outside the tolerance
  {INTERRUPTED}  interrupted by SIGINT or SIGTERM; --resume continues

your own network:
  --model PKG.MOD:FACTORY imports the module PKG.MOD and calls its function FACTORY with the arguments of
  --constructor. The function builds the network, loads its weights and returns a Supernet:
      def FACTORY(**constructor):
          network = MyNetwork(**constructor)
          network.load_state_dict(torch.load("weights.pth", weights_only=True))
          return subnetact.insert_(network.eval(), space, elastic)
  With --bundle, whose description makes a network elastic, it may return the ordinary network.
  Run the command in the folder of the module, or name the folder in PYTHONPATH.

examples:
  python -m subnetact.profile --family ofa_resnet50 --checkpoint ofa.pth --subnets 100 --save-bundle bundle
  python -m subnetact.profile --model mynet:supernet --input-shape 3 32 32 --subnets random:20
  python -m subnetact.profile --bundle bundle --subnets all --device cuda --mode graphs --out h200.json
  python -m subnetact.profile --compare monday.json tuesday.json --tolerance 5"""


@dataclass(frozen=True)
class CommandOptions:
    """What the command alone has.

    Attributes:
        threads: CPU threads of one forward pass (default: torch's own).
        machine: only print what this machine has, and what it computes with at each precision, or why not.
        compare: only print the ratios of the second table to the first.
        strict: exit with 3 if a cell is unstable.
    """

    threads: int | None = None
    machine: bool = False
    compare: tuple[Path, ...] | None = None
    strict: bool = False


GROUPS: dict[str, Callable[..., Any]] = {
    "what to profile (if nothing is given, the embedded digits supernet)": load_source,
    "which subnets": SelectionRequest,
    "how subnets are run, and what is written": ProfileJob,
    "how times are measured": SweepSettings,
    "what the command does": CommandOptions,
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "python -m subnetact.profile",
        description="Measures a latency table, subnets x batch sizes, and writes a bundle to serve from.",
        epilog=EPILOG,
        formatter_class=OptionFormatter,
    )
    changes: dict[str, dict[str, Any]] = {
        "precision": {"choices": tuple(PRECISIONS)},
        "subnets": {"default": None},
        "mode": {"choices": (*MODES, AS_SERVED)},
        "beside": {"choices": BESIDE},
        "device": {"default": "cuda" if torch.cuda.is_available() else "cpu"},
        "compare": {"nargs": 2},
    }
    add_options(parser, GROUPS, changes)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the options of `sys.argv`; return the exit status."""
    args = build_parser().parse_args(arguments)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return reported(_run, args, "subnetact.profile", USERS_MISTAKES)
    except KeyboardInterrupt:
        print("subnetact.profile: interrupted; --resume continues a profile", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(args: argparse.Namespace) -> int:
    if args.compare:
        return _compare(args)
    if args.threads is not None:
        if args.threads < 1:
            raise DeviceError(f"threads: {args.threads} must be at least 1")
        torch.set_num_threads(args.threads)
    try:
        return _machine(args) if args.machine else _profile(args)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}; see --input-shape and --input-dtype") from error


def _profile(args: argparse.Namespace) -> int:
    subnets = args.subnets or ("all" if args.bundle else SelectionRequest.subnets)
    request = call_with_options(SelectionRequest, args, subnets=subnets)
    settings = call_with_options(SweepSettings, args)
    job = call_with_options(ProfileJob, args, request=request, settings=settings)
    find_device(job.device)
    torch.manual_seed(args.seed)
    source = call_with_options(load_source, args)
    table = run_profile(job, source, arguments_of(args, build_parser(), without=("resume",)))
    names = {spec.key: name for name, spec in source.supernet.card.subnets.items()}
    _print(job, table, names, own_network=source.supernet.origin is None)
    return UNSTABLE if args.strict and count_stable(table)[1] else DONE


def _machine(args: argparse.Namespace) -> int:
    device = find_device(args.device)
    on = machine(device)
    print(
        f"{on['device_name']}: {on['instructions']}; {on['cpus']} CPUs, {on['threads']} threads, "
        f"torch {on['torch']}"
    )
    print(f"{FLOAT32}: torch's own products")
    for precision in sorted(PRECISIONS.keys() - {FLOAT32}):
        why = why_not(precision, device)
        print(f"{precision}: {kernel_here(precision, device).text if why is None else f'refused, {why}'}")
    return DONE


def _compare(args: argparse.Namespace) -> int:
    first, second = map(LatencyTable.load, args.compare)
    shared = first.statistics.keys() & second.statistics.keys()
    by_default = args.statistic == SweepSettings.statistic and args.statistic not in shared
    comparison = first.compare(second, None if by_default else args.statistic)
    print(comparison.report(args.tolerance))
    return DONE if comparison.within(args.tolerance) else UNSTABLE


def _print(job: ProfileJob, table: LatencyTable, names: dict[str, str], own_network: bool) -> None:
    print(f"{job.out}: {table}")
    print(f"{job.scheduler_out}: for a Batcher or a simulation; its latencies never fall as the batch grows")
    print(f"{job.work}: what --resume needs to add measurements; it may be deleted")
    print("  accuracy" + "".join(f"{f'batch {b}':>11}" for b in table.batch_sizes) + "  ms  subnet")
    step = math.ceil(len(table.subnets) / ROWS_SHOWN)
    for i in range(0, len(table.subnets), step):
        percent, key = table.accuracy[i], table.subnets[i]
        known = "         -" if math.isnan(percent) else f"{percent:8.2f} %"
        cells = "".join("     (none)" if math.isnan(ms) else f"{ms:11.2f}" for ms in table.latency_ms[i])
        print(f"{known}{cells}      {names.get(key, key)}")
    if step > 1:
        print(f"  (one of every {step} of the {len(table.subnets)} subnets is shown)")
    if np.isnan(table.accuracy).any():
        print(
            "accuracies are not known, and most policies need them: give table.with_accuracy([...]), or "
            "profile with --accuracy"
        )
    print(f"BatchNorm statistics: {table.stamp['calibrated_on']}")
    if job.save_bundle is not None:
        own = ", supernet=yours" if own_network else ""
        print(f"{job.save_bundle}: the bundle; subnetact.Engine.load({str(job.save_bundle)!r}{own})")
    if cells_out := int(np.isnan(table.latency_ms).sum()):
        print(f"{cells_out} cells ran out of memory; schedulers do not choose them")
    if isinstance(predicted := table.stamp.get("search_latency"), dict):
        for size, error in predicted.items():
            print(f"the search's latencies at {size}: {error}")
    if doubt := unsure(table):
        print(
            f"{doubt}: medians that are not known to {job.settings.tolerance:g} %, or those of a busy "
            "machine. Stop other work on it, or raise --max-windows"
        )
