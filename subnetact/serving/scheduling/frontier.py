"""Pareto-optimal subnets and concave hulls of a latency table; policies and bounds share them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np

from subnetact.latency.pareto import pareto_front
from subnetact.latency.table import LatencyTable

Rank = TypeVar("Rank", bound=tuple[float, ...])
Point = TypeVar("Point", bound=tuple[Any, ...])


class Option(NamedTuple):
    """One subnet, by its index in the table and with its accuracy, percent, at one batch size."""

    latency_ms: float
    accuracy: float
    subnet: int
    batch_size: int


def pareto_of_batch(table: LatencyTable, column: int) -> list[Option]:
    """Return the Pareto-optimal subnets at one batch size; latency and accuracy both ascend strictly."""
    rows = zip(table.latency_ms[:, column].tolist(), table.known_accuracy(), strict=True)
    size = table.batch_sizes[column]
    options = [Option(ms, accuracy, i, size) for i, (ms, accuracy) in enumerate(rows) if ms == ms]
    return pareto_front(options, cost=lambda option: option.latency_ms, gain=lambda option: option.accuracy)


def time_per_request(table: LatencyTable) -> list[float]:
    """Return for every subnet its least latency / batch size, ms; inf if it runs at no batch size."""
    per_request = table.latency_ms / np.array(table.batch_sizes)
    taus: list[float] = np.where(np.isnan(per_request), math.inf, per_request).min(axis=1).tolist()
    return taus


def least_from(floors: Sequence[float], percent: Sequence[float], ranks: Sequence[Rank]) -> list[Rank]:
    """Return, for each of `floors` (ascending), the least rank of the subnets that reach it; one must."""
    falling = sorted(zip(percent, ranks, strict=True), reverse=True)
    least = list(accumulate((rank for _, rank in falling), min))  # of the first one, two, three ...
    return [least[bisect_right(falling, -floor, key=lambda pair: -pair[0]) - 1] for floor in floors]


def cheapest_from(table: LatencyTable, accuracies: Sequence[float]) -> list[int]:
    """Return, for each of `accuracies` (ascending), the subnet with the least time per request from it on."""
    ranks = [(tau, -table.accuracy[i], i) for i, tau in enumerate(time_per_request(table))]
    return [subnet for _, _, subnet in least_from(accuracies, table.accuracy, ranks)]


def largest_batches(table: LatencyTable) -> list[int]:
    """Return, for each subnet, the largest batch size that it can run; the table's largest if none."""
    sizes = np.array(table.batch_sizes)[::-1]
    found: list[int] = sizes[(~np.isnan(table.latency_ms[:, ::-1])).argmax(axis=1)].tolist()
    return found


def upper_hull(points: Iterable[Point]) -> list[Point]:
    """Return the upper concave hull of points (cost, gain, ...), from the least cost on."""
    finite = [point for point in points if math.isfinite(point[0])]
    return hull_of_front(pareto_front(finite, cost=lambda point: point[0], gain=lambda point: point[1]))


def hull_of_front(points: Iterable[Point]) -> list[Point]:
    """Return the upper concave hull of points of which cost and gain ascend strictly; see `upper_hull`."""
    hull: list[Point] = []
    for point in points:
        x, y, *_ = point
        while len(hull) > 1 and (y - hull[-1][1]) * (hull[-1][0] - hull[-2][0]) >= (
            hull[-1][1] - hull[-2][1]
        ) * (x - hull[-1][0]):
            hull.pop()
        hull.append(point)
    return hull
