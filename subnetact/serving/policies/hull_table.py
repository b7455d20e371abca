"""What a number of workers can sustain: the hull of accuracy over time per request, as HullFit uses it.

The header of `subnetact.serving.policies.hullfit` explains the method.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from subnetact.errors import PolicyError
from subnetact.latency.pareto import pareto_front
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.batch_fronts import BatchFronts
from subnetact.serving.policies.time_budget import TimeBudget
from subnetact.serving.scheduling.frontier import Option, hull_of_front, upper_hull

__all__ = ["Chunk", "Hull", "HullTable", "PricedFronts"]

_QUICK = 1 / 3
"""A quick batch takes at most this share of the SLO."""
_ALMOST = 1.1
"""A batch size that needs at most this many times a subnet's least time per request is almost efficient."""
_TIE = 1.0 + 1e-9
"""Slopes and prices that differ by no more than this factor are equal."""
_EQUAL = 1e-9
"""Gains that differ by no more than this are equal, percent."""
_BELOW = 1e-6
"""A subnet lies below the hull if the hull at its time per request is more accurate by this, percent."""

Floats = npt.NDArray[np.float64]


class Chunk(NamedTuple):
    """The batches in which the rest of a queue is assumed to leave.

    Attributes:
        ms: latency of a full batch.
        size: its number of requests.
        by_column: latency of the same subnet at each batch size of the table, ms; inf if it cannot run.
    """

    ms: float
    size: int
    by_column: list[float]


class PricedFronts(BatchFronts):
    """The Pareto-optimal subnets of every batch size, searched by a price of time.

    Args:
        table: the latency table.
    """

    def __init__(self, table: LatencyTable) -> None:
        super().__init__(table)
        self._hulls = [_hull_of(front) for front in self.options]
        self._falls = [_falls(hull) for hull in self._hulls]
        self._hull_ms = [[option.latency_ms for option in hull] for hull in self._hulls]

    def meeting(self, floor: float) -> PricedFronts:
        """Return the fronts of the subnets that meet a floor; see `BatchFronts.meeting`."""
        made = super().meeting(floor)
        made._hulls, made._falls, made._hull_ms = [], [], []
        for front, hull, falls, hull_ms in zip(
            made.options, self._hulls, self._falls, self._hull_ms, strict=True
        ):
            # The vertices that meet the floor stay vertices; only what lies before the first one is new.
            first = bisect_left(hull, floor, key=attrgetter("accuracy"))
            end = bisect_left(front, hull[first].latency_ms, key=attrgetter("latency_ms")) if front else 0
            new = _hull_of(front[: end + 1])
            made._hulls.append(new + hull[first + 1 :])
            made._falls.append(_falls(new) + falls[first:])
            made._hull_ms.append([option.latency_ms for option in new] + hull_ms[first + 1 :])
        return made

    def best(
        self,
        column: int,
        k: int,
        price: float,
        within_ms: float,
        free_ms: float = 0.0,
        spend: bool = False,
    ) -> Option | None:
        """Return the subnet with the greatest k * accuracy - price * max(latency, free_ms) at a batch size.

        Args:
            column: the column of the batch size.
            k: number of requests in the batch.
            price: price of time, percent per ms.
            within_ms: the longest latency allowed.
            free_ms: the time that costs nothing.
            spend: whether the slowest of equally good subnets is returned rather than the fastest.

        Returns:
            The option, or None if no subnet is fast enough.
        """
        latencies = self.latencies[column]
        at = bisect_right(latencies, within_ms) - 1
        if at < 0:
            return None
        nearest = self.options[column][at]
        if price <= 0.0 or nearest.latency_ms <= free_ms:
            return nearest
        hull, slope = self._hulls[column], price / k * (1.0 / _TIE if spend else _TIE)
        last = bisect_right(self._hull_ms[column], within_ms) - 1
        vertex = hull[min(bisect_right(self._falls[column], -slope), last)]
        if nearest.latency_ms > vertex.latency_ms:
            gain = k * (nearest.accuracy - vertex.accuracy) - price * (nearest.latency_ms - vertex.latency_ms)
            if gain > (-_EQUAL if spend else _EQUAL):
                vertex = nearest
        if vertex.latency_ms > free_ms:
            return vertex
        inside = self.options[column][bisect_right(latencies, free_ms) - 1]
        beyond = bisect_right(self._hull_ms[column], free_ms)
        if beyond < len(hull) and hull[beyond].latency_ms <= within_ms:
            more = hull[beyond]
            if k * (more.accuracy - inside.accuracy) - price * (more.latency_ms - free_ms) > _EQUAL:
                return more
        return inside


def _hull_of(front: list[Option]) -> list[Option]:
    """Return the options of a front on its upper concave hull of (latency, accuracy)."""
    points = [(option.latency_ms, option.accuracy, j) for j, option in enumerate(front)]
    return [front[j] for _, _, j in hull_of_front(points)]


