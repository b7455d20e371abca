"""What HullFit may spend: the point of the hull that the load affords, and guards on latency."""

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
    """Constants of HullFit, all > 0; the defaults serve every load of the reference suite.

    Attributes:
        rate_window_ms: window of the arrival rate.
        accepted_share: backlog that is accepted, as a share of what one SLO could hold.
        shrink_ms: a backlog above that is worked off over this time.
        grow_ms: one below it may build up over this time.
        surge_window_ms: window of the rate that a surge is assumed to keep for one SLO.
        surge_slos: how many SLOs the guard against surges looks ahead.
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
    """From the load to a point of the hull; margins and guards of HullFit in one place."""

    market: HullTable
    slo_ms: float
    margin: float
    margin_ms: float
    drain_margin_ms: float
    tuning: Tuning
    credit: float = 0.0

    def others_free(self, context: Context) -> list[float]:
        """When each other worker that is up is free, not before now."""
        now, asking = context.now_ms, context.worker
        return [
            max(free, now) for j, free in enumerate(context.free_at_ms) if j != asking and free < math.inf
        ]

    def time_limit(self, slack_ms: float) -> float:
        """The longest profiled latency that meets a deadline `slack_ms` away."""
        return (slack_ms - self.margin_ms) / (1.0 + self.margin)

    def surge_spare(self, context: Context, others: list[float], tau_ms: float) -> float:
        """Latency a batch may have so that a surge can be absorbed at `tau_ms` a request, its own k aside."""
        now, tuning = context.now_ms, self.tuning
        ahead = tuning.surge_slos * self.slo_ms
        expected = context.arrivals.rate_per_ms(now, tuning.surge_window_ms) * self.slo_ms
        capacity = ahead + sum([ahead - (free - now) for free in others if free - now < ahead])
        return capacity - (context.queued + expected) * tau_ms

    def pick_point(self, context: Context, workers: float, tau: Callable[[int], float]) -> int:
        """The point of the hull that the load leaves time for; neighbours alternate by sigma-delta.

        Args:
            context: the decision.
            workers: that are up.
            tau: time per request of point i, ascending in i.
        """
        tuning, market = self.tuning, self.market
        last = len(market.taus) - 1
        rate = context.arrivals.rate_per_ms(context.now_ms, tuning.rate_window_ms)
        if rate <= 0.0:
            return last
        points = range(last + 1)
        usual = min(bisect_left(points, workers / rate, key=tau), last)
        batch_ms = self.margin_ms + (1.0 + self.margin) * market.batch_ms[usual]
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
