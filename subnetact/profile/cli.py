"""`python -m subnetact.profile`: which subnets to serve on this device, and what each of them costs."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from subnetact.device import find_device
from subnetact.errors import InvalidRequest, SubnetActError, TableError
from subnetact.latency.table import LatencyTable
from subnetact.profile.modes import MODES
from subnetact.profile.pipeline import (
    Job,
    Profile,
    plan,
    profile,
)
from subnetact.profile.selection import Request
from subnetact.profile.source import ProfileSource, load_source
from subnetact.profile.sweep_settings import ORDERS, SweepSettings

__all__ = ["build_parser", "main"]

DONE, USAGE, UNSTABLE, INTERRUPTED = 0, 2, 3, 130
EXIT_CODES = f"""exit status:
  {DONE}    done; with --compare: every cell is within the tolerance
  {USAGE}    arguments that cannot work, progress of another environment, or an error of the device on the way
  {UNSTABLE}    with --strict: a cell is unstable; with --compare: a cell is outside the tolerance
  {INTERRUPTED}  interrupted (SIGINT, SIGTERM); --resume goes on

examples:
  python -m subnetact.profile --family ofa_resnet50 --checkpoint ofa.pth --subnets 100 --save-bundle bundle
  python -m subnetact.profile --bundle bundle --subnets all --device cuda --mode graphs --out h200.json
  python -m subnetact.profile --compare monday.json tuesday.json --tolerance 5"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; see `EXIT_CODES`."""
    args = build_parser().parse_args(arguments)
    try:
        with _interruptible():
            if args.compare:
                return _compare(args)
            return _profile(args)
    except KeyboardInterrupt:
        kept = (
            "" if args.compare or args.dry_run else f"; {_work(args)} keeps what was done, --resume goes on"
        )
        print(f"subnetact.profile: interrupted{kept}", file=sys.stderr)
        return INTERRUPTED
    except InvalidRequest as error:
        print(f"subnetact.profile: {error}; see --input-shape and --input-dtype", file=sys.stderr)
        return USAGE
    except (SubnetActError, ValueError, TypeError, RuntimeError, IndexError, OSError) as error:
        print(f"subnetact.profile: {error}", file=sys.stderr)
        return USAGE
    except Exception:  # in what the user's own factory or function does
        traceback.print_exc()
        return USAGE


def _profile(args: argparse.Namespace) -> int:
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"threads: {args.threads} must be at least 1")
        torch.set_num_threads(args.threads)
    job = _job(args)
    find_device(job.device)
    subject = _subject(args)
    if args.dry_run:
        print(plan(job, subject))
        return DONE
    found = profile(job, subject)
    _print(job, found, subject.supernet.origin is None)
    return UNSTABLE if args.strict and found.unstable else DONE


def _compare(args: argparse.Namespace) -> int:
    first, second = map(LatencyTable.load, args.compare)
    shared = [name for name in first.statistics if name in second.statistics]
    if args.statistic not in (None, *shared):
        raise TableError(
            f"statistic: {args.statistic!r} is not in both tables; both have "
            f"{', '.join(shared) or 'none'}; "
            "leave it out to compare what each has as its latency"
        )
    comparison = first.compare(second, args.statistic or ("p50" if "p50" in shared else None))
    print(comparison.report(args.tolerance))
    return DONE if comparison.within(args.tolerance) else UNSTABLE


def _print(job: Job, found: Profile, own_network: bool) -> None:
    table, shown = found.table, 24
    print(f"{job.out}: {table}")
    print(f"{job.scheduler_out}: the same for schedulers, never falling as the batch grows")
    print("  accuracy" + "".join(f"{f'batch {b}':>11}" for b in table.batch_sizes) + "  ms  subnet")
    step = max(1, math.ceil(len(table.subnets) / shown))
    for i in range(0, len(table.subnets), step):
        percent = table.accuracy[i]
        cells = "".join("     (none)" if ms != ms else f"{ms:11.2f}" for ms in table.latency_ms[i])
        print(
            ("         -" if percent != percent else f"{percent:8.2f} %") + f"{cells}      {table.subnets[i]}"
        )
    if step > 1:
        print(f"  (every {step}. of {len(table.subnets)} subnets)")
    if any(percent != percent for percent in table.accuracy):
        print(
            "accuracies are not known, and most policies choose by them: give table.with_accuracy([...]), or "
            "profile with --accuracy"
        )
    print(f"calibrated on {found.calibrated}")
    if job.bundle is not None:
        own = ", supernet=yours" if own_network else ""
        print(f"{job.bundle}: the bundle; subnetact.Engine.load({str(job.bundle)!r}{own})")
    cells_out = int(sum(ms != ms for ms in table.latency_ms.ravel()))
    if cells_out:
        print(f"{cells_out} cells ran out of memory; schedulers do not choose them")
    if found.beaten:
        print(
            f"{found.beaten} of {len(table.subnets)} subnets are beaten by another one's accuracy and "
            "measured medians at all batch sizes"
        )
    if found.unstable:
        print(
            f"{found.unstable} of {found.cells} cells are unstable: their median is not known to "
            f"{100 * job.settings.stability:g} %. Quieten the machine, or raise --max-windows"
        )


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the work as SIGINT does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _subject(args: argparse.Namespace) -> ProfileSource:
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
    )


