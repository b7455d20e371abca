"""The command line `python -m subnetact.profile`: from a checkpoint to a latency table and a bundle."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from subnetact.command import INTERRUPTED
from subnetact.device import find_device, machine
from subnetact.errors import DeviceError, InvalidRequest, SubnetActError, TableError, UserCodeError
from subnetact.latency.table import LatencyTable
from subnetact.operators.kernel_table import kernel_here, why_not
from subnetact.profile.modes import INCLUDES, MODES
from subnetact.profile.options import OptionFormatter, add_options, call_with_options, option_facts
from subnetact.profile.pipeline import ProfileJob, count_stable, outline, run_profile
from subnetact.profile.selection import SelectionRequest
from subnetact.profile.source import load_source
from subnetact.profile.sweep import SweepSettings
from subnetact.spec import FLOAT32, PRECISIONS

__all__ = ["build_parser", "main"]

DONE, USAGE, UNSTABLE = 0, 2, 3
ROWS_SHOWN = 24
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
  The module must be importable: run the command in its folder, or name the folder in PYTHONPATH. The shape of
  one input is not known, so give --input-shape too (and --input-dtype if the input holds integers).

examples:
  python -m subnetact.profile --family ofa_resnet50 --checkpoint ofa.pth --subnets 100 --save-bundle bundle
  python -m subnetact.profile --model mynet:supernet --input-shape 3 32 32 --subnets random:20
  python -m subnetact.profile --bundle bundle --subnets all --device cuda --mode graphs --out h200.json
  python -m subnetact.profile --compare monday.json tuesday.json --tolerance 5"""
GROUPS = {
    "what to profile (if nothing is given, the embedded digits supernet)": (
        *("family", "checkpoint", "model", "bundle", "constructor"),
    ),
    "which subnets": ("subnets", "accuracy", "fit_subnets", "evaluations", "seed", "precision"),
    "BatchNorm statistics of the subnets": ("calibrate_on",),
    "how subnets are run": (
        *("batch_sizes", "input_shape", "input_dtype", "dtype", "mode", "memory_budget_mb", "include"),
    ),
    "where they are run": ("device", "threads", "machine", "co_runners", "co_runner_subnet"),
    "how times are measured": (
        *("warmup_ms", "min_time_ms", "windows", "max_windows", "tolerance", "quantiles", "statistic"),
        "strict",
    ),
    "what is written": ("out", "save_bundle", "csv", "plot", "resume", "dry_run"),
    "comparing two tables": ("compare",),
}
"""The options in the order of the help text; they are described where their values are taken."""
METAVARS = {
    **{"bundle": "DIR", "save_bundle": "DIR", "plot": "DIR", "checkpoint": "FILE"},
    **{"subnets": "N|FILE|all|random:N", "model": "PKG.MOD:FACTORY"},
    **{"calibrate_on": "DATA", "memory_budget_mb": "MIB", "tolerance": "PERCENT", "precision": "NAME"},
}


@dataclass(frozen=True)
class CommandOptions:
    """What the command alone has.

    Attributes:
        threads: CPU threads of one forward pass (default: torch's own).
        machine: only print what this machine has, and what it computes with at each precision, or why not.
        compare: print the ratios of the second table to the first.
        strict: exit with 3 if a cell is unstable.
        dry_run: only print what would be done.
    """

    threads: int | None = None
    machine: bool = False
    compare: tuple[Path, ...] | None = None
    strict: bool = False
    dry_run: bool = False


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "python -m subnetact.profile",
        description="Measures a latency table, subnets x batch sizes, and writes a bundle to serve from.",
        epilog=EPILOG,
        formatter_class=OptionFormatter,
    )
    facts = {
        name: fact
        for target in (load_source, SelectionRequest, ProfileJob, SweepSettings, CommandOptions)
        for name, fact in option_facts(target).items()
    }
    for name, metavar in METAVARS.items():
        facts[name]["metavar"] = metavar
    facts["precision"]["choices"] = tuple(PRECISIONS)
    facts["mode"].update(choices=tuple(MODES), help=_listed(MODES))
    facts["include"].update(choices=tuple(INCLUDES), help=f"time this too; {_listed(INCLUDES)}")
    facts["device"]["default"] = "cuda" if torch.cuda.is_available() else "cpu"
    facts["subnets"]["default"] = None
    facts["subnets"]["help"] += " (default: 8; of a bundle, all its subnets)"
    facts["statistic"]["default"] = None
    facts["statistic"]["help"] += ". With --compare: the statistic that is compared (default: p50)"
    facts["tolerance"]["help"] += "; with --compare: the largest difference between two tables"
    facts["compare"]["nargs"] = 2
    add_options(parser, GROUPS, facts)
    return parser


