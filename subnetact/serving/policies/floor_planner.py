"""HullFit for queues in which some requests demand a minimum accuracy.

All requests with the same floor form a class. The header of `subnetact.serving.policies.hullfit` explains the
method for one class.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import inf, sqrt

from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.hull_table import HullTable, PricedFronts
from subnetact.serving.policies.time_budget import TimeBudget
from subnetact.serving.scheduling.checks import unreachable
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.frontier import Option

__all__ = ["FloorPlanner"]

_FORGET = 0.02
"""Weight of the present queue in the learned share of each class."""
_GONE = 1e-3
"""If every class with a floor has a smaller share than this, all shares are forgotten."""
_PLANNED = 0.8
"""Share of the workers' time that is planned; the rest is spent on batches that mix classes."""


class FloorPlanner:
    """Decides for a queue with several classes of requests.

    A batch on a subnet holds the most urgent requests whose floors the subnet meets. The differences from
    HullFit without floors are:

    * Every class has its own hull, of the subnets that meet its floor, and so its own value of a request.
    * The time per request of a point is the mean over the classes, weighted by their shares of the queue,
      which are learned.
    * The time of a batch has no limit of its own, because classes differ in time per request. If the
      time that may be spent lies between two points, the decisions alternate between them so that the mean is
      right (sigma-delta modulation). Every ms of a batch has a price, unless time is free.
    * The fluctuation of the load is not measured. The accepted backlog is the one behind which an efficient
      batch is possible.
    * The drain guard assumes that every class leaves on its own cheapest subnet.

    Args:
        table: the latency table.
        budget: the time that may be spent.
    """

    def __init__(self, table: LatencyTable, budget: TimeBudget) -> None:
        self._table = table
        self._budget = budget
        self._floors = [0.0, *sorted(set(table.accuracy))]
        self._fronts: dict[float, PricedFronts] = {}
        self._hulls: dict[tuple[int, float], HullTable] = {}
        self._known: dict[float, float] = {}
        self._shares: dict[float, float] = {}
        self._workers = 1
        self._credit = 0.0

    @property
    def active(self) -> bool:
        """Whether requests with floors were in the queue recently."""
        return bool(self._shares)

    def remember(self, other: FloorPlanner) -> None:
        """Continue with the shares of the classes that another planner has learned."""
        self._shares = dict(other._shares)
        self._credit = other._credit

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size); see `Policy.decide`."""
        budget = self._budget
        waiting = [(deadline, self._effective_floor(floor)) for deadline, floor in context.queue.classes()]
        floors = sorted({floor for _, floor in waiting})
        self._learn(waiting)
        others = budget.others_free(context)
        self._workers = len(others) + 1
        rate = budget.rate_per_ms(context)
        price = self._price(context.queued, rate)
        values = {floor: self._value(self._hulls_of(floor), price) for floor in floors}
        tau = self._mixed_tau(0)
        spare = budget.surge_spare(context, others, tau, rate)
        candidates: list[tuple[float, float, int, int, Option]] = []
        for floor in floors:
            hulls = self._hulls_of(floor)
            fronts = hulls.fronts
            eligible = [entry for entry in waiting if entry[1] <= floor]
            worth = [0.0, *accumulate(values[own] for _, own in eligible[: fronts.sizes[-1]])]
            limit = budget.time_limit(eligible[0][0] - context.now_ms)
            for column in range(fronts.column_for(len(eligible)) + 1):
                k = min(fronts.sizes[column], len(eligible))
                option = fronts.best(column, k, price, min(limit, spare + k * tau))
                if option is None:  # the cheapest subnet need not leave time for a surge
                    latency_ms = hulls.full.by_column[column]
                    if latency_ms > limit:
                        continue
                    option = Option(latency_ms, hulls.values[0], hulls.cheapest, fronts.sizes[column])
                gain = k * option.accuracy - worth[k] - price * option.latency_ms
                candidates.append((gain, floor, column, k, option))
        for _, _, _, k, option in sorted(candidates, reverse=True):
            if self._drains(context.now_ms, waiting, others, k, option):
                return option.subnet, option.batch_size
        if context.may_expire:
            context.expire(self._in_the_way(context, self._hulls_of(self._effective_floor(context.floor))))
            waiting = waiting[len(waiting) - context.queued :]
        return self._rescue(context.now_ms, waiting)

    def _price(self, queued: int, rate: float) -> float:
        """Return the price of time, percent per ms, at the point for which the load leaves time."""
        hulls, planned = self._hulls_of(0.0), _PLANNED * self._workers
        points = range(len(hulls.taus))
        last = points[-1]
        usual = min(bisect_left(points, planned / rate if rate > 0.0 else inf, key=self._mixed_tau), last)
        tau_ms = self._budget.per_request_ms(queued, planned, rate, (hulls.batch_ms[usual],) * 2)
        point = max(0, bisect_right(points, tau_ms, key=self._mixed_tau) - 1)
        if point < last and tau_ms > self._mixed_tau(point):
            low, high = self._mixed_tau(point), self._mixed_tau(point + 1)
            self._credit += (tau_ms - low) / (high - low)
            if self._credit >= 1.0:
                self._credit -= 1.0
                point += 1
        return self._prices(hulls)[point]

    @staticmethod
    def _prices(hulls: HullTable) -> list[float]:
        """Return a price for each point of a hull at which this point yields the most per request.

        Such prices lie between the slopes on its two sides; this one is their geometric mean. At the most
        accurate point time is free.
        """
        if not hulls.slopes:
            return [0.0]
        between = [sqrt(steep * flat) for steep, flat in pairwise(hulls.slopes)]
        return [1.5 * hulls.slopes[0], *between, 0.0]

    def _rescue(self, now_ms: float, waiting: list[tuple[float, float]]) -> tuple[int, int]:
        """Return the option that runs if none passes the guards.

        Each class offers a batch on its cheapest subnet. The offer that spends the least extra time on
        requests of less demanding classes wins; among equals, the one with the most urgent request.
        """
        best: tuple[float, float] | None = None
        answer = (self._hulls_of(0.0).cheapest, self._hulls_of(0.0).full.size)
        for floor in sorted({own for _, own in waiting}):
            hulls = self._hulls_of(floor)
            eligible = [entry for entry in waiting if entry[1] <= floor][: hulls.full.size]
            head = eligible[0][0]
            size = max(
                (
                    size
                    for size, ms in zip(hulls.fronts.sizes, hulls.full.by_column, strict=True)
                    if ms <= head - now_ms
                ),
                default=hulls.full.size,
            )
            members = eligible[:size]
            needed = sum(self._hulls_of(own).taus[0] for _, own in members)
            takes = hulls.drain_ms(len(members))
            rank = (needed / takes, -head)
            if best is None or rank > best:
                best, answer = rank, (hulls.cheapest, size)
        return answer

    def _learn(self, waiting: list[tuple[float, float]]) -> None:
        """Update the share of each class with the present queue."""
        shares = self._shares
        weight = _FORGET if shares else 1.0
        for floor in shares:
            shares[floor] *= 1.0 - weight
        for _, floor in waiting:
            shares[floor] = shares.get(floor, 0.0) + weight / len(waiting)
        if all(floor == 0.0 or share < _GONE for floor, share in shares.items()):
            shares.clear()

    def _mixed_tau(self, point: int) -> float:
        """Return the mean time per request, ms, over the classes at the price of that point."""
        plain = self._hulls_of(0.0)
        if not self._shares:
            return plain.taus[point]
        price = self._prices(plain)[point]
        total = sum(self._shares.values())
        mixed = 0.0
        for floor, share in self._shares.items():
            hulls = self._hulls_of(floor)
            mixed += share * hulls.taus[hulls.point_at(price)]
        return mixed / total

    def _drains(
        self,
        now_ms: float,
        waiting: list[tuple[float, float]],
        others: list[float],
        k: int,
        option: Option,
    ) -> bool:
        """Return whether all other requests can leave in time after a batch of k on `option`."""
        chunks: list[tuple[float, float]] = []
        open_chunk: dict[float, tuple[float, int]] = {}
        reserve = self._budget.drain_reserve_ms
        for deadline, floor in waiting:
            if k and floor <= option.accuracy:
                k -= 1
                continue
            hulls = self._hulls_of(floor)
            head, count = open_chunk.get(floor, (deadline, 0))
            count += 1
            if count == hulls.full.size:
                chunks.append((head - reserve, hulls.full.ms))
                open_chunk.pop(floor, None)
            else:
                open_chunk[floor] = (head, count)
        for floor, (head, count) in open_chunk.items():
            chunks.append((head - reserve, self._hulls_of(floor).drain_ms(count)))
        free = [*others, now_ms + option.latency_ms]
        heapify(free)
        for due, takes in sorted(chunks):
            finish = free[0] + takes
            if finish > due:
                return False
            heapreplace(free, finish)
        return True

    def _in_the_way(self, context: Context, hulls: HullTable) -> int:
        """Return how many requests cannot wait for a full batch of the cheapest subnet, while one remains."""
        count, spare = 0, context.queued - hulls.full.size
        while count < spare and context.queue.deadline(count) < context.now_ms + hulls.full.ms:
            count += 1
        return count

    def _value(self, hulls: HullTable, price: float) -> float:
        """Return the value of a request of one class, percent."""
        point = hulls.point_at(price)
        return hulls.values[point] - price * hulls.taus[point]

    def _hulls_of(self, floor: float) -> HullTable:
        """Return the hull of a class for the workers that are up."""
        hulls = self._hulls.get((self._workers, floor))
        if hulls is None:
            fronts = self._fronts.get(floor)
            if fronts is None:
                fronts = self._fronts[floor] = PricedFronts(self._table, floor)
            hulls = HullTable(self._table, fronts, self._workers, self._budget, floor)
            self._hulls[self._workers, floor] = hulls
        return hulls

    def _effective_floor(self, floor: float) -> float:
        """Return the accuracy of the least accurate subnet that meets `floor`; 0 if every subnet does."""
        known = self._known.get(floor)
        if known is None:
            at = bisect_left(self._floors, floor)
            if at == len(self._floors):
                raise unreachable(floor, self._floors[-1])
            known = self._known[floor] = self._floors[at]
        return known
