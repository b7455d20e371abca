"""`Tuner`: how many workers recent arrivals need; the autoscaler of replicas and pipelines ask it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_count, check_slo, check_time
from subnetact.serving.simulation.traces import checked_arrivals

__all__ = ["Tuner"]


class Tuner:
    """Compares the recent arrivals with those that were planned for, over windows of many lengths.

    The lengths double from the latency of the fastest full batch up to `longest_ms`. If the arrivals within
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
        self.workers = self._planned_workers = check_count(workers, "workers")
        self.most_workers = check_count(most_workers, "most_workers")
        check_slo(slo_ms, table)
        self._patience_ms = check_time(patience_ms, "patience_ms")
        largest = table.latency_ms[:, -1]
        shortest = slo_ms if np.isnan(largest).all() else float(np.nanmin(largest))
        if not longest_ms >= shortest:
            raise PolicyError(f"longest_ms: {longest_ms} must be at least one batch ({shortest:g} ms)")
        widths = shortest * 2.0 ** np.arange(int(math.log2(longest_ms / shortest)) + 1)
        arrivals = checked_arrivals(planned)
        first = np.arange(len(arrivals))
        most = [float((np.searchsorted(arrivals, arrivals + width) - first).max()) for width in widths]
        # Windows longer than the planned trace get its mean rate.
        span_ms = max(float(arrivals[-1] - arrivals[0]), shortest)
        self.planned = (np.array(most) * np.maximum(1.0, widths / span_ms)).tolist()
        self._widths: list[float] = widths.tolist()
        self._times: list[float] = []
        self._needs: deque[tuple[float, int]] = deque()
        self._started_ms: float | None = None

    def step(self, now_ms: float, arrivals_ms: Sequence[float]) -> int:
        """Update and return the number of workers to run from now on.

        Args:
            now_ms: the time.
            arrivals_ms: arrival times since the last step, ms, ascending, none after `now_ms`.
        """
        if self._started_ms is None:
            self._started_ms = now_ms
        times, needs = self._times, self._needs
        times.extend(arrivals_ms)
        del times[: bisect_right(times, now_ms - self._widths[-1])]
        counts = [len(times) - bisect_right(times, now_ms - width) for width in self._widths]
        ratio = max(count / most for count, most in zip(counts, self.planned, strict=True))
        need = min(max(1, math.ceil(self._planned_workers * ratio - 1e-9)), self.most_workers)
        while needs and needs[0][0] < now_ms - self._patience_ms:
            needs.popleft()
        needs.append((now_ms, need))
        if need > self.workers:
            self.workers = need
        elif now_ms - self._started_ms >= self._patience_ms:
            self.workers = max(lately for _, lately in needs)
        return self.workers
