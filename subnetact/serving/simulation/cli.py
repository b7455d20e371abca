"""The command `python -m subnetact.simulate`: compares policies on one trace and one latency table.

Its defaults are the setting of SuperServe, 8 workers and an SLO of 36 ms. Expired requests are dropped, as by
`simulate` and `Batcher`; `--expired serve` keeps them, as SuperServe does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from subnetact.errors import SubnetActError
from subnetact.files.documents import write_json
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies import make_policy, policy_names
from subnetact.serving.scheduling.checks import EXPIRED_RULES
from subnetact.serving.simulation.datasets import TRACES, load_trace, superserve_a40
from subnetact.serving.simulation.fluid import fluid_bound
from subnetact.serving.simulation.plot import plot_comparison, plot_dynamics
from subnetact.serving.simulation.replay import LiveRun
from subnetact.serving.simulation.result import SimulationResult
from subnetact.serving.simulation.simulator import simulate

__all__ = ["main"]

_HEADER = f"{'policy':<16}{'attainment':>12}{'mean acc':>10}{'eff acc':>10}{'missed':>10}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: the arguments of the command line. If None, those of the process.

    Returns:
        The exit status: 0, or 2 after an error, which is printed.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.replay is not None:
            _replay(options)
        else:
            _compare(options)
    except BrokenPipeError:  # Nobody reads the output any more; `run_command` ends quietly.
        raise
    except (SubnetActError, OSError) as error:
        print(f"error: {error}")
        return 2
    return 0


def _replay(options: argparse.Namespace) -> None:
    """Print the live run of a decision log, and simulations of other policies on the same arrivals."""
    live = LiveRun.load(options.replay)
    table = LatencyTable.load(options.table) if options.table else live.measured
    slo_ms = options.slo_ms if options.slo_ms is not None else float(np.median(live.slo_ms))
    workers = options.workers if options.workers is not None else live.workers
    expired = options.expired or live.expired
    names = policy_names(table) if "all" in options.policy else options.policy
    possible = live.slo_ms >= table.fastest_ms  # every policy misses the other requests
    print(
        f"{options.replay}: {len(live.arrivals_ms)} requests, {workers} workers, median SLO {slo_ms:g} ms, "
        f"expired requests: {expired}"
    )
    print(_HEADER)
    shown = f"live {live.policy}"
    results = {shown: live.result}
    print(_line(shown, live.result))
    for name in names:
        results[name] = result = simulate(
            live.arrivals_ms[possible],
            table,
            make_policy(name, table, slo_ms),
            slo_ms=live.slo_ms[possible],
            workers=workers,
            expired=expired,
            noise=options.noise,
            overhead_ms=options.overhead_ms,
            min_accuracy=live.floors[possible],
            seed=options.seed,
            decisions=options.plot is not None,
        )
        result.requests, result.dropped = len(possible), result.dropped + int((~possible).sum())
        print(_line(name, result))
    if options.plot is not None:
        plot_dynamics(
            results, live.arrivals_ms, table, options.plot, f"replay of {Path(options.replay).name}"
        )
        print(f"figure: {options.plot}")
    if options.json is not None:
        write_json(options.json, {"policies": {name: result.summary() for name, result in results.items()}})


def _line(name: str, result: SimulationResult) -> str:
    return (
        f"{name:<16}{result.attainment:>12.6f}{result.mean_accuracy:>10.3f}"
        f"{result.effective_accuracy:>10.3f}{result.missed:>10}"
    )


def _compare(options: argparse.Namespace) -> None:
    options.slo_ms = 36.0 if options.slo_ms is None else options.slo_ms
    options.workers = 8 if options.workers is None else options.workers
    options.expired = options.expired or "drop"
    table = LatencyTable.load(options.table) if options.table else superserve_a40()
    arrivals = load_trace(options.trace, options.scale, options.seed, options.duration_s)
    names = policy_names(table) if "all" in options.policy else options.policy
    policies = {name: make_policy(name, table, options.slo_ms) for name in names}
    bound = fluid_bound(arrivals, table, options.slo_ms, workers=options.workers)
    print(
        f"{options.trace} x{options.scale:g}: {len(arrivals)} requests, {options.workers} workers, "
        f"SLO {options.slo_ms:g} ms, expired requests: {options.expired}"
    )
    print(f"{_HEADER}{'to bound':>10}")
    results: dict[str, SimulationResult] = {}
    for name, policy in policies.items():
        result = results[name] = simulate(
            arrivals,
            table,
            policy,
            slo_ms=options.slo_ms,
            workers=options.workers,
            expired=options.expired,
            noise=options.noise,
            overhead_ms=options.overhead_ms,
            seed=options.seed,
            decisions=options.plot is not None,
        )
        print(f"{_line(name, result)}{bound - result.effective_accuracy:>10.3f}")
        if options.plot is not None:
            options.plot.mkdir(parents=True, exist_ok=True)
            file = options.plot / f"dynamics_{options.trace}_{name.replace(':', '_')}.png"
            plot_dynamics(result, arrivals, table, file, f"{name} on {options.trace}")
            result.decisions = None
    print(f"{'fluid bound':<16}{'':>12}{'':>10}{bound:>10.3f}")
    if options.plot is not None:
        plot_comparison(results, options.plot / f"comparison_{options.trace}.png", options.trace, bound)
        print(f"figures in {options.plot}")
    if options.json is not None:
        summary = {"fluid_bound": bound, "policies": {name: r.summary() for name, r in results.items()}}
        write_json(options.json, summary)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m subnetact.simulate",
        description="Compare scheduling policies on a trace of arrivals.",
        epilog="Columns: attainment, the share of requests that are met, which means answered in time; "
        "mean acc, the mean profiled accuracy over met requests; eff acc, effective accuracy: that accuracy "
        "summed over met requests, divided by all requests; missed, the number of requests that are not met; "
        "to bound, by how much effective accuracy is below the fluid bound. Accuracies are in percent.",
        formatter_class=_Formatter,
    )
    parser.add_argument(
        "--table", type=Path, help="latency table, a JSON file (default: SuperServe's table of an NVIDIA A40)"
    )
    parser.add_argument("--trace", default="maf", choices=TRACES, help="the trace of arrivals")
    parser.add_argument(
        "--policy",
        nargs="+",
        default=["all"],
        help="one or more policies, such as hullfit slackfit:4 fixed:0, or all",
    )
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="LOG",
        help="a batcher's decision log, which replaces the trace: its arrivals, deadlines and minimum "
        "accuracies. The SLO, the workers and the rule for expired requests are those of the live run unless "
        "given; the latencies are the measured ones unless --table is given",
    )
    parser.add_argument("--slo-ms", type=float, help="time from arrival to deadline, ms (default: 36.0)")
    parser.add_argument("--workers", type=int, help="number of workers (default: 8)")
    parser.add_argument(
        "--expired",
        choices=EXPIRED_RULES,
        help="what happens to requests that no subnet can answer in time any more: drop ends them "
        "unanswered, defer runs them when nothing else waits, serve runs them all the same, as SuperServe "
        "does; with --replay the rule of the live run (default: drop)",
    )
    parser.add_argument("--noise", type=float, default=0.0, help="relative standard deviation of latencies")
    parser.add_argument("--overhead-ms", type=float, default=0.0, help="time added to every latency, ms")
    parser.add_argument("--scale", type=float, default=2.0, help="factor on the rates of the trace")
    parser.add_argument(
        "--duration-s", type=float, help="keep only the first seconds of the trace (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals and noise")
    parser.add_argument(
        "--plot", type=Path, metavar="DIR", help="folder for figures; with --replay, the file of one figure"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file as JSON")
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        absent = action.default is None or action.default is False
        return action.help if absent else super()._get_help_string(action)
