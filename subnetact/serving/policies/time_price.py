"""How much time HullFit may spend: the point of the hull that the load affords, and limits on latency.

The header of `subnetact.serving.policies.hullfit` explains the method.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from subnetact.errors import PolicyError
from subnetact.serving.policies.hull_table import HullTable
from subnetact.serving.scheduling.context import Context

__all__ = ["TimePrice", "Tuning"]


@dataclass(frozen=True)
class Tuning:
    """Constants of HullFit, all > 0. The defaults suit every trace of the reference suite.

    Attributes:
        rate_window_ms: the window over which the arrival rate is measured, ms.
        accepted_share: the backlog that is accepted, as a share of the requests that arrive during one SLO
            minus one batch.
        shrink_ms: the time over which a larger backlog is worked off, ms.
        grow_ms: the time over which a smaller backlog may grow to the accepted one, ms.
        surge_window_ms: the window of the arrival rate that a surge is assumed to keep for one SLO, ms.
        surge_slos: how many SLOs ahead the guard against surges looks.

    Raises:
        PolicyError: a constant is not finite or not > 0.
    """

    rate_window_ms: float = 400.0
    accepted_share: float = 0.7
    shrink_ms: float = 30.0
    grow_ms: float = 130.0
    surge_window_ms: float = 4.0
    surge_slos: float = 2.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise PolicyError(f"tuning.{name}: {value} must be finite and > 0")


@dataclass
class TimePrice:
    """Turns the load into a point of the hull, and margins into limits on latency.

    Attributes:
        hulls: the hulls of all subnets.
        slo_ms: the usual time from arrival to deadline, ms.
        margin: share by which latencies are assumed to be longer than profiled.
        margin_ms: further reserve before the most urgent deadline, ms.
        drain_margin_ms: reserve before the deadlines of the rest of the queue, ms.
        tuning: further constants.
        credit: time that has been saved so far, as a share of the step to the next point; at 1 the next
            point is chosen once.
    """

    hulls: HullTable
    slo_ms: float
    margin: float
    margin_ms: float
    drain_margin_ms: float
    tuning: Tuning
    credit: float = 0.0

    def others_free(self, context: Context) -> list[float]:
        """Return when each of the other workers that are up is free, ms; not before now."""
        now, asking = context.now_ms, context.worker
        return [
            max(free, now) for j, free in enumerate(context.free_at_ms) if j != asking and free < math.inf
        ]

    def time_limit(self, slack_ms: float) -> float:
        """Return the longest profiled latency, ms, that meets a deadline `slack_ms` away."""
        return (slack_ms - self.margin_ms) / (1.0 + self.margin)

    def surge_spare(self, context: Context, others: list[float], tau_ms: float) -> float:
        """Return the longest batch latency that still leaves time for a surge.

        The surge keeps the arrival rate of the last milliseconds for one SLO. The requests of the surge and
        of the queue take `tau_ms` each, not counting the batch's own k requests: for these the caller adds
        k * tau_ms.

        Args:
            context: the state of the server.
            others: when each other worker is free, ms.
            tau_ms: time per request, ms.

        Returns:
            The latency, ms; negative if there is not enough time even without a batch.
        """
        now, tuning = context.now_ms, self.tuning
        ahead = tuning.surge_slos * self.slo_ms
        expected = context.arrivals.rate_per_ms(now, tuning.surge_window_ms) * self.slo_ms
        capacity = ahead + sum([ahead - (free - now) for free in others if free - now < ahead])
        return capacity - (context.queued + expected) * tau_ms

    def pick_point(self, context: Context, workers: float, tau: Callable[[int], float]) -> int:
        """Return the point of the hull for which the load leaves time.

        If the time lies between two points, the decisions alternate between them so that the mean time per
        request is the affordable one (sigma-delta modulation).

        Args:
            context: the state of the server.
            workers: the number of workers whose time is planned.
            tau: returns the time per request, ms, of point i; it ascends with i.
        """
        tuning, hulls = self.tuning, self.hulls
        last = len(hulls.taus) - 1
        rate = context.arrivals.rate_per_ms(context.now_ms, tuning.rate_window_ms)
        if rate <= 0.0:
            return last
        points = range(last + 1)
        usual = min(bisect_left(points, workers / rate, key=tau), last)
        batch_ms = self.margin_ms + (1.0 + self.margin) * hulls.batch_ms[usual]
        accepted = rate * tuning.accepted_share * max(0.0, self.slo_ms - batch_ms)
        excess = context.queued - accepted
        load = rate + excess / (tuning.shrink_ms if excess > 0 else tuning.grow_ms)
        if load <= 0.0:
            return last
        budget = workers / load
        point = bisect_right(points, budget, key=tau) - 1
        if point < 0:
            return 0
        if point < last:
            self.credit += (budget - tau(point)) / (tau(point + 1) - tau(point))
            if self.credit >= 1.0:
                self.credit -= 1.0
                return point + 1
        return point
