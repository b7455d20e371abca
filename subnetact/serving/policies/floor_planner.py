"""HullFit for queues in which some requests demand a minimum accuracy.

All requests with the same floor form a class. The header of `subnetact.serving.policies.hullfit` explains the
method for one class.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from heapq import heapify, heapreplace
from itertools import accumulate

from subnetact.latency.pareto import spread
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.hull_table import Hull, PricedFronts
from subnetact.serving.policies.time_budget import TimeBudget
from subnetact.serving.scheduling.checks import unreachable
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.floors import Floors
from subnetact.serving.scheduling.frontier import Option
from subnetact.serving.scheduling.queue import NO_FLOOR, EDFQueue

__all__ = ["FloorPlanner"]

_FORGET = 0.02
"""Weight of the present queue in the learned share of each class."""
_GONE = 1e-3
"""If every class with a floor has a smaller share than this, all shares are forgotten."""
_PLANNED = 0.8
"""Share of the workers' time that is planned; the rest is spent on batches that mix classes."""
_CLASSES = 32
"""The largest number of classes with a floor."""
_NEAR = 256
"""At least so many of the most urgent requests are looked at one by one, and about as many of the others."""
_TRIES = 32
"""So many batches at most are compared with the rest of the queue, those of the greatest gain."""

Sample = list[tuple[float, float, int]]
"""(deadline, class, number of requests), most urgent first."""


