"""Compare scheduling policies on one trace of arrivals and one latency table.

The defaults are the setting of SuperServe, 8 workers and an SLO of 36 ms. Expired requests are dropped, as by
`simulate` and `Batcher`; `--expired serve` keeps them, as SuperServe does.

Columns: attainment, the share of requests that are met, which means answered in time; mean acc, the mean
profiled accuracy over met requests; eff acc, effective accuracy: that accuracy summed over met requests,
divided by all requests; missed, the number of requests that are not met. Accuracies are in percent. No policy
can have a greater effective accuracy than the fluid bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from subnetact.command import OptionFormatter, reported
from subnetact.files.documents import write_json
from subnetact.latency.arrays import Floats
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies import make_policy, policy_names
from subnetact.serving.scheduling.checks import EXPIRED_RULES
from subnetact.serving.simulation.datasets import TRACES, load_trace, superserve_a40
from subnetact.serving.simulation.fluid import fluid_bound
from subnetact.serving.simulation.replay import LiveRun
from subnetact.serving.simulation.result import SimulationResult
from subnetact.serving.simulation.simulator import simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the options of `sys.argv` if None are given; return the exit status, 2 after a printed error."""
    return reported(lambda options: _compare(options, arguments), _parser().parse_args(arguments))


def _compare(options: argparse.Namespace, arguments: Sequence[str] | None) -> None:
    """Print how policies do on a trace, or on the arrivals of a live run beside the run itself."""
    results: dict[str, SimulationResult] = {}
    refused, floors, bound = 0, None, None
    if options.replay:
        live = LiveRun.load(options.replay)
        slo_ms, parser = float(np.median(live.slo_ms)), _parser()
        parser.set_defaults(slo_ms=slo_ms, workers=live.workers, expired=live.expired)
        options = parser.parse_args(arguments)
        table = LatencyTable.load(options.table) if options.table else live.measured
        possible = live.slo_ms >= table.fastest_ms  # no policy can meet the others
        refused = len(possible) - int(possible.sum())
        arrivals, slos, floors = (one[possible] for one in (live.arrivals_ms, live.slo_ms, live.floors))
        results[f"live {live.policy}"] = live.result
    else:
        table = LatencyTable.load(options.table) if options.table else superserve_a40()
        arrivals, slos = chosen_trace(options), options.slo_ms
        bound = fluid_bound(arrivals, table, slos, workers=options.workers)
    names = policy_names(table) if "all" in options.policy else options.policy
    policies = {name: make_policy(name, table, options.slo_ms) for name in names}
    print(
        f"{options.replay or f'{options.trace} x{options.scale:g}'}: {len(arrivals) + refused} requests, "
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
    if bound is not None:
        print(f"{'fluid bound':<32}{bound:>16.3f}")
        summary["fluid_bound"] = bound
    if options.json is not None:
        write_json(options.json, summary)


def _parser() -> argparse.ArgumentParser:
    parser = trace_parser("python -m subnetact.simulate", __doc__, scale=2.0)
    add = parser.add_argument
    add("--table", type=Path, help="latency table, JSON (default: SuperServe's table of an NVIDIA A40)")
    trace = f"the trace of arrivals: {', '.join(TRACES)}, or a text file with one arrival time in ms per line"
    add("--trace", default="maf", help=trace)
    policies = "one or more policies, such as hullfit slackfit:4 fixed:0, or all"
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
    return parser


def trace_parser(name: str, description: str | None, scale: float) -> argparse.ArgumentParser:
    """Return the parser of a command that simulates on a trace, with the options of the trace and results."""
    parser = argparse.ArgumentParser(name, description=description, formatter_class=OptionFormatter)
    add = parser.add_argument
    add("--scale", type=float, default=scale, help="factor on the rates of the trace")
    add("--duration-s", type=float, help="keep only the first seconds of the trace (default: all)")
    add("--seed", type=int, default=0, help="seed of the trace, and of what a pipeline draws")
    add("--json", type=Path, metavar="FILE", help="write the results to this file as JSON")
    return parser


def chosen_trace(options: argparse.Namespace) -> Floats:
    """Return the trace that the options of `trace_parser` and `trace` choose."""
    return load_trace(options.trace, options.scale, options.seed, options.duration_s)
