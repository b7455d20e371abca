"""HullFit: the load sets the time that a batch may take, and the price of that time.

The method, every part of which was measured (`hullfit_mechanisms` in `benchmarks/results/trials.json`):

1. **Hull.** The time per request of a subnet is its least latency / batch size over the batch sizes that the
   workers can run all the time without missing deadlines. The upper concave hull of (time per request,
   accuracy) is what the workers can yield. Its slope is the price of time: the percent of accuracy that one
   more ms gains elsewhere.
2. **Load.** The load is the arrival rate, corrected by the backlog beyond the accepted one. Workers / load is
   the time that may be spent per request. The most accurate subnet that the workers sustain at a time per
   request has a cycle: the latency of its smallest batch that keeps up. The accepted backlog is one behind
   which the cycle at the arrival rate still meets its deadlines. It is brought to that over one SLO, or over
   the time until the deadlines that wait, if they are further away: of these horizons, the one with the
   greatest load counts. While requests with one SLO or less come, no batch is longer than they can wait for.
3. **Time of a batch.** A batch of the whole queue may take the cycle at the load, because a larger batch
   makes up for it afterwards; another batch may take the time per request times its size. Time left unspent
   is banked for later batches, so that neighbours on the hull alternate.
4. **Gain.** Of all pairs (subnet, batch size k) within that time, the one with the greatest
   k * (accuracy - value) - price * time runs. Time within the cycle is free. The value of a request is what
   it yields at its point of the hull, accuracy - price * time per request. If every gain is negative, the
   greatest gain per request wins.
5. **Drain.** After the batch, the rest of the queue must be able to leave in time in full batches of the
   cheapest subnet. If no batch leaves it that time, the one that answers the most requests per ms runs.
6. **Overload.** If the load exceeds what the cheapest subnet sustains, a request has no value, because
   another one must be dropped for it, and all time has a price. The same holds while the requests that expire
   cost more than a quarter of what the most accurate subnet could gain. Then the most urgent requests expire
   early if they stand in the way of a full batch and the queue cannot leave in time.
7. **Floors.** The batch is planned for the minimum accuracy of the most urgent request. Requests with lower
   ones go first while time is too short to run all on its subnets and it can wait, so that requests of the
   same kind share batches. The time that floors take beyond the time per request is learned from the batches
   and subtracted from it. In overload, and if no batch passes the drain, requests with the least floor go
   first if a batch for the first one would mostly serve others.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from subnetact.latency.pareto import pareto_front
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.fronts import Fronts
from subnetact.serving.scheduling.checks import check_margin, check_slo
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.floors import NO_FLOOR
from subnetact.serving.scheduling.frontier import Option, hull_of_front, least_from

RESERVE = 0.014
"""The reserve before the most urgent deadline, beside the margin, SLOs."""
DRAIN_RESERVE = 0.056
"""The reserve before the deadlines of the rest of the queue, SLOs."""
RATE_WINDOW = 11.0
"""The window of the arrival rate, SLOs."""
BACKLOG = 0.7
"""The accepted backlog, as a share of the arrivals during one SLO minus a cycle."""
BACKLOG_WITH_FLOORS = 0.3
"""The same while requests have floors, which can only wait for others of their kind before a short queue."""
SETTLING_TIME = 0.83
"""The time over which the backlog is brought to the accepted one, SLOs."""
BANK = 0.1
"""The most time that is banked for later batches, SLOs."""
WAITS_BEHIND = 1.0
"""The batch sizes that the workers can run all the time are those for which a request may wait behind so many
batches of its kind, divided by the number of workers."""
LAST_PRICE = 0.1
"""The price of time where there is enough for the most accurate subnet: this share of the range of accuracies
per time of one of its requests. It only compares batch sizes."""
EXPIRY_MEMORY = 1000.0
"""The share of requests that expire is averaged over about so many arrivals."""
TOLERATED = 0.25
"""Expired requests may cost this share of what the most accurate subnet would gain."""
UNDRAINABLE = 0.8
"""In overload, requests expire early if the queue is longer than this share of what leaves during one SLO."""
MOST_CHUNKS = 64
"""So many batches of the rest of the queue, or about as many as that, are looked at for the drain."""
LEARNED = 800.0
"""The time that floors take is averaged over about so many requests."""
NEAR = 64
"""So many of the most urgent requests are searched for those that meet a floor."""
FORGOTTEN = 1e-3
"""Floors are forgotten if they take less than this share of the cheapest subnet's time per request."""
KEPT_HULLS = 8
"""Hulls are kept for so many numbers of workers and times of requests."""


