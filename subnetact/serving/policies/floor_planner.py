"""HullFit for queues in which some requests demand a minimum accuracy.

All requests with the same floor form a class. The header of `subnetact.serving.policies.hullfit` explains the
method for one class.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heapify, heapreplace
from itertools import accumulate

from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.hull_table import HullTable
from subnetact.serving.policies.time_price import TimePrice
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
    * The drain guard assumes that every class leaves on its own cheapest subnet.

    Args:
        table: the latency table.
        time_price: the time that may be spent; its hulls are those of all subnets.
    """

    def __init__(self, table: LatencyTable, time_price: TimePrice) -> None:
        self._table = table
        self._time_price = time_price
        self._floors = [0.0, *sorted(set(table.accuracy))]
        self._hulls: dict[float, HullTable] = {0.0: time_price.hulls}
        self._known: dict[float, float] = {}
        self._shares: dict[float, float] = {}

    @property
    def active(self) -> bool:
        """Whether requests with floors were in the queue recently."""
        return bool(self._shares)

    def remember(self, other: FloorPlanner) -> None:
        """Continue with the shares of the classes that another planner has learned."""
        self._shares = dict(other._shares)

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size); see `Policy.decide`."""
        time_price = self._time_price
        waiting = [(deadline, self._effective_floor(floor)) for deadline, floor in context.queue.classes()]
        floors = sorted({floor for _, floor in waiting})
        self._learn(waiting)
        others = time_price.others_free(context)
        point = time_price.pick_point(context, _PLANNED * (len(others) + 1), self._mixed_tau)
        price = time_price.hulls.prices[point]
        values = {floor: self._value(self._hulls_of(floor), price) for floor in floors}
        tau = self._mixed_tau(0)
        spare = time_price.surge_spare(context, others, tau)
        candidates: list[tuple[float, float, int, int, Option]] = []
        for floor in floors:
            hulls = self._hulls_of(floor)
            eligible = [entry for entry in waiting if entry[1] <= floor]
            worth = [0.0, *accumulate(values[own] for _, own in eligible[: hulls.sizes[-1]])]
            limit = time_price.time_limit(eligible[0][0] - context.now_ms)
            for column in range(hulls.column_for(len(eligible)) + 1):
                k = min(hulls.sizes[column], len(eligible))
                option = hulls.best(column, k, price, limit, spare + k * tau)
                if option is not None:
                    gain = k * option.accuracy - worth[k] - price * option.latency_ms
                    candidates.append((gain, floor, column, k, option))
        for _, _, _, k, option in sorted(candidates, reverse=True):
            if self._drains(context.now_ms, waiting, others, k, option):
                return option.subnet, option.batch_size
        if context.may_expire:
            context.expire(self._in_the_way(context, self._hulls_of(self._effective_floor(context.floor))))
            waiting = waiting[len(waiting) - context.queued :]
        return self._rescue(context.now_ms, waiting)

    def _rescue(self, now_ms: float, waiting: list[tuple[float, float]]) -> tuple[int, int]:
        """Return the option that runs if none passes the guards.

        Each class offers a batch on its cheapest subnet. The offer that spends the least extra time on
        requests of less demanding classes wins; among equals, the one with the most urgent request.
        """
        best: tuple[float, float] | None = None
        answer = (self._time_price.hulls.cheapest, self._time_price.hulls.full_size)
        for floor in sorted({own for _, own in waiting}):
            hulls = self._hulls_of(floor)
            eligible = [entry for entry in waiting if entry[1] <= floor][: hulls.full_size]
            head = eligible[0][0]
            subnet, size = hulls.rescue(head - now_ms)
            members = eligible[:size]
            needed = sum(self._hulls_of(own).taus[0] for _, own in members)
            takes = hulls.drain_ms(len(members))
            rank = (needed / takes, -head)
            if best is None or rank > best:
                best, answer = rank, (subnet, size)
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
        price = self._time_price.hulls.prices[point]
        if not self._shares:
            return self._time_price.hulls.taus[point]
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
        reserve = self._time_price.drain_margin_ms
        for deadline, floor in waiting:
            if k and floor <= option.accuracy:
                k -= 1
                continue
            hulls = self._hulls_of(floor)
            head, count = open_chunk.get(floor, (deadline, 0))
            count += 1
            if count == hulls.full_size:
                chunks.append((head - reserve, hulls.full_ms))
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
        count, spare = 0, context.queued - hulls.full_size
        while count < spare and context.queue.deadline(count) < context.now_ms + hulls.full_ms:
            count += 1
        return count

    def _value(self, hulls: HullTable, price: float) -> float:
        """Return the value of a request of one class, percent."""
        point = hulls.point_at(price)
        return hulls.values[point] - price * hulls.taus[point]

    def _hulls_of(self, floor: float) -> HullTable:
        hulls = self._hulls.get(floor)
        if hulls is None:
            hulls = self._hulls[floor] = HullTable(self._table, floor)
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