def _job(args: argparse.Namespace) -> Job:
    return Job(
        request=Request(
            subnets=args.subnets or ("all" if args.bundle else "8"),
            accuracy=tuple(args.accuracy),
            accuracy_predictor=args.accuracy_predictor,
            accuracy_encoding=args.accuracy_encoding,
            search_latency=args.search_latency,
            fitted=args.fitted,
            evaluations=args.evaluations,
            seed=args.seed,
        ),
        settings=SweepSettings(
            warmup_ms=args.warmup_ms,
            min_time_ms=1e3 * args.min_time_s,
            windows=args.windows,
            max_windows=args.max_windows or max(args.windows, 10),
            stability=args.stability / 100,
            order=args.order,
            quantiles=tuple(args.quantiles),
            statistic=args.statistic or "p50",
            co_runners=tuple(args.co_runners),
            co_runner_subnet=args.co_runner_subnet,
        ),
        batch_sizes=tuple(args.batch_sizes),
        device=args.device,
        mode=args.mode,
        include_actuation=args.include_actuation,
        include_h2d=args.include_h2d,
        channels_last=args.channels_last,
        budget_mb=args.budget_mb,
        calibrate_on=args.calibrate_on,
        random_images=args.random_images,
        calibration_batch=args.calibration_batch,
        out=args.out,
        csv=args.csv,
        bundle=args.save_bundle,
        plots=args.plot,
        resume=args.resume,
        progress=not args.quiet,
    )


