"""When to add and remove workers at run time (InferLine, SoCC'20, section 5)."""

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
    """Most arrivals in any window of each length (a traffic envelope), shape (windows,)."""
    arrivals = checked_arrivals(arrivals_ms)
    numbers = np.arange(len(arrivals))
    most = [
        np.max(np.searchsorted(arrivals, arrivals + width, side="left") - numbers) for width in windows_ms
    ]
    return np.array(most, dtype=np.float64)


class Tuner:
    """Compares the recent arrival envelope with the one that was planned for.

    Windows double from the service time of one batch up to about a minute. When the traffic within any
    window exceeds what was planned, workers are added at once, in proportion to that window's rate; when
    for `patience_ms` the greatest need stayed lower, they are removed down to that need.

    Args:
        planned: arrivals, ms, that `workers` were planned for.
        workers: how many that plan uses.
        table: the profile; its fastest full batch gives the shortest window.
        slo_ms: the usual time a request is given.
        patience_ms: how long the need must stay lower before workers are removed.
        longest_ms: the longest window.
        most_workers: never ask for more.

    Raises:
        PolicyError: a setting out of range.
        TraceError: arrivals that cannot be simulated.
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
        #: windows longer than the planned trace saw no more than its mean rate allows
        self.planned *= np.maximum(1.0, np.array(self.windows_ms) / max(span_ms, self.windows_ms[0]))
        self._per_worker = self.workers
        self._patience_ms = float(patience_ms)
        self._times: list[float] = []
        self._needs: deque[tuple[float, int]] = deque()
        self._started_ms: float | None = None

    def step(self, now_ms: float, arrivals_ms: Sequence[float]) -> int:
        """The number of workers to run from now on.

        Args:
            now_ms: the time.
            arrivals_ms: arrivals since the last step, ascending, none after `now_ms`.
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
        """Workers in proportion to the window whose traffic exceeds its plan the most."""
        times = self._times
        counts = [len(times) - bisect_right(times, now_ms - width) for width in self.windows_ms]
        ratio: float = max(count / plan for count, plan in zip(counts, self.planned.tolist(), strict=True))
        return min(max(1, math.ceil(self._per_worker * ratio - 1e-9)), self.most_workers)

    def schedule(
        self, arrivals_ms: npt.ArrayLike, step_ms: float = 100.0, delay_ms: float = 0.0
    ) -> list[WorkerEvent]:
        """Worker events for `simulate` over a trace, asking every `step_ms`.

        Simulate with `workers=most_workers`; those not planned start down. A worker that is added comes up
        `delay_ms` later.
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