class HullFit:
    """Spends worker time where it yields the most accuracy, as far as all deadlines permit.

    The load sets how long a batch may take and the price of its time. Of all pairs (subnet, batch size), the
    policy takes the one whose accuracy is worth the most, if the most urgent request and the rest of the
    queue can still meet their deadlines. The header of `subnetact.serving.policies.hullfit` explains it.

    Args:
        table: the latency table.
        slo_ms: the usual time from arrival to deadline, ms; of several usual ones the shortest. Requests that
            have more time get the accuracy that it permits.
        margin: share by which latencies are assumed to be longer than profiled; 0.1 is 10 percent.

    Raises:
        PolicyError: an argument is out of range, or the SLO is below the fastest option.
        TableError: the accuracy of a subnet is not known.

    Example:
        `result = simulate(arrivals_ms, table, HullFit(table, slo_ms=36.0), slo_ms=36.0, workers=8)`
    """

    def __init__(self, table: LatencyTable, slo_ms: float, margin: float = 0.1) -> None:
        self.table = table
        self.slo_ms = check_slo(slo_ms, table)
        self.margin = check_margin(margin, "margin")
        self._reserve_ms, self._drain_ms = RESERVE * self.slo_ms, DRAIN_RESERVE * self.slo_ms
        self._fronts = Fronts(table)
        self._hull = lru_cache(KEPT_HULLS)(partial(_Hull, self, self._fronts))  # of (workers, doublings)
        self._fastest_ms = table.fastest_ms
        self._longest_ms = max(self.slo_ms, 4.0 * (1.0 + self.margin) * float(np.nanmax(table.latency_ms)))
        self._planned: tuple[int, int] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything learned from earlier requests."""
        self._banked_ms, self._urgent_ms = 0.0, -math.inf
        self._expired_share = 0.0
        self._counted: tuple[int, int] | None = None
        self._floors_ms = _FloorTimes(0.0, 0.0)

    def retabled(self, table: LatencyTable) -> HullFit:
        """Return the same policy, with its state, for other latencies of the same subnets and batch sizes.

        Another thread may call `decide` meanwhile: nothing is iterated here that a decision changes.
        """
        made = HullFit(table, self.slo_ms, self.margin)
        made._banked_ms, made._urgent_ms, made._floors_ms = self._banked_ms, self._urgent_ms, self._floors_ms
        made._expired_share, made._counted = self._expired_share, self._counted
        if self._planned:  # made here rather than at the next decision, which is urgent
            made._hull(*self._planned)
        return made

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size) for the idle worker; see `Policy.decide`."""
        now = context.now_ms
        times = enumerate(context.free_at_ms)
        others = [max(free, now) for worker, free in times if worker != context.worker and free < math.inf]
        workers = len(others) + 1
        horizons = self._horizons(context)
        (nearest_ms, _), (farthest_ms, _) = horizons[0], horizons[-1]
        if context.slack_ms <= self.slo_ms:
            self._urgent_ms = now
        urgent = now - self._urgent_ms < RATE_WINDOW * farthest_ms  # more such requests are to be expected
        doublings = 0 if urgent else int(math.log2(min(nearest_ms, self._longest_ms) / self.slo_ms))
        self._planned = workers, doublings
        hull = self._hull(workers, doublings)
        load, rate = max([self._load(context, hull, *one) for one in horizons])
        tau_ms = (workers / load if load > 0.0 else math.inf) - self._floors_ms.beyond
        least_ms = hull.taus[0] + self._floors_ms.least
        point = bisect_right(hull.taus, tau_ms) - 1
        losing = self._losing(context, hull) and nearest_ms <= self.slo_ms  # others have time
        overload = losing or point < 0 or rate * least_ms > workers
        if overload:
            self._shed(context, hull, horizons)
        batch = self._requests(context, hull, tau_ms, most=overload)
        if overload:
            price = hull.values[0] / hull.taus[0]
            # In overload a margin would only drop requests that might be met.
            terms = _Terms(math.inf, 0.0, price, 0.0, price, batch.slack_ms, least_ms)
        else:
            price = hull.slopes[point]
            value = hull.values[point] - price * hull.taus[point]
            choosing = price if point < len(hull.taus) - 1 else 0.0
            limit_ms = self._time_limit(batch.slack_ms)
            if urgent and farthest_ms > self.slo_ms:
                limit_ms = min(limit_ms, hull.limit_ms)
            terms = _Terms(batch.tau_ms, hull.cycle_ms(tau_ms), price, value, choosing, limit_ms, least_ms)
        found = self._best_offer(context, others, hull, batch, terms)
        if found is None:
            batch = self._requests(context, hull, tau_ms, most=True)
            _, option = self._fastest_pace(batch.floor, batch.eligible, batch.slack_ms)
            last: Any = option or hull.of_floor(batch.floor)
            return last.subnet, last.batch_size
        k, option = found
        if not overload:
            cycle_ms = terms.cycle_ms if k == context.queued else 0.0
            unspent_ms = max(cycle_ms, batch.tau_ms * k) - option.latency_ms
            self._banked_ms = min(max(0.0, self._banked_ms + unspent_ms), BANK * self.slo_ms)
        self._learn_floors(hull, batch, k, option, tau_ms)
        return option.subnet, option.batch_size

    def _time_limit(self, slack_ms: float) -> float:
        """Return the longest profiled latency, ms, that meets a deadline `slack_ms` away."""
        return (slack_ms - self._reserve_ms) / (1.0 + self.margin)

    def _horizons(self, context: Context) -> list[tuple[float, int]]:
        """Return (time in ms, how many of the waiting requests are due by then), from one SLO on.

        Where requests have more time than the SLO, their deadlines are further horizons, each about twice as
        far as the one before.
        """
        queue, now, queued = context.queue, context.now_ms, context.queued
        horizon_ms, due, horizons = self.slo_ms, 0, []
        if queue.deadline(queued - 1) <= now + horizon_ms * (1.0 + 1e-9):
            return [(horizon_ms, queued)]
        while due < queued:
            before, due = due, bisect_right(range(queued), now + horizon_ms, lo=due, key=queue.deadline)
            if due > before:
                horizons.append((max(self.slo_ms, queue.deadline(due - 1) - now), due))
            horizon_ms *= 2.0
        return horizons

    def _load(self, context: Context, hull: _Hull, horizon_ms: float, due: int) -> tuple[float, float]:
        """Return (load, arrival rate), requests per ms, if `due` requests are to be settled in a time.

        The most urgent request is about to be served and does not count to the backlog.
        """
        accepted, rate = 0.0, context.arrivals.rate_per_ms(context.now_ms, RATE_WINDOW * horizon_ms)
        if rate > 0.0:
            cycle_ms = hull.cycle_ms(max(hull.workers / rate, hull.taus[0]))
            behind_ms = horizon_ms - (1.0 + self.margin) * cycle_ms - self._reserve_ms
            backlog = BACKLOG_WITH_FLOORS if self._floors_ms.least > 0.0 else BACKLOG
            accepted = backlog * rate * max(0.0, behind_ms)
        return rate + (due - 1 - accepted) / (SETTLING_TIME * horizon_ms), rate

    def _learn_floors(self, hull: _Hull, batch: _Requests, k: int, option: Option, tau_ms: float) -> None:
        """Learn how much time per request batches with a floor take beyond others."""
        known = self._floors_ms
        if batch.floor > NO_FLOOR or known.least > 0.0:
            seen = (0.0, 0.0)
            fastest = self._fronts.fastest(self._fronts.column_for(k), batch.floor)
            if batch.floor > NO_FLOOR and fastest is not None:
                tau = min(max(tau_ms, hull.taus[0]), option.latency_ms)
                seen = max(0.0, fastest.latency_ms / k - hull.taus[0]), max(0.0, option.latency_ms / k - tau)
            weight = k / LEARNED
            least, beyond = (old + weight * (new - old) for old, new in zip(known, seen, strict=True))
            forgotten = least < FORGOTTEN * hull.taus[0]
            self._floors_ms = _FloorTimes(0.0, 0.0) if forgotten else _FloorTimes(least, beyond)

    def _losing(self, context: Context, hull: _Hull) -> bool:
        """Return whether the requests that expire cost more than accuracy may cost."""
        arrived, expired = context.arrivals.total, context.expired
        then_arrived, then_expired = self._counted or (arrived, expired)
        self._counted = arrived, expired
        if arrived > then_arrived:
            weight = -math.expm1((then_arrived - arrived) / EXPIRY_MEMORY)
            share = (expired - then_expired) / (arrived - then_arrived)
            self._expired_share += weight * (share - self._expired_share)
        gain = self._fronts.floors.best - hull.values[0]
        return self._expired_share * hull.values[0] > TOLERATED * gain

    def _requests(self, context: Context, hull: _Hull, tau_ms: float, most: bool) -> _Requests:
        """Choose which requests the batch is planned for: those that the floor of the first one admits.

        Requests with lower floors are chosen if there is no time to run all requests on the subnets of the
        first one, and it can wait for such a batch. If the batch is to answer the most requests per ms, they
        are also chosen if that wastes less time on requests with lower floors than the batch needs.
        """
        queue, floor, slack_ms = context.queue, context.floor, context.slack_ms
        if not queue.demanding:
            return _Requests(NO_FLOOR, context.queued, slack_ms, tau_ms)
        first, count = 0, max(NEAR, 2 * self._fronts.sizes[-1])
        if most and slack_ms < self._fastest_ms:  # late requests demand nothing any more
            live = bisect_left(range(context.queued), context.now_ms + self._fastest_ms, key=queue.deadline)
            first = live if live < context.queued else 0
        near = queue.requests(first, min(context.queued, first + count))
        floors = [request.ask.floor for request in near]
        if most:
            floor, least = floors[0], min(floors)
            if least < floor and _use(hull, floors, least) > _use(hull, floors, floor):
                floor = least
            slack_ms = next(one.deadline_ms for one in near if one.ask.floor <= floor) - context.now_ms
        elif (own := hull.of_floor(floor)).tau_ms > tau_ms and (lower := {f for f in floors if f < floor}):
            affordable = [one for one in lower if hull.of_floor(one).tau_ms <= tau_ms]
            other, wait_ms = max(affordable, default=min(lower)), slack_ms - own.full_ms
            if self._time_limit(wait_ms) >= hull.of_floor(other).full_ms:
                floor, slack_ms = other, wait_ms
        eligible = sum([other <= floor for other in floors])
        return _Requests(floor, eligible, slack_ms, max(tau_ms, hull.of_floor(floor).tau_ms))

    def _best_offer(
        self, context: Context, others: Sequence[float], hull: _Hull, batch: _Requests, terms: _Terms
    ) -> tuple[int, Option] | None:
        """Return (number of requests, option) with the greatest gain that meets all deadlines, or None."""
        fronts, queued, floor = self._fronts, context.queued, batch.floor
        tau_ms, cycle_ms, price, value, choosing, limit_ms, least_ms = terms
        top = fronts.column_for(batch.eligible)
        most = min(batch.eligible, fronts.sizes[top])
        # A smaller batch leaves more behind, so no batch may take longer than the largest one.
        limit = min(limit_ms, self._drain_limit(context, others, hull, most, least_ms))
        offers: list[tuple[float, int, Option]] = []
        for column in range(top, -1, -1):
            k = min(fronts.sizes[column], most)
            free_ms = cycle_ms if k == queued else min(cycle_ms, tau_ms * k)
            within = min(limit, max(free_ms, tau_ms * k) + self._banked_ms)
            option = fronts.priced(column, k, choosing, within, free_ms, floor)
            if option is None:
                option = fronts.fastest(column, floor)
                if option is None or option.latency_ms > limit:
                    continue
            gain = option.accuracy - value - price * max(option.latency_ms, free_ms) / k
            offers.append((gain, k, option))
        if offers and max(offers)[0] > 0.0:
            offers = [(gain * k, k, option) for gain, k, option in offers]
        for _, k, option in sorted(offers, reverse=True):
            if k == most or option.latency_ms <= self._drain_limit(context, others, hull, k, least_ms):
                return k, option
        return None

    def _drain_limit(
        self, context: Context, others: Sequence[float], hull: _Hull, k: int, least_ms: float
    ) -> float:
        """Return the longest latency, ms, of a batch of k after which the rest still meets its deadlines."""
        rest = context.queued - k
        if rest <= 0:
            return math.inf
        size, full_ms = hull.full_size, hull.full_ms * least_ms / hull.taus[0]
        stride = 1 + rest // (MOST_CHUNKS * size)  # behind a long queue, not every batch is looked at
        due = np.array(context.queue.deadlines(k, stride * size)) - self._drain_ms
        missing = np.arange(1.0, stride * len(due) + 1.0, stride) * full_ms
        last = self._fronts.fastest(self._fronts.column_for(rest - (len(due) - 1) * stride * size))
        if last is not None:
            missing[-1] += min(last.latency_ms - full_ms, 0.0)
        missing -= np.maximum(np.subtract.outer(due, others), 0.0).sum(axis=1)
        limits = (due - context.now_ms - missing)[missing > 0.0]
        return float(limits.min()) if len(limits) else math.inf

    def _shed(self, context: Context, hull: _Hull, horizons: Sequence[tuple[float, int]]) -> None:
        """Let requests expire that stand in the way of a full batch, if the queue cannot leave in time."""
        full, queued = hull.of_floor(context.floor), context.queued
        if not context.may_expire or queued <= full.batch_size or context.slack_ms >= full.full_ms:
            return
        pace, _ = self._fastest_pace(context.floor, queued, context.slack_ms)
        leaving = UNDRAINABLE * pace * hull.workers
        if pace * full.full_ms < full.batch_size and any(due > leaving * ms for ms, due in horizons):
            end_ms, spare = context.now_ms + full.full_ms, range(queued - full.batch_size)
            context.expire(bisect_left(spare, end_ms, key=context.queue.deadline))

    def _fastest_pace(self, floor: float, eligible: int, within_ms: float) -> tuple[float, Option | None]:
        """Return (requests per ms, option) of the batch that answers the most requests per ms in time."""
        columns = range(self._fronts.column_for(eligible) + 1)
        options = [self._fronts.fastest(column, floor) for column in columns]
        timely = [option for option in options if option is not None and option.latency_ms <= within_ms]
        paces = [(min(option.batch_size, eligible) / option.latency_ms, option) for option in timely]
        return max(paces, key=itemgetter(0), default=(0.0, None))