def _work(args: argparse.Namespace) -> Path:
    return Job(out=args.out).work


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, as '{{\"n_classes\": 10}}' is")
    return found


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "python -m subnetact.profile",
        description="From a checkpoint to a latency table, subnet x batch size, and a bundle to serve from.",
        epilog=EXIT_CODES,
        formatter_class=_Formatter,
    )
    group = parser.add_argument_group("what to profile (the embedded digits supernet if nothing is given)")
    group.add_argument("--family", help="a family of ofa_adapters, ofa_resnet50 for example")
    group.add_argument("--checkpoint", metavar="FILE", help="its weights; random ones, as fast, if left out")
    group.add_argument("--model", metavar="PKG.MOD:FACTORY", help="a function that returns a Supernet")
    group.add_argument("--bundle", metavar="DIR", help="what Engine.save wrote; all its subnets by default")
    group.add_argument(
        "--constructor", type=_object, default={}, metavar="JSON", help="arguments of family or factory"
    )
    group = parser.add_argument_group("which subnets")
    group.add_argument(
        "--subnets",
        metavar="N|FILE|all|random:N",
        help="a number: the Pareto set of that size that a search of the whole space finds, all where it has "
        "no more; a JSON list of subnets; all; or random ones with the smallest and the largest (default: 8, "
        "of a bundle all its own)",
    )
    group.add_argument(
        "--accuracy",
        nargs="+",
        default=[],
        metavar="PERCENT",
        help="of each listed subnet; or one PKG.MOD:FACTORY, called with the supernet, that returns a "
        "function spec -> percent. Not known if left out: the search then takes more arithmetic for better",
    )
    group.add_argument("--accuracy-predictor", metavar="FILE", help="checkpoint of OFA's accuracy predictor")
    group.add_argument(
        "--accuracy-encoding", metavar="NAME", help="what it reads: tutorial (default: the family's own)"
    )
    group.add_argument(
        "--search-latency",
        choices=("measured", "macs"),
        default="measured",
        help="what the search goes by: a predictor fitted to subnets measured here, or multiply-accumulates",
    )
    group.add_argument("--fitted", type=int, default=32, metavar="N", help="subnets it is fitted to")
    group.add_argument("--evaluations", type=int, default=1500, metavar="N", help="subnets the search tries")
    group.add_argument(
        "--seed", type=int, default=0, help="of random subnets, weights, images, and the search"
    )
    group = parser.add_argument_group("BatchNorm statistics of the subnets (shared ones if nothing is given)")
    group.add_argument(
        "--calibrate-on",
        metavar="DATA",
        help=".npy of images (N, C, H, W), or PKG.MOD:FUNCTION giving batches",
    )
    group.add_argument(
        "--random-images", type=int, default=0, metavar="N", help="calibrate on noise: right for latency only"
    )
    group.add_argument("--calibration-batch", type=int, default=100, metavar="N", help="images a batch")
    group = parser.add_argument_group("what is run")
    group.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help="ascending"
    )
    group.add_argument(
        "--input-shape",
        type=int,
        nargs="+",
        metavar="N",
        help="of one input (default: the bundle's; digits 1 16 16; text families 128; otherwise 3 224 224)",
    )
    group.add_argument(
        "--input-dtype",
        metavar="DTYPE",
        help="of the input: int64 for token ids (default: the bundle's, or --dtype)",
    )
    group.add_argument(
        "--dtype", help="of the weights: float32, bfloat16, float16 (default: the bundle's own, or float32)"
    )
    group.add_argument("--mode", choices=MODES, default="zero-copy", help=_modes())
    group.add_argument("--budget-mb", type=float, default=2048.0, help="for fused and graphs, MiB")
    group.add_argument("--channels-last", action="store_true", help="in mode eager; other modes always are")
    group.add_argument("--include-actuation", action="store_true", help="time choosing the subnet too")
    group.add_argument("--include-h2d", action="store_true", help="time the input's copy to the device too")
    group = parser.add_argument_group("on what")
    group.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1"
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads of one pass (default: torch's)")
    group.add_argument(
        "--co-runners", type=int, nargs="+", default=[], metavar="N",
        help="measure also beside so many processes that run a subnet without pause",
    )  # fmt: skip
    group.add_argument("--co-runner-subnet", type=int, default=0, metavar="ID", help="its row in the table")
    group = parser.add_argument_group("how it is measured")
    group.add_argument("--warmup-ms", type=float, default=20.0, help="untimed, before each window")
    group.add_argument("--min-time-s", type=float, default=0.5, help="timed, per cell, over its windows")
    group.add_argument("--windows", type=int, default=5, metavar="N", help="visits to each cell")
    group.add_argument(
        "--max-windows", type=int, metavar="N", help="to a cell that is unstable (default: 10, or --windows)"
    )
    group.add_argument(
        "--stability",
        type=float,
        default=5.0,
        metavar="PERCENT",
        help="of the median: half the width of its 90 %% confidence interval, at most, in a stable cell",
    )
    group.add_argument("--order", choices=ORDERS, default="interleaved", help="of the visits")
    group.add_argument(
        "--quantiles", type=float, nargs="+", default=[50, 90, 95, 99], metavar="Q", help="kept"
    )
    group.add_argument(
        "--statistic",
        metavar="NAME",
        help="that becomes the table's latency: mean, p50, p90 ...; all are kept. With --compare: what is "
        "compared, the tables' latency where they have no p50 (default: p50)",
    )
    group.add_argument("--strict", action="store_true", help=f"exit {UNSTABLE} if a cell is unstable")
    group = parser.add_argument_group("what comes out")
    group.add_argument("--out", type=Path, default=Path("latency.json"), metavar="FILE", help="the table")
    group.add_argument("--save-bundle", type=Path, metavar="DIR", help="weights, statistics, subnets, tables")
    group.add_argument("--csv", type=Path, metavar="FILE", help="the table cell by cell")
    group.add_argument("--plot", type=Path, metavar="DIR", help="heat map, and front where accuracy is known")
    group.add_argument("--resume", action="store_true", help="go on where an earlier run stopped")
    group.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    group.add_argument("--quiet", action="store_true", help="no progress bars")
    group = parser.add_argument_group("two tables beside each other")
    group.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="print ratios, second to first")
    group.add_argument("--tolerance", type=float, default=5.0, metavar="PERCENT", help="between them")
    return parser


def _modes() -> str:
    return "; ".join(f"{name}: {meaning}" for name, meaning in MODES.items())


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults where there is something to say, and the examples as they are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        empty = (
            action.default is False or action.default in (None, [], {}) or "default" in (action.help or "")
        )
        return action.help if empty else super()._get_help_string(action)
