"""Compare scheduling policies on one trace of arrivals and one latency table.

The defaults are the setting of SuperServe, 8 workers and an SLO of 36 ms. Expired requests are dropped, as by
`simulate` and `Batcher`; `--expired serve` keeps them, as SuperServe does.

A trace file of your own runs at its own rate. Its times are in ms unless --unit or the name of the column
(arrival_s) says otherwise; a rate that the workers cannot answer is refused until --unit says that it is
meant.

Columns: attainment, the share of requests that are met, which means answered in time; mean acc, the mean
profiled accuracy over met requests; eff acc, effective accuracy: that accuracy summed over met requests,
divided by all requests; missed, the number of requests that are not met. Accuracies are in percent. No policy
can have a greater effective accuracy than the fluid bound.

The policies of SuperServe's paper: slackfit:4 is SlackFit with 4 latency buckets, which reproduces what the
paper reports (it does not give its number; the default of 8 misses more under heavy load); clipper+:N, which
is fixed:N, always runs subnet N; infaas, which is cheapest, runs the cheapest subnet that is accurate enough.
modelswitching, maxbatch and maxacc are those of the same names; hullfit is this library's own.
"""

from __future__ import annotations

import argparse
import inspect
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from subnetact import __version__
from subnetact.command import OptionFormatter, import_name, reported, user_code
from subnetact.errors import TraceError
from subnetact.files.documents import checksum, described, write_json
from subnetact.latency.arrays import Floats
from subnetact.latency.plot import need_matplotlib
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.registry import PAPER_NAMES, POLICIES, make_policy, policy_names
from subnetact.serving.scheduling.checks import EXPIRED_RULES
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.scheduling.frontier import time_per_request
from subnetact.serving.simulation.datasets import TRACES, load_trace, superserve_a40
from subnetact.serving.simulation.figure import plot_comparison
from subnetact.serving.simulation.fluid import fluid_bound
from subnetact.serving.simulation.replay import LiveRun
from subnetact.serving.simulation.result import SimulationResult
from subnetact.serving.simulation.simulator import simulate
from subnetact.serving.simulation.trace_file import UNITS_MS

SCALE_OF_RECORDED = 2.0
"""The factor on the rates of the traces of the package, unless another one is given."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the options of `sys.argv` if None are given; return the exit status, 2 after a printed error."""
    return reported(lambda options: _compare(options, arguments), _parser().parse_args(arguments))


def _compare(options: argparse.Namespace, arguments: Sequence[str] | None) -> None:
    """Print how policies do on a trace, or on the arrivals of a live run beside the run itself."""
    results: dict[str, SimulationResult] = {}
    refused, floors, bound = 0, None, None
    if options.figure:
        need_matplotlib()  # before the work is done
    if options.replay:
        live = LiveRun.load(options.replay)
        slo_ms, parser = float(np.median(live.slo_ms)), _parser()
        parser.set_defaults(slo_ms=slo_ms, workers=live.workers, expired=live.expired)
        options = parser.parse_args(arguments)
        options.trace = None  # It is replaced.
        table = LatencyTable.load(options.table) if options.table else live.measured
        possible = live.slo_ms >= table.fastest_ms  # no policy can meet the others
        refused = len(possible) - int(possible.sum())
        arrivals, slos, floors = (one[possible] for one in (live.arrivals_ms, live.slo_ms, live.floors))
        results[f"live {live.policy}"] = live.result
    else:
        table = LatencyTable.load(options.table) if options.table else superserve_a40()
        if options.scale is None:
            options.scale = SCALE_OF_RECORDED if options.trace in TRACES else 1.0
        how = options.scale, options.seed, options.duration_s, options.column, options.unit
        arrivals, slos = load_trace(options.trace, *how), options.slo_ms
        _refuse_doubtful_unit(options, arrivals, table)
        bound = fluid_bound(arrivals, table, slos, workers=options.workers)
    names = policy_names(table) if "all" in options.policy else options.policy
    policies = {name: _policy(name, table, options.slo_ms) for name in names}
    shown = f"{options.replay or f'{options.trace} x{options.scale:g}'}: {rate_text(arrivals)}"
    print(
        f"{shown}{f', and {refused} too late for any subnet' if refused else ''}; "
        f"{options.workers} workers, {'median ' if options.replay else ''}SLO {options.slo_ms:g} ms, "
        f"expired requests: {options.expired}\n"
        f"{'policy':<16}{'attainment':>12}{'mean acc':>10}{'eff acc':>10}{'missed':>10}"
    )
    for name in (*results, *policies):
        if name in policies:
            setting = options.workers, options.expired
            result = simulate(arrivals, table, policies[name], slos, *setting, min_accuracy=floors)
            result.requests, result.dropped = result.requests + refused, result.dropped + refused
            results[name] = result
        result = results[name]
        print(
            f"{name:<16}{result.attainment:>12.6f}{result.mean_accuracy:>10.3f}"
            f"{result.effective_accuracy:>10.3f}{result.missed:>10}"
        )
    summary: dict[str, Any] = {"policies": {name: result.summary() for name, result in results.items()}}
    summary["made_of"] = made_of(options, arrivals, table)
    if bound is not None:
        print(f"{'fluid bound':<32}{bound:>16.3f}")
        summary["fluid_bound"] = bound
    if options.json is not None:
        write_json(options.json, summary)
    if options.figure:
        plot_comparison(results, options.figure, f"{shown}\n{options.workers} workers", bound)


