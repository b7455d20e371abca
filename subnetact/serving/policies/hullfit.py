"""HullFit: a price of worker time from the load, and the batch that is worth most at that price."""

from __future__ import annotations

import math

import numpy as np

from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.floor_planner import FloorPlanner
from subnetact.serving.policies.hull_table import HullTable
from subnetact.serving.policies.time_price import TimePrice, Tuning
from subnetact.serving.scheduling.checks import check_margin, check_slo
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.frontier import Option

__all__ = ["HullFit", "Tuning"]

_MANY_CHUNKS = 10


class HullFit:
    """Buy accuracy with worker time where it is worth most, and never beyond what deadlines allow.

    The load (recent rate, and backlog against the backlog that one SLO can hold) gives the time that may be
    spent per request. On the hull of (time per request, accuracy) that time gives a price of time and the
    value of a served request; between two neighbours of the hull the decisions alternate. Among all
    (subnet, batch size) the policy takes the one whose accuracy is worth most beyond its time, if

    * the batch meets the most urgent deadline with a safety margin,
    * the rest of the queue can still be drained by the cheapest subnet in time, and
    * (for all but the cheapest subnet) a surge at the rate of the last milliseconds could be absorbed.

    When nothing passes, it gives up requests that stand in the way of a full batch (where the queue's
    hopeless rule allows it) and serves the cheapest subnet. Requests with accuracy floors are planned
    per class; see `subnetact.serving.policies.floor_planner`.

    Args:
        table: the profile.
        slo_ms: the usual time a request is given.
        margin: share by which every latency is assumed longer than profiled.
        margin_ms: further reserve before the most urgent deadline, ms.
        drain_margin_ms: reserve before the deadlines of the rest of the queue, ms.
        tuning: further constants.

    Raises:
        PolicyError: an argument out of range, or an SLO below the fastest option.
    """

    def __init__(
        self,
        table: LatencyTable,
        slo_ms: float,
        margin: float = 0.1,
        margin_ms: float = 0.5,
        drain_margin_ms: float = 2.0,
        tuning: Tuning | None = None,
    ) -> None:
        self.table = table
        self.slo_ms = check_slo(slo_ms, table)
        self.pricing = TimePrice(
            HullTable(table),
            self.slo_ms,
            check_margin(margin, "margin"),
            check_margin(margin_ms, "margin_ms"),
            check_margin(drain_margin_ms, "drain_margin_ms"),
            tuning or Tuning(),
        )
        self._floors = FloorPlanner(table, self.pricing)

    def retabled(self, table: LatencyTable) -> HullFit:
        """The same policy for other latencies of the same subnets and batch sizes."""
        old = self.pricing
        made = HullFit(table, self.slo_ms, old.margin, old.margin_ms, old.drain_margin_ms, old.tuning)
        made.pricing.credit = old.credit
        made._floors.remember(self._floors)
        return made

    def reset(self) -> None:
        """Forget everything learned from earlier requests."""
        self.pricing.credit = 0.0
        self._floors = FloorPlanner(self.table, self.pricing)

    def decide(self, context: Context) -> tuple[int, int]:
        """Answer (subnet, batch size)."""
        if context.queue.demanding or self._floors.active:
            return self._floors.decide(context)
        pricing, now = self.pricing, context.now_ms
        market = pricing.market
        others = pricing.others_free(context)
        point = pricing.pick_point(context, len(others) + 1, market.taus.__getitem__)
        price = market.prices[point]
        value = market.values[point] - price * market.taus[point]
        spare = pricing.surge_spare(context, others, market.taus[0])
        option = self._best_offer(context, others, price, value, spare)
        if option is not None:
            return option.subnet, option.batch_size
        if context.may_expire:
            context.expire(self._in_the_way(context, now + market.full_ms))
        return market.rescue(context.slack_ms)

    def _best_offer(
        self, context: Context, others: list[float], price: float, value: float, spare: float
    ) -> Option | None:
        """The option of greatest gain, k * (accuracy - value) - price * latency, that passes every guard.

        Batch sizes are looked at from the largest; one whose gain cannot exceed the best found is skipped.
        """
        market, queued = self.pricing.market, context.queued
        top = market.column_for(queued)
        counts = [size if size < queued else queued for size in market.sizes[: top + 1]]
        drains = {counts[top]: self._drain_limit(context, others, counts[top])}
        # A smaller batch leaves more behind, so no batch may take longer than the largest one.
        limit = min(self.pricing.time_limit(context.slack_ms), drains[counts[top]])
        if limit < market.fastest_ms:
            return None
        tau, most = market.taus[0], market.values[-1] - value
        bounds = [k * most - price * least for k, least in zip(counts, market.least_ms, strict=False)]
        offers: dict[int, Option] = {}

        def look(column: int, within: float, luxury: float) -> None:
            k = counts[column]
            option = market.best(column, k, price, within, luxury)
            if option is None:
                bounds[column] = -math.inf
                offers.pop(column, None)
            else:
                bounds[column] = k * (option.accuracy - value) - price * option.latency_ms
                offers[column] = option

        while True:
            best, at = -math.inf, -1
            for column in range(top, -1, -1):
                if bounds[column] > best:
                    if column not in offers:
                        look(column, limit, spare + counts[column] * tau)
                    if bounds[column] > best:
                        best, at = bounds[column], column
            if at < 0:
                return None
            k, option = counts[at], offers[at]
            if k not in drains:
                drains[k] = self._drain_limit(context, others, k)
            allowed = min(limit, drains[k])
            if option.latency_ms <= allowed:
                return option
            look(at, allowed, min(spare + k * tau, allowed))

    def _drain_limit(self, context: Context, others: list[float], k: int) -> float:
        """The longest latency of a batch of k after which the rest of the queue still drains in time.

        The rest leaves in full batches of the cheapest subnet, all of one length c, so worker j offers
        starts at free_j + m c. Chunk i has a seat if enough of them lie before its latest start; otherwise
        this worker must offer the missing ones.
        """
        market, now, reserve = self.pricing.market, context.now_ms, self.pricing.drain_margin_ms
        rest = context.queued - k
        if rest <= 0:
            return math.inf
        full, size = market.full_ms, market.full_size
        due = context.queue.deadlines(k, size)
        chunks = len(due)
        tail_ms = market.drain_ms(rest - (chunks - 1) * size)
        limit = math.inf
        if chunks > _MANY_CHUNKS:
            latest = np.array(due)
            latest -= reserve + full
            latest[-1] += full - tail_ms
            seats = np.subtract.outer(latest, others)
            seats /= full
            seats += 1.0
            np.floor(seats, out=seats)
            np.maximum(seats, 0.0, out=seats)
            missing = np.arange(1.0, chunks + 1.0)
            missing -= np.add.reduce(seats, axis=1)
            short = missing > 0.0
            if not short.any():
                return math.inf
            return float((latest[short] - (now - full) - missing[short] * full).min())
        for i, deadline in enumerate(due):
            latest_start = deadline - reserve - (full if i < chunks - 1 else tail_ms)
            lacking = i + 1
            for free in others:
                if latest_start >= free:
                    lacking -= int((latest_start - free) / full) + 1
            if lacking > 0:
                limit = min(limit, latest_start - now - (lacking - 1) * full)
        return limit

    def _in_the_way(self, context: Context, finish_ms: float) -> int:
        """How many heads cannot wait for a full batch of the cheapest subnet, while a full one remains."""
        count, spare = 0, context.queued - self.pricing.market.full_size
        while count < spare and context.queue.deadline(count) < finish_ms:
            count += 1
        return count
