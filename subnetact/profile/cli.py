"""The command line `python -m subnetact.profile`: from a checkpoint to a latency table and a bundle."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from subnetact.command import INTERRUPTED
from subnetact.device import find_device, machine
from subnetact.errors import DeviceError, InvalidRequest, SubnetActError, TableError, UserCodeError
from subnetact.files.documents import parse_json
from subnetact.latency.table import LatencyTable
from subnetact.operators.kernel_table import kernel_here, why_not
from subnetact.profile.modes import INCLUDES, MODES
from subnetact.profile.pipeline import ProfileJob, ProfileResult, outline, run_profile
from subnetact.profile.selection import SelectionRequest
from subnetact.profile.source import ProfileSource, load_source
from subnetact.profile.sweep import SweepSettings
from subnetact.spec import FLOAT32, PRECISIONS

__all__ = ["build_parser", "json_object", "main"]

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
    source = _source(args)
    if args.dry_run:
        print(outline(job, source))
        return DONE
    result = run_profile(job, source)
    _print(job, result, own_network=source.supernet.origin is None)
    return UNSTABLE if args.strict and result.unstable else DONE


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


def _print(job: ProfileJob, result: ProfileResult, own_network: bool) -> None:
    table = result.table
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
    print(f"BatchNorm statistics: {result.calibrated}")
    if job.save_bundle is not None:
        own = ", supernet=yours" if own_network else ""
        print(f"{job.save_bundle}: the bundle; subnetact.Engine.load({str(job.save_bundle)!r}{own})")
    cells_out = int(sum(ms != ms for ms in table.latency_ms.ravel()))
    if cells_out:
        print(f"{cells_out} cells ran out of memory; schedulers do not choose them")
    if result.dominated:
        print(
            f"{result.dominated} of {len(table.subnets)} subnets are dominated: another subnet is at least "
            "as accurate and has no larger median at any batch size"
        )
    if result.unstable:
        print(
            f"{result.unstable} of {result.cells} cells are unstable: their median is not known to "
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


def _source(args: argparse.Namespace) -> ProfileSource:
    return load_source(
        model=args.model,
        family=args.family,
        checkpoint=args.checkpoint,
        constructor=args.constructor,
        bundle=args.bundle,
        input_shape=args.input_shape,
        input_dtype=args.input_dtype,
        dtype=args.dtype,
        seed=args.seed,
        precision=args.precision,
    )


def _job(args: argparse.Namespace) -> ProfileJob:
    return ProfileJob(
        request=SelectionRequest(
            subnets=args.subnets or ("all" if args.bundle else "8"),
            accuracy=tuple(args.accuracy),
            fit_subnets=args.fit_subnets,
            evaluations=args.evaluations,
            seed=args.seed,
        ),
        settings=SweepSettings(
            warmup_ms=args.warmup_ms,
            min_time_ms=args.min_time_ms,
            windows=args.windows,
            max_windows=args.max_windows or max(args.windows, 10),
            tolerance=args.tolerance,
            quantiles=tuple(args.quantiles),
            statistic=args.statistic or "p50",
            co_runners=tuple(args.co_runners),
            co_runner_subnet=args.co_runner_subnet,
        ),
        batch_sizes=tuple(args.batch_sizes),
        device=args.device,
        mode=args.mode,
        include=tuple(name for name in INCLUDES if name in args.include),
        memory_budget_mb=args.memory_budget_mb,
        calibrate_on=args.calibrate_on,
        out=args.out,
        csv=args.csv,
        save_bundle=args.save_bundle,
        plot=args.plot,
        resume=args.resume,
    )


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that an option of a command line holds.

    Args:
        text: the value of the option.

    Raises:
        argparse.ArgumentTypeError: it is no JSON object.
    """
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object such as '{{\"n_classes\": 10}}'")
    return found


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "python -m subnetact.profile",
        description="Measures a latency table, subnets x batch sizes, and writes a bundle to serve from.",
        epilog=EPILOG,
        formatter_class=_Formatter,
    )
    group = parser.add_argument_group("what to profile (if nothing is given, the embedded digits supernet)")
    group.add_argument("--family", help="a family of ofa_adapters, for example ofa_resnet50")
    group.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="weights of the family; if not given, random weights, which run as fast as trained ones",
    )
    group.add_argument(
        "--model", metavar="PKG.MOD:FACTORY", help="your own function that returns a Supernet; see below"
    )
    group.add_argument(
        "--bundle", metavar="DIR", help="a directory that Engine.save wrote; a bundle of your own network "
        "needs --model too",
    )  # fmt: skip
    group.add_argument(
        "--constructor", type=json_object, default={}, metavar="JSON",
        help="keyword arguments for the family or the factory",
    )  # fmt: skip
    group = parser.add_argument_group("which subnets")
    group.add_argument(
        "--subnets",
        metavar="N|FILE|all|random:N",
        help="N: a Pareto set of N subnets, found by a search; FILE: a JSON list of subnets; all; random:N: "
        "the smallest, the largest and random ones (default: 8; of a bundle, all its subnets)",
    )
    group.add_argument(
        "--accuracy",
        nargs="+",
        default=[],
        metavar="ACCURACY",
        help="percent per subnet; or PKG.MOD:FACTORY, a function that is called with the supernet and "
        "returns a function subnet -> percent; or a checkpoint of OFA's accuracy predictor. Without "
        "accuracies the search uses multiply-accumulates as a stand-in and prefers more of them",
    )
    group.add_argument(
        "--fit-subnets", type=int, default=32, metavar="N",
        help="subnets measured before a search, to fit its latency predictors, at least 8 (needs scipy); 0: "
        "the search uses multiply-accumulates as a stand-in for latency",
    )  # fmt: skip
    group.add_argument(
        "--evaluations",
        type=int,
        default=1500,
        metavar="N",
        help="subnets that a search evaluates, at least 2",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="seed of random subnets, weights and images, and of the search"
    )
    group.add_argument(
        "--precision", nargs="+", choices=tuple(PRECISIONS), default=[], metavar="NAME",
        help="the precisions that subnets may choose: float32, int8, bfloat16. Subnets in files name theirs "
        "as `precision`; those that do not are float32",
    )  # fmt: skip
    group = parser.add_argument_group("BatchNorm statistics of the subnets")
    group.add_argument(
        "--calibrate-on",
        metavar="DATA",
        help="a .npy file of images (N, C, H, W); PKG.MOD:FUNCTION, which returns batches; or random:N for N "
        "random images, for latency only. If not given, subnets keep the statistics that they have",
    )
    group = parser.add_argument_group("how subnets are run")
    group.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help="ascending"
    )
    group.add_argument(
        "--input-shape",
        type=int,
        nargs="+",
        metavar="N",
        help="shape of one input (default: that of the bundle, the family or the digits; --model needs it)",
    )
    group.add_argument(
        "--input-dtype",
        metavar="DTYPE",
        help="dtype of the input, int64 for token ids (default: that of the bundle or family, or --dtype)",
    )
    group.add_argument(
        "--dtype", help="dtype of the weights: float32, bfloat16, float16 (default: the bundle's, or float32)"
    )
    group.add_argument(
        "--mode", choices=MODES, default="zero-copy", help="; ".join(f"{n}: {m}" for n, m in MODES.items())
    )
    group.add_argument(
        "--memory-budget-mb", type=float, default=2048.0, metavar="MIB",
        help="memory for fused programs and CUDA graphs, in MiB",
    )  # fmt: skip
    group.add_argument(
        "--include", nargs="+", choices=INCLUDES, default=[],
        help="time this too; " + "; ".join(f"{name}: {what}" for name, what in INCLUDES.items()),
    )  # fmt: skip
    group = parser.add_argument_group("where they are run")
    group.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1"
    )
    group.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads of one forward pass (default: torch's own)"
    )
    group.add_argument(
        "--machine", action="store_true",
        help="only print what this machine has, and what it computes with at each precision, or why not",
    )  # fmt: skip
    group.add_argument(
        "--co-runners", type=int, nargs="+", default=[], metavar="N",
        help="measure also beside this many processes that run a subnet without pause",
    )  # fmt: skip
    group.add_argument(
        "--co-runner-subnet", type=int, default=0, metavar="ID", help="the subnet that co-runners run"
    )
    group = parser.add_argument_group("how times are measured")
    group.add_argument(
        "--warmup-ms", type=float, default=20.0, metavar="MS", help="untimed running before each window"
    )
    group.add_argument(
        "--min-time-ms", type=float, default=500.0, metavar="MS",
        help="least timed running per cell, over its first windows",
    )  # fmt: skip
    group.add_argument("--windows", type=int, default=5, metavar="N", help="windows of every cell")
    group.add_argument(
        "--max-windows",
        type=int,
        metavar="N",
        help="most windows of an unstable cell (default: 10, or --windows)",
    )
    group.add_argument(
        "--tolerance",
        type=float,
        default=5.0,
        metavar="PERCENT",
        help="a cell is stable if half the width of the 90 %% confidence interval of its median is at most "
        "this much of the median; with --compare: the largest difference between two tables",
    )
    group.add_argument(
        "--quantiles", type=float, nargs="+", default=[50, 90, 95, 99], metavar="Q",
        help="quantiles in the table, in percent",
    )  # fmt: skip
    group.add_argument(
        "--statistic",
        metavar="NAME",
        help="the statistic that becomes the table's latency: mean, p50, p90 ...; all are kept. With "
        "--compare: the statistic that is compared (default: p50)",
    )
    group.add_argument("--strict", action="store_true", help=f"exit with {UNSTABLE} if a cell is unstable")
    group = parser.add_argument_group("what is written")
    group.add_argument(
        "--out", type=Path, default=Path("latency.json"), metavar="FILE",
        help="the table as measured. NAME.scheduler.json beside it is the table for a Batcher or a "
        "simulation: its latencies never fall as the batch grows. The folder NAME.json.work is what --resume "
        "reads; it may be deleted after the run",
    )  # fmt: skip
    group.add_argument(
        "--save-bundle", type=Path, metavar="DIR", help="weights, statistics, subnets and tables"
    )
    group.add_argument("--csv", type=Path, metavar="FILE", help="the table, one line per cell")
    group.add_argument(
        "--plot", type=Path, metavar="DIR", help="a heat map, and the Pareto front if accuracies are known"
    )
    group.add_argument("--resume", action="store_true", help="continue where an earlier run stopped")
    group.add_argument("--dry-run", action="store_true", help="only print what would be done")
    group = parser.add_argument_group("comparing two tables")
    group.add_argument(
        "--compare", type=Path, nargs=2, metavar="FILE", help="print the ratios of the second to the first"
    )
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults unless they are empty or explained already, and keeps the lines of the epilog."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        empty = (
            action.default is False or action.default in (None, [], {}) or "default" in (action.help or "")
        )
        return action.help if empty else super()._get_help_string(action)
