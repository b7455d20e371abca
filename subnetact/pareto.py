"""Pareto fronts, and how good they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from subnetact.errors import TableError

__all__ = ["crowding", "front_of", "hypervolume", "pareto_front", "ranks", "spread"]

Candidate = TypeVar("Candidate")
Costs: TypeAlias = npt.NDArray[np.float64]
"""One row a subnet, one column an objective, each to have less of."""


def pareto_front(
    rows: Iterable[Candidate],
    cost: Callable[[Candidate], float],
    gain: Callable[[Candidate], float],
) -> list[Candidate]:
    """Return the rows that no other row beats, in ascending cost.

    A row is beaten by one that costs no more and gains no less, and is better in one of the two; of
    equal rows the first stays.

    Args:
        rows: any objects.
        cost: what to have less of, latency in ms for example.
        gain: what to have more of, accuracy for example.

    Raises:
        TableError: a cost or gain is NaN.
    """
    valued = [(float(cost(row)), float(gain(row)), row) for row in rows]
    for paid, gained, row in valued:
        if paid != paid or gained != gained:
            raise TableError(f"pareto_front: {row!r} has cost {paid} and gain {gained}; neither may be NaN")
    front: list[Candidate] = []
    best = float("-inf")
    for _, gained, row in sorted(valued, key=lambda v: (v[0], -v[1])):
        if gained > best:
            front.append(row)
            best = gained
    return front


def hypervolume(points: Any, reference: Sequence[float]) -> float:
    """Return how much of the space of objectives the points beat, down to a reference.

    The area (with two objectives) of everything that is at least as good as the reference and that
    some point is at least as good as (Zitzler and Thiele, 1998).

    Args:
        points: rows of (accuracy, latency, ...), of which the accuracy is to be high and all others
            low, of shape (n, objectives).
        reference: the worst of interest, in the same order; what is worse adds nothing.

    Raises:
        TableError: the shapes do not fit, or a number is NaN.
    """
    worst = np.asarray(reference, dtype=np.float64)
    given = np.asarray(points, dtype=np.float64).reshape(-1, len(worst))
    if np.isnan(given).any() or np.isnan(worst).any() or len(given) != len(points):
        raise TableError("hypervolume: points must be rows as long as the reference, without NaN")
    sign = np.array([-1.0] + [1.0] * (len(worst) - 1))
    return _volume(given * sign, worst * sign)


def _volume(costs: Costs, worst: Costs) -> float:
    costs = costs[(costs < worst).all(1)]
    if not len(costs):
        return 0.0
    if costs.shape[1] == 1:
        return float(worst[0] - costs.min())
    costs = costs[np.argsort(costs[:, -1], kind="stable")]
    ends = [*costs[1:, -1], worst[-1]]
    slices = [
        (end - start) * _volume(costs[: i + 1, :-1], worst[:-1])
        for i, (start, end) in enumerate(zip(costs[:, -1], ends, strict=True))
        if end > start
    ]
    return float(sum(slices))


def front_of(costs: Costs) -> list[int]:
    """Return the rows that no other beats, in ascending order of the first column; of equals one."""
    kept: list[int] = []
    for i in np.lexsort(costs.T[::-1]):
        if not kept or not (costs[kept] <= costs[i]).all(1).any():
            kept.append(int(i))
    return kept


def ranks(costs: Costs) -> npt.NDArray[np.int64]:
    """Return 0 for rows that no other beats, 1 for those that only such rows beat, and so on (NSGA-II)."""
    no_worse = np.all(costs[:, None] <= costs[None], axis=2)
    better: npt.NDArray[np.bool_] = np.asarray(no_worse & ~no_worse.T)
    rank = np.full(len(costs), -1)
    level = 0
    while (rank < 0).any():
        left = np.flatnonzero(rank < 0)
        rank[left[better[np.ix_(left, left)].sum(axis=0) == 0]] = level
        level += 1
    return rank


def crowding(costs: Costs, rank: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return how far each row's neighbours of the same rank are apart (NSGA-II); infinite at the ends."""
    distance = np.zeros(len(costs))
    for level in range(int(rank.max(initial=-1)) + 1):
        rows = np.flatnonzero(rank == level)
        for column in costs[rows].T:
            order = np.argsort(column, kind="stable")
            extent = column[order[-1]] - column[order[0]]
            distance[rows[order[[0, -1]]]] = np.inf
            if extent > 0:
                distance[rows[order[1:-1]]] += (column[order[2:]] - column[order[:-2]]) / extent
    return distance


def spread(values: Sequence[float], size: int) -> list[int]:
    """Choose `size` positions of ascending values, evenly over their range; all where there are fewer.

    The ends are among them; each aim in between takes the nearest value after the last one taken.
    """
    n = len(values)
    if size >= n:
        return list(range(n))
    if size < 2:
        return [n - 1][:size]
    aims = np.linspace(values[0], values[-1], size)
    chosen: list[int] = []
    for k, aim in enumerate(aims):
        first = chosen[-1] + 1 if chosen else 0
        last = n - (size - k)  # as many must stay for the aims that follow
        chosen.append(min(range(first, last + 1), key=lambda i: abs(values[i] - aim)))
    return chosen
