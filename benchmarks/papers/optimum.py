"""The exact optimum of small instances, by dynamic programming."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt

from subnetact.errors import TraceError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_count
from subnetact.serving.scheduling.frontier import pareto_of_batch
from subnetact.serving.simulation.traces import checked_arrivals

__all__ = ["MOST_REQUESTS", "exact_optimum"]

MOST_REQUESTS = 12


def exact_optimum(
    arrivals_ms: npt.ArrayLike,
    table: LatencyTable,
    slo_ms: float | npt.ArrayLike,
    workers: int = 1,
) -> float:
    """Return the greatest accuracy that any schedule reaches if all arrivals are known beforehand.

    A batch starts on one worker after the arrival of all its requests, runs without a break, and ends by
    their earliest deadline. Every request is in at most one batch. The optimum is found by dynamic
    programming over the requests that are left and the times at which workers are free, with batches in
    order of their start. A batch starts when its worker becomes free or when a request arrives. By an
    exchange argument it holds the most urgent requests that are left, have arrived and can be met by it.

    Args:
        arrivals_ms: arrival times, ms, ascending, shape (n,), n <= 12.
        table: the latency table.
        slo_ms: time from arrival to deadline, ms, one number or shape (n,).
        workers: number of workers, 1 or 2.

    Returns:
        Accuracy summed over met requests, percent; divide by n to obtain effective accuracy.

    Raises:
        TraceError: there are more than 12 requests, or the arrivals or SLOs cannot be simulated.
        PolicyError: `workers` is not a positive integer.

    Source:
        The zero-one program (1a)-(1f) of SuperServe (NSDI'25).
    """
    arrivals = checked_arrivals(arrivals_ms)
    if len(arrivals) > MOST_REQUESTS:
        raise TraceError(
            f"arrivals_ms: {len(arrivals)} requests; the exact optimum takes {MOST_REQUESTS} at most, "
            "fluid_bound any number"
        )
    check_count(workers, "workers")
    due = (arrivals + np.asarray(slo_ms, dtype=np.float64)).tolist()
    releases = arrivals.tolist()
    urgent = sorted(range(len(releases)), key=lambda i: (due[i], i))
    fronts = [pareto_of_batch(table, column) for column in range(len(table.batch_sizes))]
    largest = table.batch_sizes[-1]
    singles = sorted({(option.latency_ms, option.accuracy) for front in fronts for option in front})

    def ceiling(i: int, start: float) -> float:
        """Return the greatest accuracy for request i if nothing starts before `start`; 0 if it must miss."""
        within = due[i] - max(start, releases[i])
        return max((accuracy for latency, accuracy in singles if latency <= within), default=0.0)

    @cache
    def best(left: int, free: tuple[float, ...]) -> float:
        """Return the greatest accuracy for the requests in the bit mask `left`."""
        caps = {i: cap for i in urgent if left >> i & 1 and (cap := ceiling(i, free[0])) > 0}
        bound, most = sum(caps.values()), 0.0
        for start in sorted({*free, *(releases[i] for i in caps if releases[i] > free[0])}):
            waiting = [i for i in caps if releases[i] <= start]
            busy = [f for f in free if f > start]
            idle = len(free) - len(busy)
            for count in range(min(len(waiting), largest), 0, -1):
                for option in reversed(fronts[table.pad_index[count]]):
                    finish = start + option.latency_ms
                    batch = [i for i in waiting if due[i] >= finish][:count]
                    if len(batch) < count or not _tight(start, free, releases, batch):
                        continue
                    gain = count * option.accuracy
                    rest = [i for i in caps if i not in batch]
                    if gain + sum(caps[i] for i in rest) <= most:
                        continue
                    later = tuple(sorted([*busy, finish, *[start] * (idle - 1)]))
                    most = max(most, gain + best(sum(1 << i for i in rest), later))
                    if most >= bound:
                        return most
        return most

    if not math.isfinite(sum(due)):
        raise TraceError("slo_ms: every value must be finite")
    return best((1 << len(releases)) - 1, (releases[0],) * workers)


def _tight(start: float, free: tuple[float, ...], releases: list[float], batch: list[int]) -> bool:
    """Return whether the batch cannot start earlier: a worker becomes free or a request arrives then."""
    return start in free or any(releases[i] == start for i in batch)
