"""The exact optimum of small instances: SuperServe's zero-one program (NSDI'25, (1a)-(1f))."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt

from subnetact.errors import TraceError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_count
from subnetact.serving.scheduling.frontier import pareto_of_batch
from subnetact.serving.simulation.scenario import checked_arrivals

__all__ = ["MOST_REQUESTS", "exact_optimum"]

MOST_REQUESTS = 12


def exact_optimum(
    arrivals_ms: npt.ArrayLike,
    table: LatencyTable,
    slo_ms: float | npt.ArrayLike,
    workers: int = 1,
) -> float:
    """Greatest sum of accuracy over met requests that any schedule reaches, knowing all arrivals.

    A batch starts on one worker no earlier than the latest arrival of its requests, runs without a break,
    ends by their earliest deadline, and every request is in at most one batch. Solved exactly by dynamic
    programming over (requests left, when each worker is free), with batches in order of their start:
    a batch starts when its worker is free or when a request arrives, and, by exchange, holds the most
    urgent of the requests that are left, have arrived and can still be met by it.

    Args:
        arrivals_ms: shape (n,), ascending, n <= 12.
        table: the profile.
        slo_ms: time each request is given, a number or shape (n,).
        workers: 1 or 2.

    Returns:
        The optimum, percent summed over requests; divide by n for effective accuracy.

    Raises:
        TraceError: more than 12 requests, or arrivals that cannot be simulated.
    """
    arrivals = checked_arrivals(arrivals_ms)
    if len(arrivals) > MOST_REQUESTS:
        raise TraceError(
            f"arrivals_ms: {len(arrivals)} requests; the exact optimum takes {MOST_REQUESTS} at most"
        )
    check_count(workers, "workers")
    due = (arrivals + np.asarray(slo_ms, dtype=np.float64)).tolist()
    releases = arrivals.tolist()
    urgent = sorted(range(len(releases)), key=lambda i: (due[i], i))
    fronts = [pareto_of_batch(table, column) for column in range(len(table.batch_sizes))]
    largest = table.batch_sizes[-1]
    singles = sorted({(option.latency_ms, option.accuracy) for front in fronts for option in front})

    def ceiling(i: int, start: float) -> float:
        """Accuracy request i gets at most when nothing starts before `start`; 0 when it cannot be met."""
        within = due[i] - max(start, releases[i])
        return max((accuracy for latency, accuracy in singles if latency <= within), default=0.0)

    @cache
    def best(left: int, free: tuple[float, ...]) -> float:
        """Most accuracy from the requests in the bit mask `left`; batches come in order of their start."""
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
    """Whether the batch could not have started earlier: its worker or its last request just came free."""
    return start in free or any(releases[i] == start for i in batch)