def _policy(name: str, table: LatencyTable, slo_ms: float) -> Policy:
    """Make a policy from its name, or from `module:Class`, which only a command line may name."""
    module, _, attribute = name.partition(":")
    if module.lower() in (*POLICIES, *PAPER_NAMES) or not attribute.isidentifier():
        return make_policy(name, table, slo_ms)
    policy = import_name(name)
    with user_code(f"policy {name!r}"):
        named = {"slo_ms": slo_ms} if "slo_ms" in inspect.signature(policy).parameters else {}
        return policy(table, **named)  # type: ignore[no-any-return]


def _refuse_doubtful_unit(options: argparse.Namespace, arrivals: Floats, table: LatencyTable) -> None:
    """Refuse times of a file whose unit nobody named, if no policy could answer that many per second."""
    most, span_s = options.workers / min(time_per_request(table)) * 1e3, rate_of(arrivals)["span_s"]
    doubtful = len(arrivals) - 1 > most * options.scale * span_s and options.workers > 0
    if options.unit is None and options.trace not in TRACES and doubtful:
        raise TraceError(
            f"trace: {options.trace} has {rate_text(arrivals)}, and {options.workers} workers answer at most "
            f"{most:.0f}; name the unit of its times: --unit s, or --unit ms if this load is meant"
        )


def rate_of(arrivals: Floats) -> dict[str, Any]:
    """Return the number of requests, the time from the first to the last, s, and the mean rate per second."""
    span_s = float(np.ptp(arrivals)) / 1e3 if len(arrivals) else 0.0
    mean = len(arrivals) / span_s if span_s else None
    return {"requests": len(arrivals), "span_s": span_s, "mean_per_s": mean}


def rate_text(arrivals: Floats) -> str:
    """Return what `rate_of` returns as text."""
    count, span_s, mean = rate_of(arrivals).values()
    return f"{count} requests within {span_s:.4g} s" + (f", {mean:.6g} per second" if mean else "")


def made_of(options: argparse.Namespace, arrivals: Floats, table: LatencyTable) -> dict[str, Any]:
    """Return what a result was made of, for JSON: options, files, arrivals, latency tables and versions."""
    stated = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    files = {stated[name] for name in ("trace", "table", "replay") if stated.get(name)}
    return {
        "options": stated,
        "files": {name: described(Path(name)) for name in sorted(files - {*TRACES})},
        "arrivals": rate_of(arrivals),
        "tables": [{"sha256": checksum(table.to_json()), "stamp": dict(table.stamp)}],
        "versions": {"subnetact": __version__, "numpy": np.__version__, "python": platform.python_version()},
    }


def _parser() -> argparse.ArgumentParser:
    name = "python -m subnetact.simulate"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=OptionFormatter)
    add = parser.add_argument
    factor = f"factor on the rates of the trace; for a file 1.0, unless given (default: {SCALE_OF_RECORDED})"
    add("--scale", type=float, help=factor)
    add("--column", help="the column of a trace file that holds the times, by name or by number from 1")
    units = "the unit of the times in a file (default: that in the name of the column, or ms)"
    add("--unit", choices=UNITS_MS, help=units)
    add("--duration-s", type=float, help="keep only the first seconds of the trace (default: all)")
    add("--seed", type=int, default=0, help="seed of the trace")
    add("--json", type=Path, metavar="FILE", help="write the results to this file as JSON")
    add("--table", type=Path, help="latency table, JSON (default: SuperServe's table of an NVIDIA A40)")
    traces = f"the trace of arrivals: {', '.join(TRACES)}, or a text or CSV file with one request per line"
    add("--trace", default="maf", help=traces)
    policies = (
        "one or more policies, such as hullfit slackfit:4 fixed:0, names of the papers (clipper+:0, infaas), "
        "own ones as module:Class, called with the table and, if it takes it, slo_ms=; or all"
    )
    add("--policy", nargs="+", default=["all"], help=policies)
    log = (
        "a batcher's decision log, which replaces the trace: its arrivals, deadlines and minimum accuracies. "
        "What is not given of the other options, and the latencies, are those of the live run"
    )
    add("--replay", type=Path, metavar="LOG", help=log)
    add("--slo-ms", type=float, default=36.0, help="time from arrival to deadline, ms")
    add("--workers", type=int, default=8, help="number of workers")
    rule = (
        "what happens to requests that no subnet can answer in time any more: drop ends them unanswered, "
        "defer runs them when nothing else waits, serve runs them all the same, as SuperServe does"
    )
    add("--expired", default="drop", choices=EXPIRED_RULES, help=rule)
    figure = "draw attainment over mean accuracy, a point per policy (the ending selects the format)"
    add("--figure", type=Path, metavar="FILE", help=figure)
    return parser
