"""Capacity planning by simulation: the fewest workers that meet a target."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy.typing as npt

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.registry import make_policy
from subnetact.serving.scheduling.checks import check_count, check_slo
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.simulation.result import SimulationResult
from subnetact.serving.simulation.simulator import simulate
from subnetact.serving.simulation.traces import checked_arrivals

SLOWER = 1.1
"""The factor on every latency of the simulated machine; the policy plans with these latencies."""
Make = Callable[[LatencyTable], Policy]


@dataclass(frozen=True)
class Plan:
    """The fewest workers that meet the target, and the policy that does so.

    Attributes:
        workers: number of workers.
        policy: name of the candidate that was chosen.
        result: the simulation of this plan on the slower table.
        tried: SLO attainment of every simulated (candidate, number of workers).
    """

    workers: int
    policy: str
    result: SimulationResult
    tried: dict[tuple[str, int], float]


def plan(
    trace: npt.ArrayLike,
    table: LatencyTable,
    slo_ms: float,
    attainment: float = 0.999,
    *,
    candidates: dict[str, Make] | None = None,
    min_mean_accuracy: float = 0.0,
    most_workers: int = 256,
    expired: str = "drop",
) -> Plan:
    """Find the fewest workers, and a policy, that meet a target on a machine slower than the profiled one.

    The machine is 10 percent slower. For each candidate the number of workers is doubled until the target is
    met and then bisected. Among candidates with equally few workers, the one with the greatest effective
    accuracy wins.

    Args:
        trace: arrival times, ms, ascending, shape (n,).
        table: the latency table.
        slo_ms: time from arrival to deadline, ms.
        attainment: the least SLO attainment, in (0, 1].
        candidates: for each name, a function that makes a policy from a table. If None, HullFit, and SlackFit
            with 4, 8 and 16 buckets.
        min_mean_accuracy: the least mean accuracy over met requests, percent.
        most_workers: the greatest number of workers to try.
        expired: the rule for expired requests; see `simulate`.

    Returns:
        The plan.

    Raises:
        PolicyError: a setting is out of range, or no candidate meets the target with `most_workers`.
        TraceError: the arrivals cannot be simulated.
        TableError: the accuracy of a subnet is not known.

    Source:
        InferLine (SoCC'20, section 4).
    """
    arrivals = checked_arrivals(trace)
    if not 0.0 < attainment <= 1.0:
        raise PolicyError(f"attainment: {attainment} must be in (0, 1]")
    check_count(most_workers, "most_workers")
    slower = table.scaled(SLOWER)
    check_slo(slo_ms, slower)
    if candidates is None:
        names = ("hullfit", "slackfit:4", "slackfit:8", "slackfit:16")
        candidates = {name: partial(make_policy, name, slo_ms=slo_ms) for name in names}
    results: dict[tuple[str, int], SimulationResult] = {}

    def meets(name: str, workers: int) -> bool:
        result = simulate(arrivals, slower, candidates[name](slower), slo_ms, workers, expired)
        results[name, workers] = result
        return result.attainment >= attainment and result.mean_accuracy >= min_mean_accuracy

    plans: dict[str, int] = {}
    for name in candidates:
        workers = fewest(partial(meets, name), min(plans.values(), default=most_workers))
        if workers is not None:
            plans[name] = workers
    tried = {one: result.attainment for one, result in results.items()}
    if not plans:
        closest = max(tried.values(), default=math.nan)
        raise PolicyError(
            f"attainment: {attainment} is not reached with {most_workers} workers (best {closest:.6f}); "
            "allow more workers or a longer SLO"
        )
    best = min(plans.items(), key=lambda one: (one[1], -results[one].effective_accuracy))
    return Plan(best[1], best[0], results[best], tried)


def fewest(meets: Callable[[int], bool], most: int, first: int = 1) -> int | None:
    """Return the least number from 1 to `most` that `meets`, as greater ones do; `first` is tried first."""
    failed, passed = 0, first
    while not meets(passed):
        if passed >= most:
            return None
        failed, passed = passed, min(2 * passed, most)
    return failed + 1 + bisect_left(range(failed + 1, passed), True, key=meets)