class FloorPlanner:
    """Decides for a queue with several classes of requests.

    A floor belongs to the class of the least accuracy that reaches it. A table of more than 32 accuracies
    has 32 classes, spread evenly; only the plan rounds floors up to them, the batch itself keeps to each
    request's own floor. Of a long queue, the most urgent requests and a sample of the others are looked at,
    each standing for those behind it, so that a decision takes the same time behind any number of requests.

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
        fronts: its fronts.
        budget: the time that may be spent.
    """

    def __init__(self, table: LatencyTable, fronts: PricedFronts, budget: TimeBudget) -> None:
        self._table = table
        self._budget = budget
        accuracies = Floors(table).accuracies
        self._classes = [accuracies[i] for i in spread(accuracies, _CLASSES)]
        self._near = max(_NEAR, 2 * table.batch_sizes[-1])
        self._fronts_of = {NO_FLOOR: fronts}
        self._hulls: dict[float, Hull] = {}
        self._shares: dict[float, float] = {}
        self._workers = 1
        self._credit = 0.0

    @property
    def active(self) -> bool:
        """Whether requests with floors were in the queue recently."""
        return bool(self._shares)

    def remember(self, other: FloorPlanner) -> None:
        """Continue with the shares of the classes that another planner has learned; prepare their hulls."""
        known = {NO_FLOOR, *self._classes}
        self._shares = {floor: share for floor, share in dict(other._shares).items() if floor in known}
        self._credit = other._credit
        self._workers = other._workers
        for floor in self._shares:
            self._hulls_of(floor)

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size); see `Policy.decide`."""
        budget = self._budget
        waiting = self._look(context.queue)
        floors = sorted({floor for _, floor, _ in waiting})
        self._learn(waiting)
        others = budget.others_free(context)
        self._count_on(len(others) + 1)
        rate = budget.rate_per_ms(context)
        price = self._price(context.queued, rate)
        values = {floor: self._value(self._hulls_of(floor), price) for floor in floors}
        tau = self._mixed_tau(0)
        spare = budget.surge_spare(context, others, tau, rate)
        candidates: list[tuple[float, float, int, int, Option]] = []
        for floor in floors:
            hulls = self._hulls_of(floor)
            fronts = hulls.fronts
            head, own = _eligible(waiting, floor, fronts.sizes[-1])
            worth = [0.0, *accumulate(values[one] for one in own)]
            limit = budget.time_limit(head - context.now_ms)
            for column in range(fronts.column_for(len(own)) + 1):
                k = min(fronts.sizes[column], len(own))
                option = fronts.best(column, k, price, min(limit, spare + k * tau))
                if option is None:  # the cheapest subnet need not leave time for a surge
                    latency_ms = hulls.full.by_column[column]
                    if latency_ms > limit:
                        continue
                    option = Option(latency_ms, hulls.values[0], hulls.cheapest, fronts.sizes[column])
                gain = k * option.accuracy - worth[k] - price * option.latency_ms
                candidates.append((gain, floor, column, k, option))
        for _, _, _, k, option in sorted(candidates, reverse=True)[:_TRIES]:
            if self._drains(context.now_ms, waiting, others, k, option):
                return option.subnet, option.batch_size
        if context.may_expire:
            context.expire(self._in_the_way(context, self._hulls_of(self._class_of(context.floor))))
            waiting = self._look(context.queue)
        return self._rescue(context.now_ms, waiting)

    def _look(self, queue: EDFQueue[object]) -> Sample:
        """Return the most urgent requests, and a sample of the others that counts for all of them."""
        count, near = len(queue), self._near
        seen = [(deadline, floor, 1) for deadline, floor in queue.classes(0, min(count, 2 * near))]
        if count > 2 * near:
            step = math.ceil((count - near) / near)
            seen[near:] = [(deadline, floor, step) for deadline, floor in queue.classes(near, count, step)]
            deadline, floor, _ = seen[-1]
            seen[-1] = deadline, floor, (count - near - 1) % step + 1
        return [
            (deadline, self._class_of(floor) if floor > NO_FLOOR else NO_FLOOR, number)
            for deadline, floor, number in seen
        ]

    def _price(self, queued: int, rate: float) -> float:
        """Return the price of time, percent per ms, at the point for which the load leaves time."""
        hulls, planned = self._hulls_of(NO_FLOOR), _PLANNED * self._workers
        points = range(len(hulls.taus))
        last = points[-1]
        usual = min(
            bisect_left(points, planned / rate if rate > 0.0 else math.inf, key=self._mixed_tau), last
        )
        tau_ms = self._budget.per_request_ms(queued, planned, rate, (hulls.batch_ms[usual],) * 2)
        point = max(0, bisect_right(points, tau_ms, key=self._mixed_tau) - 1)
        if point < last and tau_ms > self._mixed_tau(point):
            low, high = self._mixed_tau(point), self._mixed_tau(point + 1)
            self._credit += (tau_ms - low) / (high - low)
            if self._credit >= 1.0:
                self._credit -= 1.0
                point += 1
        return hulls.prices[point]

    def _rescue(self, now_ms: float, waiting: Sample) -> tuple[int, int]:
        """Return the option that runs if none passes the guards.

        Each class offers a batch on its cheapest subnet. The offer that spends the least extra time on
        requests of less demanding classes wins; among equals, the one with the most urgent request.
        """
        best: tuple[float, float] | None = None
        answer = (self._hulls_of(NO_FLOOR).cheapest, self._hulls_of(NO_FLOOR).full.size)
        for floor in sorted({own for _, own, _ in waiting}):
            hulls = self._hulls_of(floor)
            head, members = _eligible(waiting, floor, hulls.full.size)
            size = max(
                (
                    size
                    for size, ms in zip(hulls.fronts.sizes, hulls.full.by_column, strict=True)
                    if ms <= head - now_ms
                ),
                default=hulls.full.size,
            )
            members = members[:size]
            needed = sum(self._hulls_of(own).taus[0] for own in members)
            takes = hulls.drain_ms(len(members))
            rank = (needed / takes, -head)
            if best is None or rank > best:
                best, answer = rank, (hulls.cheapest, size)
        return answer

    def _learn(self, waiting: Sample) -> None:
        """Update the share of each class with the present queue."""
        shares = self._shares
        weight = _FORGET if shares else 1.0
        numbers: Counter[float] = Counter()
        for _, floor, number in waiting:
            numbers[floor] += number
        for floor in shares:
            shares[floor] *= 1.0 - weight
        for floor, number in numbers.items():
            shares[floor] = shares.get(floor, 0.0) + weight * number / numbers.total()
        if all(floor == NO_FLOOR or share < _GONE for floor, share in shares.items()):
            shares.clear()

    def _mixed_tau(self, point: int) -> float:
        """Return the mean time per request, ms, over the classes at the price of that point."""
        plain = self._hulls_of(NO_FLOOR)
        if not self._shares:
            return plain.taus[point]
        price = plain.prices[point]
        total = sum(self._shares.values())
        mixed = 0.0
        for floor, share in self._shares.items():
            hulls = self._hulls_of(floor)
            mixed += share * hulls.taus[hulls.point_at(price)]
        return mixed / total

    def _drains(self, now_ms: float, waiting: Sample, others: list[float], k: int, option: Option) -> bool:
        """Return whether all other requests can leave in time after a batch of k on `option`."""
        chunks: list[tuple[float, float]] = []
        open_chunk: dict[float, tuple[float, int]] = {}
        reserve = self._budget.drain_reserve_ms
        for deadline, floor, number in waiting:
            if k and floor <= option.accuracy:
                taken = min(k, number)
                k -= taken
                number -= taken
                if not number:
                    continue
            full = self._hulls_of(floor).full
            head, count = open_chunk.get(floor, (deadline, 0))
            count += number
            while count >= full.size:
                chunks.append((head - reserve, full.ms))
                head, count = deadline, count - full.size
            if count:
                open_chunk[floor] = (head, count)
            else:
                open_chunk.pop(floor, None)
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

    def _in_the_way(self, context: Context, hulls: Hull) -> int:
        """Return how many requests cannot wait for a full batch of the cheapest subnet, while one remains."""
        count, spare = 0, context.queued - hulls.full.size
        while count < spare and context.queue.deadline(count) < context.now_ms + hulls.full.ms:
            count += 1
        return count

    def _value(self, hulls: Hull, price: float) -> float:
        """Return the value of a request of one class, percent."""
        point = hulls.point_at(price)
        return hulls.values[point] - price * hulls.taus[point]

    def _count_on(self, workers: int) -> None:
        """Plan for that number of workers; what was planned for another one is forgotten."""
        if workers != self._workers:
            self._workers = workers
            self._hulls.clear()

    def _hulls_of(self, floor: float) -> Hull:
        """Return the hull of a class for the workers that are up."""
        hulls = self._hulls.get(floor)
        if hulls is None:
            fronts = self._fronts_of.get(floor)
            if fronts is None:
                fronts = self._fronts_of[floor] = self._fronts_of[NO_FLOOR].meeting(floor)
            hulls = self._hulls[floor] = Hull(self._table, fronts, self._workers, self._budget, floor)
        return hulls

    def _class_of(self, floor: float) -> float:
        """Return the class of a floor: the least accurate one that meets it; `NO_FLOOR` if all do."""
        at = bisect_left(self._classes, floor)
        if at == len(self._classes):
            raise unreachable(floor, self._classes[-1])
        return self._classes[at] if at else NO_FLOOR


def _eligible(waiting: Sample, floor: float, most: int) -> tuple[float, list[float]]:
    """Return the first deadline of the requests of a class or a less demanding one, and their classes.

    At most `most` requests are returned, the most urgent ones; there must be one.
    """
    head = math.nan
    own: list[float] = []
    for deadline, one, number in waiting:
        if one <= floor:
            head = head if own else deadline
            own += [one] * number
            if len(own) >= most:
                break
    return head, own[:most]
