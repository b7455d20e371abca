"""Veltair: estimates how many co-runners use the device and plans with the latencies measured beside them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

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


Tables: TypeAlias = Mapping[float, LatencyTable]
"""Tables of the same subnets by the number of co-runners that they were measured beside, ascending from 0."""


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
    tables: Tables

    def took_ms(self, job: Job) -> float:
        """Return the latency of a job that starts now."""
        number = sum(one.number for one in self.co_runners if one.start_ms <= self._now < one.end_ms)
        column = self.table.batch_sizes.index(job.size)
        return float(self._under(number)[job.subnet, column])

    @cache  # noqa: B019
    def _under(self, number: float) -> npt.NDArray[np.float64]:
        numbers = list(self.tables)
        at = float(np.interp(number, numbers, range(len(numbers))))
        below, above = (self.tables[numbers[i]].latency_ms for i in (int(at), int(np.ceil(at))))
        return below + (at - int(at)) * (above - below)


def simulate_beside(
    co_runners: Sequence[CoRunner],
    arrivals_ms: npt.ArrayLike,
    tables: Tables,
    policy: Policy,
    slo_ms: float,
    workers: int = 1,
    **options: Any,
) -> SimulationResult:
    """Simulate a policy as `simulate(expired="serve")` does, with the latencies beside co-runners."""
    arrivals = checked_arrivals(arrivals_ms)
    loop = _Beside(arrivals, tables[0.0], policy, np.array(slo_ms), workers, "serve", **options)
    loop.co_runners, loop.tables = co_runners, tables
    return loop.run()


class Veltair:
    """Estimates the number of co-runners and asks a policy that was made for that number.

    One policy is made for every number of co-runners. After every batch, the measured latency is divided by
    the latency that the table without co-runners gives. The tables have this ratio for every subnet, batch
    size and measured number of co-runners; the number of co-runners that belongs to the measured ratio is
    found by interpolation. The estimate is an exponential moving average of these numbers over batches.

    Args:
        tables: a latency table for every number of co-runners.
        make: makes the policy for one number of co-runners from the table at that number, for example
            `lambda table: SlackFit(table, slo_ms=36.0)`.
        decay: weight of the past when a new estimate arrives, in [0, 1).

    Attributes:
        estimated_co_runners: the number of co-runners estimated now.

    Raises:
        PolicyError: there is one table only, or an argument is out of range.

    Source:
        VELTAIR (ASPLOS'22, section 4).
    """

    def __init__(
        self,
        tables: Tables,
        make: Callable[[LatencyTable], Policy],
        decay: float = 0.7,
    ) -> None:
        if len(tables) < 2 or next(iter(tables)) != 0.0:
            raise PolicyError(
                "tables: give one without co-runners, and others that were measured beside some"
            )
        if check_margin(decay, "decay") >= 1:
            raise PolicyError(f"decay: {decay} must be in [0, 1)")
        self.table = table = tables[0.0]
        self.decay = decay
        self._numbers = tuple(tables)
        self._tables = [one.latency_ms.tolist() for one in tables.values()]
        self._policies = [make(one) for one in tables.values()]
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
