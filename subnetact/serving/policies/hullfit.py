"""HullFit: the load sets the time that a batch may take, and a price only where time is short.

The method, step by step:

1. **Hull.** The time per request of a subnet is its least latency / batch size over the batch sizes that the
   workers can run all the time without missing deadlines. The points of the method are the vertices of the
   upper concave hull of (time per request, accuracy), from the cheapest to the most accurate subnet
   (`HullTable`).
2. **Load.** The load is the recent arrival rate, corrected by the backlog. A certain backlog is accepted;
   it grows or is worked off within about one SLO. It evens out the fluctuations of the load
   (`TimeBudget.fluctuation`), as far as batches that are almost efficient still meet their deadlines behind
   it. If the load hardly fluctuates, the backlog is as large as efficient batches permit
   (`HullTable.usual_ms`). The number of workers divided by the load is the time that may be spent per request
   (`TimeBudget.per_request_ms`).
3. **Time of a batch.** The most accurate subnet that the workers sustain at this time per request has a
   cycle: the latency of the smallest batch that keeps up with the arrivals. A batch of the whole queue may
   take as long as this cycle, because a larger batch afterwards makes up for it. A batch that leaves requests
   behind may take the time per request times its number of requests. Time that a batch leaves unspent is
   saved for later ones (`TimeBudget.save`), so that neighbouring subnets alternate. A batch that leaves
   requests behind spends saved time only if it is as large as the batches of the cycle: a smaller one would
   use up the slack of the requests behind it, which then run on cheap subnets.
4. **Price.** If the time per request is enough for the most accurate subnet, time costs nothing: at every
   batch size, the most accurate subnet that is allowed is best. Only the comparison of batch sizes has a
   small price then, so that a larger batch loses accuracy only if it takes less time per request. Otherwise
   the price of time is the slope of the hull at this point: the percent of accuracy that one more ms gains
   elsewhere. While the queue is short, it falls towards the next slope as saved time piles up unspent. Only
   what a batch takes beyond the cycle has a price. There is one exception: if a batch leaves
   requests behind, the most accurate subnet that is sustained lies below the hull, and the next point of the
   hull can run in time, then all time that can still be saved has its price. So this point and the next one
   take turns, however far apart they are. The
   value of a request is what it yields at that point of the hull: its accuracy minus the price of its time.
   If the load exceeds what the cheapest subnet sustains, a request has no value, because another one must be
   dropped for it, and all time has a price. The same rule holds while requests expire because of the time
   spent on accuracy, as far as this costs more than the accuracy gains (`Balance`).
5. **Gain.** A batch of k requests on a subnet gains k * (accuracy - value) - price * latency. The subnet and
   batch size with the greatest gain that passes all guards runs. If every gain is negative, because the
   deadlines permit only inefficient batches, the greatest gain per request wins. At one batch size the best
   subnet lies on the concave hull of (latency, accuracy), so that bisection finds it (`PricedFronts.best`).
6. **Guards.** A batch must pass three guards. The most urgent request meets its deadline with a safety margin
   (`TimeBudget.time_limit`). The rest of the queue can still leave in time in full batches of the cheapest
   subnet, or in quick batches (`HullFit._drain_limit`). If the batch is not on the cheapest subnet, there is
   also time for a surge, that is, for arrivals at the rate of the last moments during one SLO
   (`TimeBudget.surge_spare`).
7. **Rescue.** If no batch passes the guards, the batch that answers the most requests per ms within the slack
   runs. If even this pace would need more than one SLO for the queue, requests that stand in the way
   of a full batch are treated as expired first, if the rule for expired requests allows it.

All constants are shares of the SLO or of a latency, so that the method does not depend on the unit of time.
If some requests demand a minimum accuracy, `subnetact.serving.policies.floor_planner` applies the same steps
to every class of requests with the same floor.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.balance import Balance
from subnetact.serving.policies.floor_planner import FloorPlanner
from subnetact.serving.policies.hull_table import Chunk, HullTable, PricedFronts
from subnetact.serving.policies.recent import Recent
from subnetact.serving.policies.time_budget import TimeBudget, Tuning
from subnetact.serving.scheduling.checks import check_margin, check_slo
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.frontier import Option

__all__ = ["HullFit", "Tuning"]

_MANY_CHUNKS = 10
"""With more chunks than this, the drain limit is computed with arrays, which is faster."""
_SHORT = 4
"""A queue of at most this many full batches is short: time that is saved then is not needed to shorten it."""
_KEPT_HULLS = 8
"""What is planned for one number of workers is kept for so many such numbers."""
_FREE = 0.1
"""If there is time for the most accurate subnet, batch sizes are compared as if the time per request of this
subnet cost this share of the range of accuracies."""


class _Terms(NamedTuple):
    """The terms on which a decision compares batches.

    Attributes:
        tau_ms: the time that may be spent per request; inf in overload.
        cycle_ms: the time that a batch of the whole queue may take.
        large: the size from which on a batch that leaves requests behind may spend saved time.
        most_saved_ms: the most time that can be saved.
        price: price of time, percent per ms, for choosing the subnet.
        charge: price of time, percent per ms, for comparing batch sizes.
        value: the value of a request, percent.
        saves: whether all time that can still be saved has its price, if a batch leaves requests behind.
    """

    tau_ms: float
    cycle_ms: float
    large: int
    most_saved_ms: float
    price: float
    charge: float
    value: float
    saves: bool


class HullFit:
    """Spends worker time where it yields the most accuracy, as far as all deadlines permit.

    The load sets how long a batch may take, and a price of worker time if time is short. Among all pairs
    (subnet, batch size) the policy takes the one whose accuracy is worth the most, if the most urgent
    request, the rest of the queue and a surge of arrivals can still meet their deadlines. The header of the
    module `subnetact.serving.policies.hullfit` explains the method.

    Args:
        table: the latency table.
        slo_ms: the usual time from arrival to deadline, ms.
        margin: share by which latencies are assumed to be longer than profiled; 0.1 is 10 percent.
        reserve: further reserve before the most urgent deadline, as a share of the SLO.
        drain_reserve: reserve before the deadlines of the rest of the queue, as a share of the SLO.
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
        reserve: float = 0.014,
        drain_reserve: float = 0.056,
        tuning: Tuning | None = None,
    ) -> None:
        self.table = table
        self.slo_ms = check_slo(slo_ms, table)
        self.margin = check_margin(margin, "margin")
        self.reserve = check_margin(reserve, "reserve")
        self.drain_reserve = check_margin(drain_reserve, "drain_reserve")
        if max(self.reserve, self.drain_reserve) >= 1.0:
            raise PolicyError(
                f"reserve, drain_reserve: {reserve} and {drain_reserve} are shares of the SLO and must be "
                f"below 1; 1 ms is {1.0 / self.slo_ms:g} of this SLO"
            )
        if tuning is not None and not isinstance(tuning, Tuning):
            raise PolicyError(
                f"tuning: expected a Tuning, got {type(tuning).__name__}; write Tuning(bank=0.2)"
            )
        self._budget = TimeBudget(
            self.slo_ms, self.margin, reserve * self.slo_ms, drain_reserve * self.slo_ms, tuning or Tuning()
        )
        self._fronts = PricedFronts(table)
        self._hull = Recent(self._make_hull, _KEPT_HULLS)
        self._workers = 0
        self._free = _FREE * (max(table.accuracy) - min(table.accuracy))
        self._floor_planner = FloorPlanner(table, self._fronts, self._budget)
        self._balance = Balance(self.slo_ms)

    def retabled(self, table: LatencyTable) -> HullFit:
        """Return the same policy, with its state, for other latencies of the same subnets and batch sizes.

        Another thread may call `decide` meanwhile: nothing is iterated here that a decision changes.
        """
        made = HullFit(table, self.slo_ms, self.margin, self.reserve, self.drain_reserve, self._budget.tuning)
        made._budget.remember(self._budget)
        made._balance = self._balance
        made._workers = self._workers
        if made._workers:  # made here rather than at the next decision, which is urgent
            made._hull(made._workers)
        made._floor_planner.remember(self._floor_planner)
        return made

    def reset(self) -> None:
        """Forget everything learned from earlier requests."""
        self._budget = replace(self._budget, saved_ms=0.0)
        self._floor_planner = FloorPlanner(self.table, self._fronts, self._budget)
        self._balance = Balance(self.slo_ms)

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size) for the idle worker; see `Policy.decide`."""
        if context.queue.demanding or self._floor_planner.active:
            return self._floor_planner.decide(context)
        budget = self._budget
        others = budget.others_free(context)
        self._workers = workers = len(others) + 1
        hull = self._hull(workers)
        rate = budget.rate_per_ms(context)
        usual_ms = hull.usual_ms(workers / rate if rate > 0.0 else math.inf)
        fluctuation = budget.fluctuation(context, rate)
        tau_ms = budget.per_request_ms(context.queued, workers, rate, usual_ms, fluctuation)
        large, cycle_ms = hull.cycle(tau_ms)
        point = bisect_right(hull.taus, tau_ms) - 1
        last, wanted = len(hull.slopes), hull.values[max(point, 0)]
        above = min(point + 1, last)
        most_saved_ms = budget.most_saved_ms((workers if point < last else 1) * hull.batch_ms[above])
        # In overload a margin would only drop requests that might be met.
        limit_ms, saves = context.slack_ms, False
        losing = self._balance.losing(context, hull.taus[0], hull.values[0], hull.full.size)
        if losing or point < 0 or rate * hull.taus[0] > workers:
            # Overload: every request that is served replaces another one.
            point, tau_ms, cycle_ms, large = -1, math.inf, 0.0, 0
            price = charge = hull.values[0] / hull.taus[0]
            value = 0.0
        else:
            limit_ms = budget.time_limit(limit_ms)
            if point < last:
                price = hull.slopes[point]
                if context.queued <= _SHORT * hull.full.size:
                    # Time piles up unspent, which is worth less.
                    full = min(1.0, budget.saved_ms / most_saved_ms)
                    price -= (price - (hull.slopes[above] if above < last else 0.0)) * full * full
                charge, value = price, hull.values[point] - price * hull.taus[point]
                saves = price > 0.0 and hull.below(tau_ms) and hull.batch_ms[above] <= limit_ms
            else:
                price, charge, value = 0.0, self._free / hull.taus[last], hull.values[last] - self._free
        terms = _Terms(tau_ms, cycle_ms, large, most_saved_ms, price, charge, value, saves)
        found = self._best_offer(context, others, hull, rate, limit_ms, terms)
        if found is None:
            return self._rescue(context, hull, workers)
        k, option = found
        if k < context.queued:
            free_ms, least_ms = 0.0, k * hull.taus[0]
        else:
            free_ms, least_ms = cycle_ms, hull.fastest[self._fronts.column_for(k)][0]
        if tau_ms < math.inf:
            budget.save(max(free_ms, tau_ms * k) - option.latency_ms, most_saved_ms)
        gained = k * (option.accuracy - hull.values[0])
        self._balance.book(
            option.latency_ms - least_ms, gained, k * (wanted - option.accuracy) if point < 0 else 0.0
        )
        return option.subnet, option.batch_size

    def _make_hull(self, workers: int) -> HullTable:
        return HullTable(self.table, self._fronts, workers, self._budget)

    def _best_offer(
        self,
        context: Context,
        others: list[float],
        hull: HullTable,
        rate: float,
        limit_ms: float,
        terms: _Terms,
    ) -> tuple[int, Option] | None:
        """Return (number of requests, option) with the greatest gain that passes every guard, or None."""
        budget, fronts, queued = self._budget, self._fronts, context.queued
        tau_ms, cycle_ms, large, most_saved_ms, price, charge, value, saves = terms
        saved_ms = budget.saved_ms
        top = fronts.column_for(queued)
        counts = [size if size < queued else queued for size in fronts.sizes[: top + 1]]
        drains = {counts[top]: self._drain_limit(context, others, counts[top], hull)}
        # A smaller batch leaves more behind, so no batch may take longer than the largest one.
        limit = min(limit_ms, drains[counts[top]])
        spare = budget.surge_spare(context, others, hull.taus[0], rate)
        # For each batch size: the gain per request and the offer; (-inf, None) if no subnet is fast enough.
        offers: list[tuple[float, Option | None]] = []

        def look(column: int, limit: float) -> tuple[float, Option | None]:
            """Find the best offer of one batch size."""
            k = counts[column]
            allowed_ms = tau_ms * k + (saved_ms if k >= large else 0.0)
            if k == queued:  # A larger batch afterwards makes up for its time.
                free_ms, allowed_ms = cycle_ms, max(cycle_ms, tau_ms * k) + saved_ms
            elif saves:  # Only time that can no longer be saved is free.
                free_ms = min(cycle_ms, max(0.0, saved_ms + tau_ms * k - most_saved_ms))
            else:
                free_ms = min(cycle_ms, tau_ms * k)
            spend = saves and k < queued and free_ms == 0.0
            within = min(limit, allowed_ms, spare + k * hull.taus[0])
            option = fronts.best(column, k, price, within, free_ms, spend)
            if option is None:  # the cheapest subnet need not leave time for a surge
                latency_ms = hull.full.by_column[column]
                if latency_ms > limit:
                    return -math.inf, None
                option = Option(latency_ms, hull.values[0], hull.cheapest, fronts.sizes[column])
            return option.accuracy - value - charge * max(option.latency_ms, free_ms) / k, option

        offers = [look(column, limit) for column in range(top + 1)]
        while True:
            best, at, most = -math.inf, -1, max(offers, key=_gain)[0]
            for column in range(top, -1, -1):
                gain, option = offers[column]
                if option is not None:
                    total = gain * counts[column] if most > 0.0 else gain
                    if total > best:
                        best, at = total, column
            chosen = offers[at][1]
            if at < 0 or chosen is None:
                return None
            k = counts[at]
            if k not in drains:
                drains[k] = self._drain_limit(context, others, k, hull)
            allowed = min(limit, drains[k])
            if chosen.latency_ms <= allowed:
                return k, chosen
            offers[at] = look(at, allowed)

    def _drain_limit(self, context: Context, others: list[float], k: int, hull: HullTable) -> float:
        """Return the longest latency, ms, of a batch of k after which the rest still meets its deadlines."""
        if context.queued <= k:
            return math.inf
        limit = self._chunks_limit(context, others, k, hull.full)
        if limit < math.inf and hull.quick.ms < hull.full.ms:
            limit = max(limit, self._chunks_limit(context, others, k, hull.quick))
        return limit

    def _chunks_limit(self, context: Context, others: list[float], k: int, chunk: Chunk) -> float:
        """Return the longest latency, ms, of a batch of k after which the rest can leave in chunks.

        All chunks take the same time c. So worker j can start chunks at free_j + m c, for m = 0, 1, 2 and so
        on. Chunk i meets its deadline if at least i + 1 such starts lie before its latest start. If the other
        workers offer fewer, this worker must offer the missing ones, which limits the latency of its batch.
        """
        now, reserve = context.now_ms, self._budget.drain_reserve_ms
        full, size = chunk.ms, chunk.size
        due = context.queue.deadlines(k, size)
        chunks = len(due)
        rest = context.queued - k - (chunks - 1) * size
        tail_ms = min(chunk.by_column[self._fronts.pad[rest]], full)
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

    def _rescue(self, context: Context, hull: HullTable, workers: int) -> tuple[int, int]:
        """Return what runs if no option passes the guards."""
        full = hull.full
        pace, answer = self._fastest_pace(context, hull)
        hurried = context.queued > full.size and pace * full.ms < full.size
        if context.may_expire and hurried and context.queued > pace * workers * self.slo_ms:
            count, spare = 0, context.queued - full.size
            while count < spare and context.queue.deadline(count) < context.now_ms + full.ms:
                count += 1
            context.expire(count)
            _, answer = self._fastest_pace(context, hull)
        return answer or (hull.cheapest, full.size)

    def _fastest_pace(self, context: Context, hull: HullTable) -> tuple[float, tuple[int, int] | None]:
        """Return (requests per ms, answer) of the batch that answers the most requests per ms in time."""
        pace, answer = 0.0, None
        for column in range(self._fronts.column_for(context.queued) + 1):
            latency_ms, subnet = hull.fastest[column]
            size = self._fronts.sizes[column]
            if latency_ms <= context.slack_ms and min(size, context.queued) > pace * latency_ms:
                pace, answer = min(size, context.queued) / latency_ms, (subnet, size)
        return pace, answer


def _gain(offer: tuple[float, Option | None]) -> float:
    return offer[0]
