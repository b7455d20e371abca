"""An upper bound on the effective accuracy that any policy can reach on a trace, from a fluid relaxation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from subnetact.errors import TraceError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_count
from subnetact.serving.scheduling.frontier import time_per_request, upper_hull
from subnetact.serving.simulation.traces import check, checked_arrivals

_MOST_STEPS = 10**8


def fluid_bound(
    arrivals_ms: npt.ArrayLike,
    table: LatencyTable,
    slo_ms: float | npt.ArrayLike,
    *,
    workers: int = 1,
    step_ms: float = 1.0,
) -> float:
    """Return the effective accuracy of a server that may split work into infinitely small parts.

    Every request takes some worker time between its arrival and its deadline, at least the time per request
    of the subnet that answers it. So the accuracy for a given time per request is at most the upper concave
    hull of (time per request, accuracy) of the table. The hull includes the origin, because a request may
    remain unanswered. The number of requests started by time t lies between the number that is due and the
    number that has arrived by t. Among all such curves, the shortest path ("taut string") maximises every
    concave reward of its slope, so the reward of this path is an upper bound.

    Args:
        arrivals_ms: arrival times, ms, ascending, shape (n,).
        table: the latency table.
        slo_ms: time from arrival to deadline, ms, one number or shape (n,).
        workers: number of workers.
        step_ms: width of the grid of the two curves, ms; a coarser grid gives a looser bound.

    Returns:
        The bound on effective accuracy, percent.

    Raises:
        TraceError: the arrivals cannot be simulated, or the step is not > 0.
        PolicyError: `workers` is not a positive integer.
    """
    arrivals = checked_arrivals(arrivals_ms)
    check_count(workers, "workers")
    check(step_ms=step_ms)
    due = np.sort(arrivals + np.asarray(slo_ms, dtype=np.float64))
    steps_needed = float((due[-1] - arrivals[0]) / step_ms)
    if not steps_needed < _MOST_STEPS:
        raise TraceError(f"slo_ms: {steps_needed:.3g} steps of {step_ms} ms; give a shorter SLO or trace")
    count = int(np.ceil(steps_needed)) + 1
    grid = arrivals[0] + step_ms * np.arange(count + 1)
    upper = np.searchsorted(arrivals, grid, side="right")
    lower = np.searchsorted(due, grid, side="right")
    lower[0] = upper[0] = 0
    knots = _taut_string(lower.tolist(), upper.tolist())
    steps, requests = np.diff(np.array(knots, dtype=np.float64), axis=0).T
    hull = upper_hull([(0.0, 0.0), *zip(time_per_request(table), table.accuracy, strict=True)])
    work_ms = workers * step_ms * steps
    share = np.divide(work_ms, requests, out=np.zeros_like(work_ms), where=requests > 0)
    accuracy = np.interp(share, [point[0] for point in hull], [point[1] for point in hull])
    return float((accuracy * requests).sum() / len(arrivals))


def _taut_string(lower: list[int], upper: list[int]) -> list[tuple[int, float]]:
    """Return the vertices (index, height) of the shortest path from (0, 0) to the end between two curves."""
    last = len(lower) - 1
    knots: list[tuple[int, float]] = [(0, 0.0)]
    while knots[-1][0] < last:
        start, height = knots[-1]
        steepest_low, flattest_high = -1.0, float("inf")
        low_at = high_at = start
        for i in range(start + 1, last + 1):
            run = i - start
            low, high = (lower[i] - height) / run, (upper[i] - height) / run
            if low > flattest_high:
                knots.append((high_at, float(upper[high_at])))
                break
            if high < steepest_low:
                knots.append((low_at, float(lower[low_at])))
                break
            if low >= steepest_low:
                steepest_low, low_at = low, i
            if high <= flattest_high:
                flattest_high, high_at = high, i
        else:
            knots.append((last, float(lower[last])))
    return knots
