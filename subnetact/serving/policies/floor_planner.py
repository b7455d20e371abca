"""HullFit for queues in which some requests demand a least accuracy."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heapify, heapreplace
from itertools import accumulate

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.hull_table import HullTable
from subnetact.serving.policies.time_price import TimePrice
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.frontier import Option

__all__ = ["FloorPlanner"]

_FORGET = 0.02
_GONE = 1e-3
#: share of the workers' time that is planned; the rest pays for batches that mix classes
_PLANNED = 0.8


class FloorPlanner:
    """One decision at a time over classes of requests, a class being all requests of one floor.

    A batch on a subnet holds the first requests, in order of deadline, whose floor it meets. Every class
    has its own hull and so its own value of a request; the load is weighed with the share of each class,
    learned from the queue; the drain test lets every class leave on its own cheapest subnet.
    """

    def __init__(self, table: LatencyTable, pricing: TimePrice) -> None:
        self._table = table
        self._pricing = pricing
        self._levels = [0.0, *sorted(set(table.accuracy))]
        self._markets: dict[float, HullTable] = {0.0: pricing.market}
        self._level_of: dict[float, float] = {}
        self._shares: dict[float, float] = {}

    @property
    def active(self) -> bool:
        """Whether requests with floors came recently."""
        return bool(self._shares)

    def remember(self, other: FloorPlanner) -> None:
        """Go on with the shares of the classes that another planner has learned."""
        self._shares = dict(other._shares)

    def decide(self, context: Context) -> tuple[int, int]:
        """Answer (subnet, batch size)."""
        pricing = self._pricing
        waiting = [(deadline, self._level(floor)) for deadline, floor in context.queue.classes()]
        levels = sorted({level for _, level in waiting})
        self._learn(waiting)
        others = pricing.others_free(context)
        point = pricing.pick_point(context, _PLANNED * (len(others) + 1), self._mixed_tau)
        price = pricing.market.prices[point]
        values = {level: self._value(self._market(level), price) for level in levels}
        tau = self._mixed_tau(0)
        spare = pricing.surge_spare(context, others, tau)
        candidates: list[tuple[float, float, int, int, Option]] = []
        for level in levels:
            market = self._market(level)
            eligible = [entry for entry in waiting if entry[1] <= level]
            worth = [0.0, *accumulate(values[own] for _, own in eligible[: market.sizes[-1]])]
            limit = pricing.time_limit(eligible[0][0] - context.now_ms)
            for column in range(market.column_for(len(eligible)) + 1):
                k = min(market.sizes[column], len(eligible))
                option = market.best(column, k, price, limit, spare + k * tau)
                if option is not None:
                    gain = k * option.accuracy - worth[k] - price * option.latency_ms
                    candidates.append((gain, level, column, k, option))
        for _, _, _, k, option in sorted(candidates, reverse=True):
            if self._drains(context.now_ms, waiting, others, k, option):
                return option.subnet, option.batch_size
        if context.may_expire:
            context.expire(self._in_the_way(context, self._market(self._level(context.floor))))
            waiting = waiting[len(waiting) - context.queued :]
        return self._rescue(context.now_ms, waiting)

    def _rescue(self, now_ms: float, waiting: list[tuple[float, float]]) -> tuple[int, int]:
        """The class whose cheapest subnet wastes the least time on requests that demand less.

        Equals go by the earliest head.
        """
        best: tuple[float, float] | None = None
        answer = (self._pricing.market.cheap, self._pricing.market.full_size)
        for level in sorted({own for _, own in waiting}):
            market = self._market(level)
            eligible = [entry for entry in waiting if entry[1] <= level][: market.full_size]
            head = eligible[0][0]
            subnet, size = market.rescue(head - now_ms)
            members = eligible[:size]
            needed = sum(self._market(own).taus[0] for _, own in members)
            takes = market.drain_ms(len(members))
            rank = (needed / takes, -head)
            if best is None or rank > best:
                best, answer = rank, (subnet, size)
        return answer

    def _learn(self, waiting: list[tuple[float, float]]) -> None:
        shares = self._shares
        weight = _FORGET if shares else 1.0
        for level in shares:
            shares[level] *= 1.0 - weight
        for _, level in waiting:
            shares[level] = shares.get(level, 0.0) + weight / len(waiting)
        if all(level == 0.0 or share < _GONE for level, share in shares.items()):
            shares.clear()

    def _mixed_tau(self, point: int) -> float:
        """Mean time per request, ms, over the classes when time has the price of that point."""
        price = self._pricing.market.prices[point]
        if not self._shares:
            return self._pricing.market.taus[point]
        total = sum(self._shares.values())
        mixed = 0.0
        for level, share in self._shares.items():
            market = self._market(level)
            mixed += share * market.taus[market.point_at(price)]
        return mixed / total

    def _drains(
        self,
        now_ms: float,
        waiting: list[tuple[float, float]],
        others: list[float],
        k: int,
        option: Option,
    ) -> bool:
        """Whether every class can leave in time, chunk by chunk, after a batch of k on `option`."""
        chunks: list[tuple[float, float]] = []
        open_chunk: dict[float, tuple[float, int]] = {}
        reserve = self._pricing.drain_margin_ms
        for deadline, level in waiting:
            if k and level <= option.accuracy:
                k -= 1
                continue
            market = self._market(level)
            head, count = open_chunk.get(level, (deadline, 0))
            count += 1
            if count == market.full_size:
                chunks.append((head - reserve, market.full_ms))
                open_chunk.pop(level, None)
            else:
                open_chunk[level] = (head, count)
        for level, (head, count) in open_chunk.items():
            chunks.append((head - reserve, self._market(level).drain_ms(count)))
        free = [*others, now_ms + option.latency_ms]
        heapify(free)
        for due, takes in sorted(chunks):
            finish = free[0] + takes
            if finish > due:
                return False
            heapreplace(free, finish)
        return True

    def _in_the_way(self, context: Context, market: HullTable) -> int:
        count, spare = 0, context.queued - market.full_size
        while count < spare and context.queue.deadline(count) < context.now_ms + market.full_ms:
            count += 1
        return count

    def _value(self, market: HullTable, price: float) -> float:
        point = market.point_at(price)
        return market.values[point] - price * market.taus[point]

    def _market(self, level: float) -> HullTable:
        market = self._markets.get(level)
        if market is None:
            market = self._markets[level] = HullTable(self._table, level)
        return market

    def _level(self, floor: float) -> float:
        level = self._level_of.get(floor)
        if level is None:
            at = bisect_left(self._levels, floor)
            if at == len(self._levels):
                raise PolicyError(f"floor: no subnet reaches {floor} %; the best has {self._levels[-1]} %")
            level = self._level_of[floor] = self._levels[at]
        return level
