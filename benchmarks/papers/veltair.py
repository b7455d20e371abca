"""Veltair: estimates how many co-runners use the device and plans with the latencies measured beside them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_margin
from subnetact.serving.scheduling.context import Context, Policy
from subnetact.serving.scheduling.request import Job
from subnetact.serving.simulation.event_loop import EventLoop
from subnetact.serving.simulation.result import SimulationResult
from subnetact.serving.simulation.traces import checked_arrivals

__all__ = ["CoRunner", "Veltair", "simulate_beside"]


class CoRunner(NamedTuple):
    """A period from `start_ms` to `end_ms` in which `number` co-runners use every worker's device.

    Periods that overlap add up, and fractions are interpolated.
    """

    start_ms: float
    end_ms: float
    number: float


class _Beside(EventLoop):
    """A simulation beside co-runners, which the policy does not see."""

    co_runners: Sequence[CoRunner]

    def took_ms(self, job: Job) -> float:
        """Return the latency of a job that starts now."""
        number = sum(one.number for one in self.co_runners if one.start_ms <= self._now < one.end_ms)
        column = self.table.batch_sizes.index(job.size)
        return float(self._under(number)[job.subnet, column])

    @cache  # noqa: B019
    def _under(self, number: float) -> npt.NDArray[np.float64]:
        return self.table.at_co_runners(number).latency_ms


def simulate_beside(
    co_runners: Sequence[CoRunner],
    arrivals_ms: npt.ArrayLike,
    table: LatencyTable,
    policy: Policy,
    slo_ms: float,
    workers: int = 1,
    **options: Any,
) -> SimulationResult:
    """Simulate a policy as `simulate(expired="serve")` does, with the latencies beside co-runners."""
    arrivals = checked_arrivals(arrivals_ms)
    loop = _Beside(arrivals, table, policy, np.array(slo_ms), workers, "serve", **options)
    loop.co_runners = co_runners
    return loop.run()


class Veltair:
    """Estimates the number of co-runners and asks a policy that was made for that number.

    One policy is made for every number of co-runners in the table. After every batch, the measured latency is
    divided by the latency that the table without co-runners gives. The table has this ratio for every subnet,
    batch size and measured number of co-runners; the number of co-runners that belongs to the measured ratio
    is found by interpolation. The estimate is an exponential moving average of these numbers over batches.

    Args:
        table: a latency table with a co-runner dimension.
        make: makes the policy for one number of co-runners from the table at that number, for example
            `lambda table: SlackFit(table, slo_ms=36.0)`.
        decay: weight of the past when a new estimate arrives, in [0, 1).

    Attributes:
        estimated_co_runners: the number of co-runners estimated now.

    Raises:
        PolicyError: the table has no co-runner dimension, or an argument is out of range.

    Source:
        VELTAIR (ASPLOS'22, section 4).
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
        self._numbers = table.co_runners
        self._tables = [table.at_co_runners(number).latency_ms.tolist() for number in self._numbers]
        self._policies = [make(table.at_co_runners(number)) for number in self._numbers]
        self._columns = {size: column for column, size in enumerate(table.batch_sizes)}
        slo_ms = getattr(self._policies[0], "slo_ms", None)
        if slo_ms is not None:
            self.slo_ms = float(slo_ms)
        self.reset()

    def reset(self) -> None:
        """Assume again that there are no co-runners."""
        self.estimated_co_runners = self._numbers[0]
        for policy in self._policies:
            if hasattr(policy, "reset"):
                policy.reset()

    def decide(self, context: Context) -> tuple[int, int] | None:
        """Return what the policy for the least measured number of co-runners >= the estimate decides."""
        at = min(bisect_left(self._numbers, self.estimated_co_runners), len(self._numbers) - 1)
        return self._policies[at].decide(context)

    def observe(self, subnet: int, batch_size: int, expected_ms: float, measured_ms: float) -> None:
        """Update the estimate after one batch.

        Args:
            subnet: index of the subnet.
            batch_size: the profiled batch size that ran.
            expected_ms: the latency that the table without co-runners gives.
            measured_ms: the latency that the batch took.
        """
        column = self._columns[batch_size]
        base = self._tables[0][subnet][column]
        ratios = [latencies[subnet][column] / base for latencies in self._tables]
        ratio = measured_ms / expected_ms
        estimate = self._numbers[-1]
        for i in range(1, len(ratios)):
            if ratio < ratios[i]:
                share = (
                    (ratio - ratios[i - 1]) / (ratios[i] - ratios[i - 1])
                    if ratios[i] > ratios[i - 1]
                    else 1.0
                )
                estimate = self._numbers[i - 1] + max(share, 0.0) * (self._numbers[i] - self._numbers[i - 1])
                break
        self.estimated_co_runners = self.decay * self.estimated_co_runners + (1.0 - self.decay) * estimate