def _listed(described: dict[str, str]) -> str:
    return "; ".join(f"{name}: {what}" for name, what in described.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the options. If None, those of `sys.argv`.

    Returns:
        The exit status; `--help` lists them.
    """
    args = build_parser().parse_args(arguments)
    try:
        with _sigterm_interrupts():
            if args.compare:
                return _compare(args)
            if args.machine:
                return _machine(args)
            return _profile(args)
    except KeyboardInterrupt:
        kept = ""
        if not args.compare and not args.dry_run:
            kept = f"; {ProfileJob(out=args.out).work} keeps what was done, --resume continues"
        print(f"subnetact.profile: interrupted{kept}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # Nobody reads the output any more; `run_command` ends quietly.
        raise
    except UserCodeError as error:
        traceback.print_exception(error.__cause__)
        print(f"subnetact.profile: {error}", file=sys.stderr)
        return USAGE
    except InvalidRequest as error:
        print(f"subnetact.profile: {error}; see --input-shape and --input-dtype", file=sys.stderr)
        return USAGE
    except (SubnetActError, ValueError, TypeError, RuntimeError, IndexError, OSError) as error:
        print(f"subnetact.profile: {error}", file=sys.stderr)
        return USAGE
    except Exception:  # not expected, so its place matters
        traceback.print_exc()
        return USAGE


def _profile(args: argparse.Namespace) -> int:
    _set_threads(args.threads)
    job = _job(args)
    find_device(job.device)
    source = call_with_options(load_source, args)
    if args.dry_run:
        print(outline(job, source))
        return DONE
    table = run_profile(job, source)
    _print(job, table, own_network=source.supernet.origin is None)
    return UNSTABLE if args.strict and count_stable(table)[1] else DONE


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        if threads < 1:
            raise DeviceError(f"threads: {threads} must be at least 1")
        torch.set_num_threads(threads)


def _machine(args: argparse.Namespace) -> int:
    device = find_device(args.device)
    _set_threads(args.threads)
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
    shared = [name for name in first.statistics if name in second.statistics]
    if args.statistic not in (None, *shared):
        raise TableError(
            f"statistic: {args.statistic!r} is not in both tables; both have "
            f"{', '.join(shared) or 'none'}; leave --statistic out to compare the tables' latencies"
        )
    comparison = first.compare(second, args.statistic or ("p50" if "p50" in shared else None))
    print(comparison.report(args.tolerance))
    return DONE if comparison.within(args.tolerance) else UNSTABLE


def _print(job: ProfileJob, table: LatencyTable, own_network: bool) -> None:
    print(f"{job.out}: {table}")
    print(
        f"{job.scheduler_out}: the table for a Batcher or a simulation; its latencies never fall as the "
        "batch grows"
    )
    print(f"{job.work}: what --resume needs to add measurements; it may be deleted")
    print("  accuracy" + "".join(f"{f'batch {b}':>11}" for b in table.batch_sizes) + "  ms  subnet")
    step = max(1, math.ceil(len(table.subnets) / ROWS_SHOWN))
    for i in range(0, len(table.subnets), step):
        percent = table.accuracy[i]
        cells = "".join("     (none)" if ms != ms else f"{ms:11.2f}" for ms in table.latency_ms[i])
        print(
            ("         -" if percent != percent else f"{percent:8.2f} %") + f"{cells}      {table.subnets[i]}"
        )
    if step > 1:
        print(f"  (one of every {step} of the {len(table.subnets)} subnets is shown)")
    if any(percent != percent for percent in table.accuracy):
        print(
            "accuracies are not known, and most policies need them: give table.with_accuracy([...]), or "
            "profile with --accuracy"
        )
    print(f"BatchNorm statistics: {table.stamp['calibrated_on']}")
    if job.save_bundle is not None:
        own = ", supernet=yours" if own_network else ""
        print(f"{job.save_bundle}: the bundle; subnetact.Engine.load({str(job.save_bundle)!r}{own})")
    cells_out = int(sum(ms != ms for ms in table.latency_ms.ravel()))
    if cells_out:
        print(f"{cells_out} cells ran out of memory; schedulers do not choose them")
    if dominated := table.stamp.get("dominated"):
        print(
            f"{dominated} of {len(table.subnets)} subnets are dominated: another subnet is at least as "
            "accurate and has no larger latency at any batch size"
        )
    ran, unstable = count_stable(table)
    if unstable:
        print(
            f"{unstable} of {ran} cells are unstable: their median is not known to "
            f"{job.settings.tolerance:g} %. Stop other work on the machine, or raise --max-windows"
        )


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, as SIGINT does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _job(args: argparse.Namespace) -> ProfileJob:
    subnets = args.subnets or ("all" if args.bundle else SelectionRequest.subnets)
    return call_with_options(
        ProfileJob,
        args,
        request=call_with_options(SelectionRequest, args, subnets=subnets),
        settings=call_with_options(SweepSettings, args, statistic=args.statistic or SweepSettings.statistic),
        include=tuple(name for name in INCLUDES if name in args.include),
    )