def _falls(hull: list[Option]) -> list[float]:
    """Return the slopes between neighbours, with a minus sign, percent per ms."""
    return [-(b.accuracy - a.accuracy) / (b.latency_ms - a.latency_ms) for a, b in pairwise(hull)]


class Hull:
    """The subnets that a number of workers can run all the time, for one minimum accuracy.

    A cell of the table fits if a request that arrives when a worker has just begun such a batch can still
    be answered in time by another batch of the same kind. The time per request of a subnet is its least
    latency / batch size over the cells that fit. The points are the vertices of the upper concave hull of
    (time per request, accuracy), in ascending order of both.

    Args:
        table: the latency table.
        fronts: its fronts for the minimum accuracy.
        workers: the number of workers.
        budget: the margins and the SLO.
        floor: minimum accuracy, percent.

    Attributes:
        fronts: the fronts.
        subnets: the subnet of each point.
        taus: time per request of each point, ms.
        values: accuracy of each point, percent.
        slopes: slope of the hull between neighbouring points, percent per ms, descending.
        prices: for each point, a price of time, percent per ms, at which this point yields the most per
            request: the geometric mean of the slopes on its two sides. At the most accurate point it is 0.
        batch_ms: latency of each point at the batch size that has the least time per request, ms.
        cheapest: the subnet of the first point, which has the least time per request.
        full: the batches of the cheapest subnet.

    Raises:
        PolicyError: no subnet that can run reaches `floor`.
    """

    def __init__(
        self,
        table: LatencyTable,
        fronts: PricedFronts,
        workers: int,
        budget: TimeBudget,
        floor: float = 0.0,
    ) -> None:
        self.fronts = fronts
        cells, fits = _cells(table, workers, budget, floor)
        best, points = _points(table, cells, fits)
        hull = upper_hull(points)
        if not hull:
            raise PolicyError(f"min_accuracy: no subnet that can run reaches {floor} %")
        self.subnets = [i for _, _, i in hull]
        self.taus = [tau for tau, _, _ in hull]
        self.values = [accuracy for _, accuracy, _ in hull]
        self.slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(hull)]
        between = [math.sqrt(steep * flat) for steep, flat in pairwise(self.slopes)]
        self.prices = [1.5 * self.slopes[0], *between, 0.0] if self.slopes else [0.0]
        self._falls = [-slope for slope in self.slopes]
        self.batch_ms = [float(cells[i, best[i]]) for i in self.subnets]
        self.cheapest = self.subnets[0]
        self.full = _chunk(cells, table, self.cheapest, best[self.cheapest])

    def point_at(self, price: float) -> int:
        """Return the point with the greatest accuracy - price * time per request.

        Args:
            price: price of time, percent per ms.
        """
        return bisect_right(self._falls, -price)

    def drain_ms(self, k: int) -> float:
        """Return the latency of the cheapest subnet on k requests, at most a full batch, ms."""
        return min(self.full.by_column[self.fronts.column_for(k)], self.full.ms)