def _use(hull: _Hull, floors: Sequence[float], floor: float) -> float:
    """Return the share of a batch's time that its requests need, if each ran on its cheapest subnet."""
    full = hull.of_floor(floor)
    members = [other for other in floors if other <= floor][: full.batch_size]
    return sum([hull.of_floor(other).tau_ms for other in members]) / full.full_ms


class _Terms(NamedTuple):
    """The terms on which a decision compares batches: times in ms, prices in percent per ms."""

    tau_ms: float
    cycle_ms: float
    price: float
    value: float
    choosing: float  # the price for choosing the subnet at one batch size
    limit_ms: float
    least_ms: float  # the least time per request that the waiting floors allow


class _Requests(NamedTuple):
    """The requests that a batch is planned for: their floor, number, slack and time per request."""

    floor: float
    eligible: int
    slack_ms: float
    tau_ms: float


class _FloorTimes(NamedTuple):
    """The mean time, ms, that a floor takes beyond the cheapest subnet, and beyond the time per request."""

    least: float
    beyond: float


class _Cheapest(NamedTuple):
    """The batches with the least time per request of the subnets that meet a floor."""

    tau_ms: float
    full_ms: float
    batch_size: int
    subnet: int


class _Hull:
    """What a number of workers can sustain for requests that have `2**doublings` SLOs.

    A cell of the table fits if a request that arrives when a worker has just begun such a batch can still be
    answered in time by another one: without the margins if none fits with them, or else the fastest ones.

    Attributes:
        workers: their number.
        taus: time per request of each vertex of the hull, ms, ascending.
        values: accuracy of each vertex, percent.
        slopes: the price of time from each vertex on, percent per ms.
        full_ms: latency of a full batch of the first vertex, the cheapest subnet.
        full_size: its batch size.
        limit_ms: the longest latency, ms, of a cell that fits with the margins.
    """

    def __init__(self, policy: HullFit, fronts: Fronts, workers: int, doublings: int) -> None:
        self.workers = workers
        table, sizes = policy.table, policy.table.batch_sizes
        cells = np.where(np.isnan(table.latency_ms), math.inf, table.latency_ms)
        waits = 1.0 + WAITS_BEHIND / workers
        slo_ms = policy.slo_ms * 2.0**doublings
        self.limit_ms = policy._time_limit(slo_ms) / waits
        fits = cells <= self.limit_ms
        if not fits.any():
            fits = cells <= max(slo_ms / waits, float(cells.min()))
        per_request = cells / np.array(sizes, dtype=np.float64)
        best = np.where(fits | ~fits.any(axis=1, keepdims=True), per_request, math.inf).argmin(axis=1)
        best_of = enumerate(best.tolist())
        cheapest = [_Cheapest(float(per_request[i, j]), float(cells[i, j]), sizes[j], i) for i, j in best_of]
        points = [(one.tau_ms, table.accuracy[i], i) for i, one in enumerate(cheapest) if fits[i].any()]
        front = pareto_front(points, cost=lambda point: point[0], gain=lambda point: point[1])
        hull = hull_of_front(front)
        self.taus = [tau for tau, _, _ in hull]
        self.values = [accuracy for _, accuracy, _ in hull]
        last = LAST_PRICE * (max(table.accuracy) - min(table.accuracy)) / self.taus[-1]
        self.slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(hull)] + [last]
        self._floors, accuracies = fronts.floors, fronts.floors.accuracies
        self._by_floor = dict(zip(accuracies, least_from(accuracies, table.accuracy, cheapest), strict=True))
        _, self.full_ms, self.full_size, _ = self._by_floor[NO_FLOOR] = cheapest[hull[0][2]]
        self._sustained_taus = [tau for tau, _, _ in front]
        self._sustained = [
            [(size, ms) for size, ms, fit in zip(sizes, cells[i].tolist(), fits[i], strict=True) if fit]
            for _, _, i in front
        ]

    def of_floor(self, floor: float) -> _Cheapest:
        """Return the cheapest batches of the subnets that meet a floor."""
        return self._by_floor.get(floor) or self._by_floor[self._floors(floor)]

    def cycle_ms(self, tau_ms: float) -> float:
        """Return the latency of the smallest batch that the most accurate sustained subnet keeps up with."""
        batches: list[tuple[int, float]] = self._sustained[bisect_right(self._sustained_taus, tau_ms) - 1]
        return next(ms for size, ms in batches if ms <= tau_ms * size * (1.0 + 1e-9))
