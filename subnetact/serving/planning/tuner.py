"""`Tuner`: when to add and to remove workers while a service runs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_count, check_slo
from subnetact.serving.simulation.scenario import WorkerEvent, checked_arrivals

__all__ = ["Tuner", "arrival_envelope"]

Floats = npt.NDArray[np.float64]


def arrival_envelope(arrivals_ms: npt.ArrayLike, windows_ms: Sequence[float]) -> Floats:
    """Return the greatest number of arrivals in any window of each length (a traffic envelope).

    Args:
        arrivals_ms: arrival times, ms, ascending, shape (n,).
        windows_ms: lengths of the windows, ms.

    Returns:
        The numbers, shape (windows,).

    Raises:
        TraceError: the arrivals cannot be simulated.
    """
    arrivals = checked_arrivals(arrivals_ms)
    numbers = np.arange(len(arrivals))
    most = [
        np.max(np.searchsorted(arrivals, arrivals + width, side="left") - numbers) for width in windows_ms
    ]
    return np.array(most, dtype=np.float64)


class Tuner:
    """Compares the recent arrivals with those that were planned for, over windows of many lengths.

    The lengths double from the latency of the fastest full batch up to about a minute. If the arrivals within
    any window exceed the planned ones, workers are added at once, in proportion to the excess. If fewer
    workers were needed during the last `patience_ms`, workers are removed down to the greatest need within
    that time.

    Args:
        planned: the arrivals that were planned for, ms, ascending, shape (n,).
        workers: the number of workers of that plan.
        table: the latency table.
        slo_ms: the usual time from arrival to deadline, ms.
        patience_ms: how long the need must stay lower before workers are removed, ms.
        longest_ms: the longest window, ms.
        most_workers: the greatest number of workers to ask for.

    Attributes:
        workers: the number of workers to run now.
        windows_ms: lengths of the windows, ms.
        planned: the greatest number of planned arrivals in any window of each length.

    Raises:
        PolicyError: a setting is out of range.
        TraceError: the arrivals cannot be simulated.
        TableError: the accuracy of a subnet is not known.

    Source:
        InferLine (SoCC'20, section 5).
    """

    def __init__(
        self,
        planned: npt.ArrayLike,
        workers: int,
        table: LatencyTable,
        slo_ms: float,
        patience_ms: float = 15_000.0,
        longest_ms: float = 60_000.0,
        most_workers: int = 256,
    ) -> None:
        self.workers = check_count(workers, "workers")
        self.most_workers = check_count(most_workers, "most_workers")
        check_slo(slo_ms, table)
        if not (math.isfinite(patience_ms) and patience_ms > 0):
            raise PolicyError(f"patience_ms: {patience_ms} must be finite and > 0")
        shortest = (
            float(np.nanmin(table.latency_ms[:, -1]))
            if not np.isnan(table.latency_ms[:, -1]).all()
            else slo_ms
        )
        if not longest_ms >= shortest:
            raise PolicyError(f"longest_ms: {longest_ms} must be at least one batch ({shortest:g} ms)")
        doublings = int(math.log2(longest_ms / shortest)) + 1
        self.windows_ms = [shortest * 2.0**i for i in range(doublings)]
        arrivals = checked_arrivals(planned)
        self.planned = arrival_envelope(arrivals, self.windows_ms)
        span_ms = float(arrivals[-1] - arrivals[0])
        # Windows longer than the planned trace get its mean rate.
        self.planned *= np.maximum(1.0, np.array(self.windows_ms) / max(span_ms, self.windows_ms[0]))
        self._planned_workers = self.workers
        self._patience_ms = float(patience_ms)
        self._times: list[float] = []
        self._needs: deque[tuple[float, int]] = deque()
        self._started_ms: float | None = None

    def step(self, now_ms: float, arrivals_ms: Sequence[float]) -> int:
        """Update the number of workers.

        Args:
            now_ms: the time.
            arrivals_ms: arrival times since the last step, ms, ascending, none after `now_ms`.

        Returns:
            The number of workers to run from now on.
        """
        if self._started_ms is None:
            self._started_ms = now_ms
        times = self._times
        times.extend(arrivals_ms)
        del times[: bisect_right(times, now_ms - self.windows_ms[-1])]
        need = self._need(now_ms)
        while self._needs and self._needs[0][0] < now_ms - self._patience_ms:
            self._needs.popleft()
        self._needs.append((now_ms, need))
        if need > self.workers:
            self.workers = need
        elif now_ms - self._started_ms >= self._patience_ms:
            self.workers = max(lately for _, lately in self._needs)
        return self.workers

    def _need(self, now_ms: float) -> int:
        """Return the workers needed for the window whose arrivals exceed the planned ones the most."""
        times = self._times
        counts = [len(times) - bisect_right(times, now_ms - width) for width in self.windows_ms]
        ratio: float = max(count / plan for count, plan in zip(counts, self.planned.tolist(), strict=True))
        return min(max(1, math.ceil(self._planned_workers * ratio - 1e-9)), self.most_workers)

    def schedule(
        self, arrivals_ms: npt.ArrayLike, step_ms: float = 100.0, delay_ms: float = 0.0
    ) -> list[WorkerEvent]:
        """Return the worker events for a simulation in which this tuner is asked every `step_ms`.

        Simulate with `workers=most_workers`; the workers beyond the planned ones are down at first.

        Args:
            arrivals_ms: arrival times, ms, ascending, shape (n,).
            step_ms: time between two steps of the tuner, ms.
            delay_ms: how long it takes until an added worker is up, ms.

        Returns:
            The events.

        Raises:
            TraceError: the arrivals cannot be simulated.
        """
        arrivals = checked_arrivals(arrivals_ms)
        running = self.workers
        start = float(arrivals[0])
        events = [WorkerEvent(start, worker, False) for worker in range(running, self.most_workers)]
        seen = 0
        for now in np.arange(start + step_ms, float(arrivals[-1]) + step_ms, step_ms).tolist():
            upto = int(np.searchsorted(arrivals, now, side="right"))
            wanted = self.step(now, arrivals[seen:upto].tolist())
            seen = upto
            events += [WorkerEvent(now + delay_ms, worker, True) for worker in range(running, wanted)]
            events += [WorkerEvent(now, worker, False) for worker in range(wanted, running)]
            running = wanted
        return events
