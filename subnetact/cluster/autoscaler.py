"""When to add and to remove replicas: accuracy gives way first, replicas second."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.planning.tuner import Tuner
from subnetact.serving.policies import make_policy
from subnetact.serving.simulation.simulator import simulate

__all__ = ["AccuracyFirst", "AccuracyFirstPolicy", "planned_rate"]

HEADROOM = 0.5
"""By how many percentage points the accuracy must exceed its floor before a replica is removed. If half of
the distance from the floor to the best subnet is less, that is enough."""
ROOM = 0.9
"""A replica is removed only if the others would then get less than this share of the rate per replica at
which a target was missed."""
REMEMBERED = 10
"""How long that rate is remembered, in units of `patience_s`."""


def planned_rate(
    table: LatencyTable, slo_ms: float, accuracy_floor: float, attainment: float, policy: str = "hullfit"
) -> float:
    """Return the highest rate, in requests per second, at which one replica keeps floor and attainment.

    The rate is found by simulation of 2000 Poisson arrivals, or those of ten SLOs if these are more, but of
    at most 20 s.

    Args:
        table: the latency table.
        slo_ms: the usual time from arrival to deadline, in ms.
        accuracy_floor: least mean accuracy of the answers, in percent.
        attainment: least share of requests that are answered in time.
        policy: name of the policy.

    Raises:
        PolicyError: one replica reaches neither at any rate.
    """
    rng = np.random.default_rng(0)

    def keeps(rate: float) -> bool:
        count = max(20, min(int(20 * rate), max(2000, int(10 * slo_ms * 1e-3 * rate))))
        arrivals = np.cumsum(rng.exponential(1e3 / rate, count))
        found = simulate(arrivals, table, make_policy(policy, table, slo_ms), slo_ms, progress=False)
        return found.attainment >= attainment and found.mean_accuracy >= accuracy_floor

    low, high = 0.0, 2e3 / float(np.nanmin(table.latency_ms / np.array(table.batch_sizes)))
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    if low <= 0.0:
        raise PolicyError(
            f"accuracy_floor: {accuracy_floor} % is not reached by one replica at any rate; give a lower one"
        )
    return low


class AccuracyFirst:
    """Decides how many replicas to run.

    While the accuracy served is above its floor and requests are in time, a growing load only costs accuracy.
    Replicas are added when either falls below its target, in the last report as well as in the mean of about
    the last `patience_s`, weighted by arrivals: at least one, and as many as the envelopes of a `Tuner` ask
    for. One late input does not count. Replicas are removed one by one, down to what the envelopes ask for,
    after both targets were kept for `patience_s`.

    The envelopes come from simulations, which know nothing of what else a replica does. So the rule remembers
    at which rate per replica a target was missed: for ten times `patience_s`, it removes no replica if the
    others would have to answer nearly this rate each.

    Args:
        table: the latency table.
        slo_ms: the usual time from arrival to deadline, in ms.
        accuracy_floor: least mean accuracy of the answers, in percent.
        attainment: least share of requests that are answered in time.
        patience_s: how long the targets must be kept before a replica is removed, in s.
        most: greatest number of replicas.
        policy: name of the policy of the replicas.
        planned_per_s: the `planned_rate` of one replica with these settings, if it is known already; its
            simulation takes seconds.

    Attributes:
        planned_per_s: the highest rate at which one replica keeps its targets, in requests per second.

    Raises:
        PolicyError: a setting is out of range.
    """

    def __init__(
        self,
        table: LatencyTable,
        slo_ms: float,
        accuracy_floor: float,
        attainment: float = 0.99,
        patience_s: float = 15.0,
        most: int = 256,
        policy: str = "hullfit",
        planned_per_s: float | None = None,
    ) -> None:
        if not 0.0 < attainment <= 1.0:
            raise PolicyError(f"attainment: {attainment} must be in (0, 1]")
        best = max(table.accuracy)
        if not accuracy_floor < best:
            raise PolicyError(f"accuracy_floor: {accuracy_floor} % must be below {best:g} %, the best subnet")
        if planned_per_s is None:
            planned_per_s = planned_rate(table, slo_ms, accuracy_floor, attainment, policy)
        self.planned_per_s = planned_per_s
        rng = np.random.default_rng(0)
        planned = np.cumsum(rng.exponential(1e3 / planned_per_s, max(2, int(60 * planned_per_s))))
        self._tuner = Tuner(planned, 1, table, slo_ms, patience_s * 1e3, most_workers=most)
        self._floor, self._attainment = accuracy_floor, attainment
        self._calm_above = accuracy_floor + min(HEADROOM, (best - accuracy_floor) / 2)
        self._fraction = 0.0
        self._asked = self._met = self._accuracy_sum = 0.0  # inputs; they fade with `patience_s`
        self._missed_per_s, self._missed_ms = float("inf"), -float("inf")
        self._rates: deque[tuple[float, float]] = deque()
        self._patience_ms, self._most = patience_s * 1e3, most
        self._kept_since_ms: float | None = None
        self._added_ms = -float("inf")
        self._last_ms: float | None = None

    def step(
        self, now_ms: float, arrivals_per_s: float, accuracy: float, attainment: float, running: int
    ) -> int:
        """Return how many replicas to run.

        Args:
            now_ms: the time by a monotonic clock, in ms.
            arrivals_per_s: arrivals per second since the last step, all replicas together.
            accuracy: mean accuracy of the answers since then, in percent.
            attainment: share of the requests since then that were answered in time.
            running: replicas that run now.
        """
        since = now_ms if self._last_ms is None else self._last_ms
        self._last_ms = now_ms
        arrived = arrivals_per_s * (now_ms - since) / 1e3
        count, self._fraction = divmod(arrived + self._fraction, 1.0)
        needed = self._tuner.step(now_ms, np.linspace(since, now_ms, int(count), endpoint=False).tolist())
        self._rates.append((now_ms, arrivals_per_s))
        while self._rates[0][0] < now_ms - self._patience_ms:
            self._rates.popleft()
        recent_per_s = max(rate for _, rate in self._rates)
        if self._misses(math.exp((since - now_ms) / self._patience_ms), arrived, accuracy, attainment):
            self._kept_since_ms = None
            if now_ms - self._added_ms < self._patience_ms and needed <= running:
                return running  # those that were added last are not all at work yet
            self._added_ms = now_ms
            # What is late now may have arrived before the load fell.
            self._missed_per_s = min(self._limit_per_s(now_ms), recent_per_s / running)
            self._missed_ms = now_ms
            return min(self._most, max(running + 1, needed))
        if self._kept_since_ms is None:
            self._kept_since_ms = now_ms
        if (
            needed < running
            and accuracy >= self._calm_above
            and now_ms - self._kept_since_ms >= self._patience_ms
            and recent_per_s < ROOM * self._limit_per_s(now_ms) * (running - 1)
        ):
            self._kept_since_ms = now_ms
            return max(1, needed, running - 1)
        return running

    def _misses(self, fading: float, arrived: float, accuracy: float, attainment: float) -> bool:
        """Return whether a target is missed now and was missed lately."""
        self._asked = fading * self._asked + arrived
        self._met = fading * self._met + arrived * attainment
        self._accuracy_sum = fading * self._accuracy_sum + arrived * attainment * accuracy
        if accuracy < self._floor and self._accuracy_sum < self._floor * self._met:
            return True
        allowed = max(1.0, (1.0 - self._attainment) * self._asked)
        return attainment < self._attainment and self._asked - self._met > allowed

    def _limit_per_s(self, now_ms: float) -> float:
        """Return the rate per replica at which a target was missed, as long as that is remembered."""
        forgotten = now_ms - self._missed_ms > REMEMBERED * self._patience_ms
        return float("inf") if forgotten else self._missed_per_s


class AccuracyFirstPolicy:
    """`AccuracyFirst` as Ray calls it, with the figures of `EngineReplica.record_autoscaling_stats`.

    Args:
        table: the latency table as `LatencyTable.to_json` returns it.
        settings: further arguments of `AccuracyFirst`.
    """

    def __init__(self, table: dict[str, Any], **settings: Any) -> None:
        self._rule = AccuracyFirst(LatencyTable.from_json(table), **settings)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return how many replicas to run, and no state.

        Args:
            context: Ray's `AutoscalingContext`.
        """
        figures: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        arrivals = figures.get("arrivals_per_s") or {}
        running = context.target_num_replicas
        total = sum(arrivals.values())
        if not arrivals:
            return running, {}
        weights = {key: rate / total if total else 1.0 / len(arrivals) for key, rate in arrivals.items()}

        def mean(name: str) -> float:
            values = figures.get(name) or {}
            return sum(weights.get(key, 0.0) * value for key, value in values.items())

        now_ms = time.monotonic() * 1e3
        return self._rule.step(now_ms, total, mean("accuracy"), mean("attainment"), running), {}
