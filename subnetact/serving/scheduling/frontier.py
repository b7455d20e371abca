"""Shapes of the accuracy-latency trade-off that policies and bounds share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from subnetact.latency.table import LatencyTable

__all__ = ["Option", "cheapest", "largest_batch", "pareto_of_batch", "time_per_request", "upper_hull"]


class Option(NamedTuple):
    """One subnet at one batch size."""

    latency_ms: float
    accuracy: float
    subnet: int
    batch_size: int


def pareto_of_batch(table: LatencyTable, column: int, floor: float = 0.0) -> list[Option]:
    """The subnets worth running at one batch size: latency and accuracy both strictly ascending.

    Args:
        column: index into `table.batch_sizes`.
        floor: least accuracy, percent, of a subnet that counts.
    """
    table.known_accuracy()
    size = table.batch_sizes[column]
    options = sorted(
        (Option(latency, table.accuracy[subnet], subnet, size) for subnet, latency in _column(table, column)),
        key=lambda option: (option.latency_ms, -option.accuracy, option.subnet),
    )
    front: list[Option] = []
    for option in options:
        if option.accuracy >= floor and (not front or option.accuracy > front[-1].accuracy):
            front.append(option)
    return front


def time_per_request(table: LatencyTable) -> list[tuple[float, int]]:
    """For every subnet: (least latency / batch size in ms, the batch size that reaches it)."""
    best = []
    for row in table.latency_ms.tolist():
        cells = [
            (latency / size, -size)
            for latency, size in zip(row, table.batch_sizes, strict=True)
            if not math.isnan(latency)
        ]
        tau, size = min(cells, default=(math.inf, -table.batch_sizes[-1]))
        best.append((tau, -size))
    return best


def cheapest(table: LatencyTable, floor: float = 0.0) -> int:
    """The subnet with the least time per request among those of at least `floor` percent."""
    return min(
        (tau, -table.accuracy[i], i)
        for i, (tau, _) in enumerate(time_per_request(table))
        if table.accuracy[i] >= floor
    )[2]


def largest_batch(table: LatencyTable, subnet: int) -> int:
    """The largest batch size that a subnet can run; the largest of all where it can run none."""
    cells = zip(table.latency_ms[subnet].tolist(), table.batch_sizes, strict=True)
    return max((size for ms, size in cells if not math.isnan(ms)), default=table.batch_sizes[-1])


def upper_hull(points: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Upper concave hull of (x, y, label), from the least x to the greatest y; slopes fall strictly.

    Points that another one dominates (no more x, no less y) are left out first.
    """
    hull: list[tuple[float, float, int]] = []
    for x, y, label in sorted(points, key=lambda point: (point[0], -point[1], point[2])):
        if not math.isfinite(x) or (hull and y <= hull[-1][1]):
            continue
        while len(hull) > 1 and (y - hull[-1][1]) * (hull[-1][0] - hull[-2][0]) >= (
            hull[-1][1] - hull[-2][1]
        ) * (x - hull[-1][0]):
            hull.pop()
        hull.append((x, y, label))
    return hull


def _column(table: LatencyTable, column: int) -> list[tuple[int, float]]:
    cells = enumerate(table.latency_ms[:, column].tolist())
    return [(subnet, latency) for subnet, latency in cells if not math.isnan(latency)]
