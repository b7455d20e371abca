"""HullFit: the load sets a price of worker time, and the batch that is worth most at that price runs.

The method, step by step:

1. **Hull.** The time per request of a subnet is its least latency / batch size over all batch sizes. The
   points of the method are the vertices of the upper concave hull of (time per request, accuracy), from the
   cheapest to the most accurate subnet (`HullTable`).
2. **Load.** The load is the recent arrival rate, corrected by the backlog. A certain backlog is accepted; a
   larger one is worked off within `Tuning.shrink_ms`, a smaller one may grow within `Tuning.grow_ms`. The
   number of workers divided by the load is the time that may be spent per request. It selects a point of the
   hull, or alternates between two neighbours (`TimePrice.pick_point`).
3. **Price.** The slope of the hull at that point is the price of time: the percent of accuracy that one
   more ms gains elsewhere. The value of a request is what it yields at that point: its accuracy minus
   the price of its time.
4. **Gain.** A batch of k requests on a subnet gains k * (accuracy - value) - price * latency: the accuracy
   of the batch, minus what the same requests would yield at the point of the hull, minus the price of the
   time that the batch takes. The subnet and batch size with the greatest gain that passes all guards runs.
   At one batch size that subnet lies on the concave hull of (latency, accuracy), so that it is found by
   bisection over the slopes of that hull (`HullTable.best`).
5. **Guards.** A batch must pass three guards. The most urgent request meets its deadline with a safety margin
   (`TimePrice.time_limit`). The rest of the queue can still leave in time in full batches of the cheapest
   subnet (`HullFit._drain_limit`). If the batch is not on the cheapest subnet, there is also time for a
   surge, that is, for arrivals at the rate of the last few ms during one SLO (`TimePrice.surge_spare`).
6. **Rescue.** If no batch passes the guards, requests that stand in the way of a full batch are treated as
   expired (if the rule for expired requests allows this), and the cheapest subnet runs.

If some requests demand a minimum accuracy, `subnetact.serving.policies.floor_planner` applies the same steps
to every class of requests with the same floor.
"""

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
"""With more chunks than this, the drain limit is computed with arrays, which is faster."""


class HullFit:
    """Spends worker time where it yields the most accuracy, as far as all deadlines permit.

    The load sets a price of worker time. Among all pairs (subnet, batch size) the policy takes the one whose
    accuracy is worth the most beyond the price of its time, if the most urgent request, the rest of the
    queue and a surge of arrivals can still meet their deadlines. The header of the module
    `subnetact.serving.policies.hullfit` explains the method.

    Args:
        table: the latency table.
        slo_ms: the usual time from arrival to deadline, ms.
        margin: share by which latencies are assumed to be longer than profiled; 0.1 is 10 percent.
        margin_ms: further reserve before the most urgent deadline, ms.
        drain_margin_ms: reserve before the deadlines of the rest of the queue, ms.
        tuning: further constants. If None, `Tuning()`.

    Raises:
        PolicyError: an argument is out of range, or the SLO is below the fastest option.
        TableError: the accuracy of a subnet is not known.

    Example:
        `result = simulate(arrivals_ms, table, HullFit(table, slo_ms=36.0), slo_ms=36.0, workers=8)`
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
        self._time_price = TimePrice(
            HullTable(table),
            self.slo_ms,
            check_margin(margin, "margin"),
            check_margin(margin_ms, "margin_ms"),
            check_margin(drain_margin_ms, "drain_margin_ms"),
            tuning or Tuning(),
        )
        self._floor_planner = FloorPlanner(table, self._time_price)

    def retabled(self, table: LatencyTable) -> HullFit:
        """Return the same policy, with its state, for other latencies of the same subnets and batch sizes."""
        old = self._time_price
        made = HullFit(table, self.slo_ms, old.margin, old.margin_ms, old.drain_margin_ms, old.tuning)
        made._time_price.credit = old.credit
        made._floor_planner.remember(self._floor_planner)
        return made

    def reset(self) -> None:
        """Forget everything learned from earlier requests."""
        self._time_price.credit = 0.0
        self._floor_planner = FloorPlanner(self.table, self._time_price)

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size) for the idle worker; see `Policy.decide`."""
        if context.queue.demanding or self._floor_planner.active:
            return self._floor_planner.decide(context)
        time_price, now = self._time_price, context.now_ms
        hulls = time_price.hulls
        others = time_price.others_free(context)
        point = time_price.pick_point(context, len(others) + 1, hulls.taus.__getitem__)
        price = hulls.prices[point]
        value = hulls.values[point] - price * hulls.taus[point]
        spare = time_price.surge_spare(context, others, hulls.taus[0])
        option = self._best_offer(context, others, price, value, spare)
        if option is not None:
            return option.subnet, option.batch_size
        if context.may_expire:
            context.expire(self._in_the_way(context, now + hulls.full_ms))
        return hulls.rescue(context.slack_ms)

    def _best_offer(
        self, context: Context, others: list[float], price: float, value: float, spare: float
    ) -> Option | None:
        """Return the option with the greatest gain that passes every guard, or None.

        Batch sizes are examined from the largest; one whose gain cannot exceed the best found so far is
        skipped.
        """
        hulls, queued = self._time_price.hulls, context.queued
        top = hulls.column_for(queued)
        counts = [size if size < queued else queued for size in hulls.sizes[: top + 1]]
        drains = {counts[top]: self._drain_limit(context, others, counts[top])}
        # A smaller batch leaves more behind, so no batch may take longer than the largest one.
        limit = min(self._time_price.time_limit(context.slack_ms), drains[counts[top]])
        if limit < hulls.fastest_ms:
            return None
        tau, most = hulls.taus[0], hulls.values[-1] - value
        # For each batch size: an upper bound on the gain until it is examined, then the gain of its offer.
        bounds = [k * most - price * least for k, least in zip(counts, hulls.least_ms, strict=False)]
        offers: dict[int, Option] = {}

        def look(column: int, within: float, surge_limit: float) -> None:
            """Find the best offer of one batch size."""
            k = counts[column]
            option = hulls.best(column, k, price, within, surge_limit)
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
        """Return the longest latency, ms, of a batch of k after which the rest still meets its deadlines.

        The rest of the queue leaves in full batches ("chunks") of the cheapest subnet, which all take the
        same time c. So worker j can start chunks at free_j + m c, for m = 0, 1, 2 and so on. Chunk i meets
        its deadline if at least i + 1 such starts lie before its latest start. If the other workers offer
        fewer, this worker must offer the missing ones, which limits the latency of its batch.
        """
        hulls, now, reserve = self._time_price.hulls, context.now_ms, self._time_price.drain_margin_ms
        rest = context.queued - k
        if rest <= 0:
            return math.inf
        full, size = hulls.full_ms, hulls.full_size
        due = context.queue.deadlines(k, size)
        chunks = len(due)
        tail_ms = hulls.drain_ms(rest - (chunks - 1) * size)
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
        """Return how many requests cannot wait for a full batch of the cheapest subnet, while one remains."""
        count, spare = 0, context.queued - self._time_price.hulls.full_size
        while count < spare and context.queue.deadline(count) < finish_ms:
            count += 1
        return count
