"""Pareto-optimal subnets and concave hulls of a latency table; policies and bounds share them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from subnetact.latency.pareto import pareto_front
from subnetact.latency.table import LatencyTable

__all__ = ["Option", "cheapest", "largest_batch", "pareto_of_batch", "time_per_request", "upper_hull"]


class Option(NamedTuple):
    """One subnet at one batch size.

    Attributes:
        latency_ms: latency of a batch of that size.
        accuracy: accuracy of the subnet, percent.
        subnet: index of the subnet in the table.
        batch_size: the batch size.
    """

    latency_ms: float
    accuracy: float
    subnet: int
    batch_size: int


def pareto_of_batch(table: LatencyTable, column: int, floor: float = 0.0) -> list[Option]:
    """Return the Pareto-optimal subnets at one batch size.

    Args:
        table: the latency table.
        column: index into `table.batch_sizes`.
        floor: minimum accuracy, percent.

    Returns:
        The subnets that no other one dominates; latency and accuracy both ascend strictly.

    Raises:
        TableError: the accuracy of a subnet is not known.
    """
    table.known_accuracy()
    size = table.batch_sizes[column]
    options = [
        Option(latency, table.accuracy[subnet], subnet, size)
        for subnet, latency in _column(table, column)
        if table.accuracy[subnet] >= floor
    ]
    return pareto_front(options, cost=lambda option: option.latency_ms, gain=lambda option: option.accuracy)


def time_per_request(table: LatencyTable) -> list[tuple[float, int]]:
    """Return the least time per request of every subnet.

    Returns:
        For every subnet (latency / batch size in ms, minimised over batch sizes; the batch size that reaches
        the minimum). The time is inf for a subnet that can run at no batch size.
    """
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
    """Return the subnet with the least time per request among those of at least `floor` percent."""
    return min(
        (tau, -table.accuracy[i], i)
        for i, (tau, _) in enumerate(time_per_request(table))
        if table.accuracy[i] >= floor
    )[2]


def largest_batch(table: LatencyTable, subnet: int) -> int:
    """Return the largest batch size that a subnet can run; the table's largest if it can run none."""
    cells = zip(table.latency_ms[subnet].tolist(), table.batch_sizes, strict=True)
    return max((size for ms, size in cells if not math.isnan(ms)), default=table.batch_sizes[-1])


def upper_hull(points: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Return the upper concave hull of points, from the least x to the greatest y.

    Args:
        points: (x, y, label) of each point; x is a cost and y a gain.

    Returns:
        The vertices in order of x. The slopes between neighbours are positive and fall strictly.
    """
    hull: list[tuple[float, float, int]] = []
    finite = sorted((point for point in points if math.isfinite(point[0])), key=lambda point: point[2])
    for x, y, label in pareto_front(finite, cost=lambda point: point[0], gain=lambda point: point[1]):
        while len(hull) > 1 and (y - hull[-1][1]) * (hull[-1][0] - hull[-2][0]) >= (
            hull[-1][1] - hull[-2][1]
        ) * (x - hull[-1][0]):
            hull.pop()
        hull.append((x, y, label))
    return hull


def _column(table: LatencyTable, column: int) -> list[tuple[int, float]]:
    cells = enumerate(table.latency_ms[:, column].tolist())
    return [(subnet, latency) for subnet, latency in cells if not math.isnan(latency)]
