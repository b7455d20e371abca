"""How much worker time HullFit may spend per request: the load, the accepted backlog, and limits on latency.

The header of `subnetact.serving.policies.hullfit` explains the method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real

from subnetact.errors import PolicyError
from subnetact.serving.scheduling.context import Context

__all__ = ["TimeBudget", "Tuning"]

_USUAL_ARRIVALS = 4.0
"""How many arrivals at the usual rate are counted with those of the surge window, which may hold few."""
_DEVIATIONS = 2.0
"""The fluctuation of the load is this many standard deviations of the arrivals during one SLO."""
_SAMPLES = 20
"""The fluctuation is averaged over about this many counts of arrivals, each over one SLO or more."""


@dataclass(frozen=True)
class Tuning:
    """Constants of HullFit, all > 0. Times are shares of the SLO, so that one choice suits every table.

    Attributes:
        rate_window: the window over which the arrival rate is measured.
        accepted_share: the backlog behind which a batch is possible, as a share of the requests that arrive
            during one SLO minus this batch.
        settle: the time over which the backlog is brought to the accepted one.
        surge_window: the window of the arrival rate that a surge is assumed to keep for one SLO.
        surge_ahead: how far ahead the guard against surges looks.
        bank: the most time that can be saved for later batches, unless one batch needs more.

    Raises:
        PolicyError: a constant is not finite or not > 0.
    """

    rate_window: float = 11.0
    accepted_share: float = 0.7
    settle: float = 0.83
    surge_window: float = 0.11
    surge_ahead: float = 2.0
    bank: float = 0.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, Real) or not 0 < float(value) < math.inf:
                raise PolicyError(f"tuning.{name}: {value!r} must be finite and > 0")


@dataclass
class TimeBudget:
    """Turns the load into the time that may be spent per request, and margins into limits on latency.

    Attributes:
        slo_ms: the usual time from arrival to deadline, ms.
        margin: share by which latencies are assumed to be longer than profiled.
        reserve_ms: further reserve before the most urgent deadline, ms.
        drain_reserve_ms: reserve before the deadlines of the rest of the queue, ms.
        tuning: further constants.
        saved_ms: time that earlier batches left unspent, ms.
    """

    slo_ms: float
    margin: float
    reserve_ms: float
    drain_reserve_ms: float
    tuning: Tuning
    saved_ms: float = 0.0
    _dispersion: float = field(default=1.0, init=False)
    _samples: int = field(default=1, init=False)
    _counted: tuple[float, int] | None = field(default=None, init=False)

    def remember(self, other: TimeBudget) -> None:
        """Continue with the saved time and the fluctuation of the load that another budget has learned."""
        self.saved_ms, self._counted = other.saved_ms, other._counted
        self._dispersion, self._samples = other._dispersion, other._samples

    def others_free(self, context: Context) -> list[float]:
        """Return when each of the other workers that are up is free, ms; not before now."""
        now, asking = context.now_ms, context.worker
        return [
            max(free, now) for j, free in enumerate(context.free_at_ms) if j != asking and free < math.inf
        ]

    def time_limit(self, slack_ms: float) -> float:
        """Return the longest profiled latency, ms, that meets a deadline `slack_ms` away."""
        return (slack_ms - self.reserve_ms) / (1.0 + self.margin)

    def rate_per_ms(self, context: Context) -> float:
        """Return the recent arrival rate, per ms."""
        return context.arrivals.rate_per_ms(context.now_ms, self.tuning.rate_window * self.slo_ms)

    def fluctuation(self, context: Context, rate: float) -> float:
        """Return by which share the arrivals during one SLO may exceed their mean: two standard deviations.

        Arrivals are counted from decision to decision, over one SLO or more. The squared difference from the
        expected number, as a multiple of that number, is averaged. It is about 1 for Poisson arrivals, with
        which the average starts, and more for bursty ones. The rate is measured over the same arrivals, so
        the result is too low at first.

        Args:
            context: the state of the server.
            rate: the usual arrival rate, per ms.

        Returns:
            The share; inf if the rate is 0.
        """
        now, total = context.now_ms, context.arrivals.total
        since, counted = self._counted or (now, total)
        passed = now - since
        if self._counted is None or not 0.0 <= passed < self.slo_ms:
            self._counted = now, total
            expected = rate * passed
            if expected > 0.0 and passed <= self.tuning.rate_window * self.slo_ms:
                sample = (total - counted - expected) ** 2 / expected
                self._samples = min(self._samples + 1, _SAMPLES)
                self._dispersion += (sample - self._dispersion) / self._samples
        return _DEVIATIONS * math.sqrt(self._dispersion / (rate * self.slo_ms)) if rate > 0.0 else math.inf

    def per_request_ms(
        self,
        queued: int,
        workers: float,
        rate: float,
        usual_ms: tuple[float, float],
        fluctuation: float = math.inf,
    ) -> float:
        """Return the worker time, ms, that may be spent per request.

        It is the number of workers divided by the load. The load is the arrival rate, corrected by the
        backlog: a larger backlog than the accepted one is to be worked off, a smaller one may grow. The most
        urgent request is about to be served and does not count. A backlog evens out the fluctuations of the
        load, but efficient batches need slack, which limits the backlog.

        Args:
            queued: number of requests in the queue.
            workers: the number of workers whose time is planned.
            rate: arrivals per ms.
            usual_ms: latencies of two batches, ascending. The first one must be possible behind the accepted
                backlog; the second one too, unless the fluctuations ask for a larger backlog.
            fluctuation: by which share the arrivals during one SLO may exceed their mean. If inf, the first
                batch alone limits the backlog.
        """
        most, least = self._behind(rate, usual_ms[0]), self._behind(rate, usual_ms[1])
        accepted = min(most, max(least, fluctuation * rate * self.slo_ms)) if rate > 0.0 else 0.0
        load = rate + (queued - 1 - accepted) / (self.tuning.settle * self.slo_ms)
        return workers / load if load > 0.0 else math.inf

    def _behind(self, rate: float, batch_ms: float) -> float:
        """Return the backlog behind which a batch that takes `batch_ms` is possible."""
        longest = (1.0 + self.margin) * batch_ms + self.reserve_ms
        return rate * self.tuning.accepted_share * max(0.0, self.slo_ms - longest)

    def surge_spare(self, context: Context, others: list[float], tau_ms: float, rate: float) -> float:
        """Return the longest batch latency that still leaves time for a surge.

        The surge keeps the arrival rate of the last moments for one SLO. The requests of the surge and of
        the queue take `tau_ms` each, not counting the batch's own k requests: for these the caller adds
        k * tau_ms.

        Args:
            context: the state of the server.
            others: when each other worker is free, ms.
            tau_ms: time per request, ms.
            rate: the usual arrival rate, per ms.

        Returns:
            The latency, ms; negative if there is not enough time even without a batch.
        """
        now, tuning = context.now_ms, self.tuning
        ahead = tuning.surge_ahead * self.slo_ms
        window = tuning.surge_window * self.slo_ms
        expected = 0.0
        if rate > 0.0:
            recent = context.arrivals.count(now - window, now)
            expected = (recent + _USUAL_ARRIVALS) / (window + _USUAL_ARRIVALS / rate) * self.slo_ms
        capacity = ahead + sum([ahead - (free - now) for free in others if free - now < ahead])
        return capacity - (context.queued + expected) * tau_ms

    def most_saved_ms(self, step_ms: float) -> float:
        """Return the most time that can be saved, ms.

        Args:
            step_ms: the time that one batch on each worker may need.
        """
        return max(self.tuning.bank * self.slo_ms, step_ms)

    def save(self, unspent_ms: float, most_saved_ms: float) -> None:
        """Book a batch: time that it left unspent is saved for later ones, time that it took more is used up.

        Args:
            unspent_ms: the time that it left; negative if it took more than its share.
            most_saved_ms: the most time that can be saved; see `most_saved_ms`.
        """
        self.saved_ms = min(max(0.0, self.saved_ms + unspent_ms), most_saved_ms)