class HullTable(Hull):
    """The hull of all subnets, and the batches of every subnet that the load may ask for.

    Args:
        table: the latency table.
        fronts: its fronts.
        workers: the number of workers.
        budget: the margins and the SLO.

    Attributes:
        quick: the batches with the least time per request among those that take a third of the SLO at most.
        fastest: for each batch size, (least latency in ms, subnet).
    """

    def __init__(self, table: LatencyTable, fronts: PricedFronts, workers: int, budget: TimeBudget) -> None:
        super().__init__(table, fronts, workers, budget)
        cells, fits = _cells(table, workers, budget)
        _, points = _points(table, cells, fits)
        sizes = np.array(table.batch_sizes, dtype=np.float64)
        self._batches = [_batches(table, cells[i], fits[i]) for i in self.subnets]
        quick = np.where(cells <= max(_QUICK * budget.slo_ms, float(cells.min())), cells / sizes, math.inf)
        self.quick = _chunk(cells, table, *map(int, np.unravel_index(quick.argmin(), quick.shape)))
        self.fastest = list(zip(cells.min(axis=0).tolist(), cells.argmin(axis=0).tolist(), strict=True))
        sustained = pareto_front(points, cost=lambda point: point[0], gain=lambda point: point[1])
        self._sustained_taus = [tau for tau, _, _ in sustained]
        self._cycles = [_batches(table, cells[i], fits[i]) for _, _, i in sustained]
        on_hull = np.interp(self._sustained_taus, self.taus, self.values)
        self._below = (on_hull > np.array([accuracy for _, accuracy, _ in sustained]) + _BELOW).tolist()

    def cycle(self, tau_ms: float) -> tuple[int, float]:
        """Return (batch size, latency in ms) of the batches of the most accurate subnet that is sustained.

        Args:
            tau_ms: the worker time per request that the load leaves, ms.

        Returns:
            The smallest batch of this subnet that takes no more time per request; if no subnet is sustained,
            a full batch of the cheapest one.
        """
        at = bisect_right(self._sustained_taus, tau_ms) - 1
        if at >= 0:
            return _smallest(self._cycles[at], tau_ms)
        return self.full.size, self.full.ms

    def below(self, tau_ms: float) -> bool:
        """Return whether the most accurate subnet that is sustained lies below the hull.

        Args:
            tau_ms: the worker time per request that the load leaves, ms.
        """
        at = bisect_right(self._sustained_taus, tau_ms) - 1
        return at >= 0 and self._below[at]

    def usual_ms(self, tau_ms: float) -> tuple[float, float]:
        """Return the latencies of two batches, ms, which limit the accepted backlog.

        The first batch must be possible behind the backlog. The second one, too, unless the fluctuations of
        the load ask for more.

        The two points whose times per request are next to `tau_ms` take turns. The first batch is the
        smallest one that takes no more time per request than the load leaves, or is almost efficient. The
        second one, which is as large or larger, is efficient or takes no more time per request than the load
        leaves. Each result lies between the latencies of the two points as the time per request does. If
        there is time for the most accurate subnet, both batches may take a little more than that time.

        Args:
            tau_ms: the worker time per request that the arrivals leave, ms.
        """
        last = len(self.taus) - 1
        low = max(bisect_right(self.taus, tau_ms) - 1, 0)
        if low == last:
            return self._usual(low, _ALMOST * tau_ms)
        almost_ms, efficient_ms = self._usual(low, tau_ms)
        if tau_ms > self.taus[low]:
            share = (tau_ms - self.taus[low]) / (self.taus[low + 1] - self.taus[low])
            upper_almost_ms, upper_efficient_ms = self._usual(low + 1, 0.0)
            almost_ms += share * max(0.0, upper_almost_ms - almost_ms)
            efficient_ms += share * max(0.0, upper_efficient_ms - efficient_ms)
        return almost_ms, efficient_ms

    def _usual(self, point: int, tau_ms: float) -> tuple[float, float]:
        batches, least_ms = self._batches[point], self.taus[point]
        _, almost_ms = _smallest(batches, max(tau_ms, _ALMOST * least_ms))
        _, efficient_ms = _smallest(batches, max(tau_ms, least_ms))
        return almost_ms, efficient_ms


def _cells(
    table: LatencyTable, workers: int, budget: TimeBudget, floor: float = 0.0
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the latencies, inf where a subnet cannot run or misses the floor, and which cells fit."""
    cells = np.where(np.isnan(table.latency_ms), math.inf, table.latency_ms)
    cells[np.array(table.accuracy) < floor] = math.inf
    return cells, _fitting(cells, workers, budget)


def _points(
    table: LatencyTable, cells: Floats, fits: npt.NDArray[np.bool_]
) -> tuple[list[int], list[tuple[float, float, int]]]:
    """Return each subnet's column of the least time per request, and (that time, accuracy, subnet)."""
    per_request = np.where(fits, cells / np.array(table.batch_sizes, dtype=np.float64), math.inf)
    best: list[int] = per_request.argmin(axis=1).tolist()
    taus = per_request.min(axis=1).tolist()
    return best, [(tau, table.accuracy[i], i) for i, tau in enumerate(taus) if tau < math.inf]


def _fitting(cells: Floats, workers: int, budget: TimeBudget) -> npt.NDArray[np.bool_]:
    """Return the cells that fit; without the margins if none fits with them, or else the fastest ones."""
    twice = 1.0 + 1.0 / workers
    for factor, reserve_ms in ((1.0 + budget.margin, budget.reserve_ms), (1.0, 0.0)):
        fits: npt.NDArray[np.bool_] = cells * (factor * twice) + reserve_ms <= budget.slo_ms
        if fits.any():
            return fits
    fastest: npt.NDArray[np.bool_] = cells <= cells.min()
    return fastest


def _batches(table: LatencyTable, row: Floats, fits: npt.NDArray[np.bool_]) -> list[tuple[int, float]]:
    """Return (batch size, latency in ms) of the cells of one subnet that fit, in ascending batch size."""
    cells = zip(table.batch_sizes, row.tolist(), fits.tolist(), strict=True)
    return [(size, ms) for size, ms, fit in cells if fit]


def _smallest(batches: list[tuple[int, float]], tau_ms: float) -> tuple[int, float]:
    """Return the smallest batch that takes at most `tau_ms` per request; one must."""
    return next((size, ms) for size, ms in batches if ms <= tau_ms * size * _TIE)


def _chunk(cells: Floats, table: LatencyTable, subnet: int, column: int) -> Chunk:
    return Chunk(float(cells[subnet, column]), table.batch_sizes[column], cells[subnet].tolist())
