"""A policy that estimates how many co-runners the device has (VELTAIR, ASPLOS'22, section 4)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_margin
from subnetact.serving.scheduling.context import Context, Policy

__all__ = ["Veltair"]


class Veltair:
    """Any policy, made once per measured number of co-runners, and asked at the number estimated now.

    For every batch, the measured latency is divided by the latency that the profile without co-runners
    expects. The table has this ratio for every cell and every measured number of co-runners; the number of
    co-runners at which the table has the measured ratio is the estimate. The estimate is an exponential
    moving average over batches.

    Args:
        table: a profile with a co-runner dimension.
        make: makes the policy for one number of co-runners from the table at that number.
        decay: weight of the past when a new estimate arrives, in [0, 1).

    Attributes:
        estimated_co_runners: the number of co-runners estimated now.

    Raises:
        PolicyError: the table has no co-runner dimension, or an argument is out of range.
    """

    def __init__(
        self,
        table: LatencyTable,
        make: Callable[[LatencyTable], Policy],
        decay: float = 0.7,
    ) -> None:
        if not table.co_runners:
            raise PolicyError("table: it has no co-runner dimension; profile it under co-runners first")
        if check_margin(decay, "decay") >= 1:
            raise PolicyError(f"decay: {decay} must be in [0, 1)")
        self.table = table
        self.decay = decay
        self._levels = table.co_runners
        self._tables = [table.at_co_runners(level).latency_ms.tolist() for level in self._levels]
        self._policies = [make(table.at_co_runners(level)) for level in self._levels]
        self._columns = {size: column for column, size in enumerate(table.batch_sizes)}
        slo_ms = getattr(self._policies[0], "slo_ms", None)
        if slo_ms is not None:
            self.slo_ms = float(slo_ms)
        self.reset()

    def reset(self) -> None:
        """Assume an undisturbed device again."""
        self.estimated_co_runners = self._levels[0]
        for policy in self._policies:
            if hasattr(policy, "reset"):
                policy.reset()

    def decide(self, context: Context) -> tuple[int, int] | None:
        """Answer (subnet, batch size), by the policy of the least measured number not below the estimate."""
        level = min(bisect_left(self._levels, self.estimated_co_runners), len(self._levels) - 1)
        return self._policies[level].decide(context)

    def observe(self, subnet: int, batch_size: int, expected_ms: float, measured_ms: float) -> None:
        """Learn from one batch; `expected_ms` is the undisturbed profile's."""
        column = self._columns[batch_size]
        base = self._tables[0][subnet][column]
        ratios = [level[subnet][column] / base for level in self._tables]
        ratio = measured_ms / expected_ms
        felt = self._levels[-1]
        for i in range(1, len(ratios)):
            if ratio < ratios[i]:
                share = (
                    (ratio - ratios[i - 1]) / (ratios[i] - ratios[i - 1])
                    if ratios[i] > ratios[i - 1]
                    else 1.0
                )
                felt = self._levels[i - 1] + max(share, 0.0) * (self._levels[i] - self._levels[i - 1])
                break
        self.estimated_co_runners = self.decay * self.estimated_co_runners + (1.0 - self.decay) * felt
