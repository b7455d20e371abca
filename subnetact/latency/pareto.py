"""Pareto dominance: fronts, their hypervolume, and even choices from them.

A point *dominates* another one if no objective of the first is worse and at least one is better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from subnetact.errors import TableError

Item = TypeVar("Item")
Costs: TypeAlias = npt.NDArray[np.float64]
"""Points of shape (points, objectives). Every objective is to be minimised."""


def pareto_front(
    items: Iterable[Item], cost: Callable[[Item], float], gain: Callable[[Item], float]
) -> list[Item]:
    """Return the items that no other item dominates, in ascending cost.

    Of items with the same cost and the same gain the first one is returned.

    Args:
        items: any objects.
        cost: returns what is to be minimised, for example the latency in ms.
        gain: returns what is to be maximised, for example the accuracy in percent.

    Returns:
        The Pareto front; both cost and gain ascend strictly along it.

    Raises:
        TableError: a cost or gain is NaN.
    """
    given = list(items)
    costs = np.empty((len(given), 2))
    for i, item in enumerate(given):
        paid, gained = float(cost(item)), float(gain(item))
        if paid != paid or gained != gained:
            raise TableError(f"pareto_front: {item!r} has cost {paid} and gain {gained}; neither may be NaN")
        costs[i] = paid, -gained
    return [given[i] for i in non_dominated(costs)]


def hypervolume(points: npt.ArrayLike, reference: Sequence[float] | None = None) -> float:
    """Return the volume of the objective space that points dominate, bounded by a reference point.

    It measures a whole front by one number: the larger, the better. Points that are worse than the reference
    in an objective add nothing, nor do points that another one dominates.

    Args:
        points: (points, objectives); the first objective, for example the accuracy in percent, is maximised,
            and all others, for example latencies in ms, are minimised.
        reference: one number per objective. By default the worst of the points themselves, objective by
            objective. Give the same reference to hypervolumes that are compared with each other.

    Returns:
        The volume, in the product of the objectives' units: percent times ms, for example.

    Raises:
        TableError: the points have no shape (points, objectives), a number is NaN or infinite, or there is
            not one number of the reference per objective.

    Source:
        Zitzler and Thiele, "Multiobjective optimization using evolutionary algorithms", PPSN 1998.

    Example:
        >>> hypervolume([(70.0, 1.0), (75.0, 2.0)], reference=(60.0, 4.0))
        40.0
    """
    gains = _numbers(points)
    if gains.ndim != 2 or not len(gains) or not np.isfinite(gains).all():
        raise TableError(
            f"points: finite numbers of shape (points, objectives) are needed, got {gains.shape}"
        )
    sign = np.array([-1.0] + [1.0] * (gains.shape[1] - 1))
    worst = (gains * sign).max(0) * sign if reference is None else _numbers(reference)
    if worst.shape != sign.shape or not np.isfinite(worst).all():
        raise TableError(f"reference: {reference!r} must be {len(sign)} finite numbers, one per objective")
    return _volume(gains * sign, worst * sign)


def _numbers(values: npt.ArrayLike) -> Costs:
    """Return an array of numbers; an empty one, which every check refuses, for anything else."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        return np.empty(0)


def _volume(costs: Costs, worst: Costs) -> float:
    """Add up what each point dominates beyond those that are better in the last objective (While, 2012)."""
    costs = costs[(costs < worst).all(1)]
    costs = costs[non_dominated(costs)]
    sides = worst - costs
    if costs.shape[1] == 1 or not len(costs):
        return float(sides.sum())
    if costs.shape[1] == 2:  # in the order of the first, the second descends
        return float(-np.diff(worst[0] - costs[:, 0], append=0.0) @ sides[:, 1])
    order = np.argsort(-costs[:, -1], kind="stable")
    costs, sides = costs[order, :-1], sides[order]
    beyond = [
        side[-1] * (side[:-1].prod() - _volume(np.maximum(point, costs[i:]), worst[:-1]))
        for i, (point, side) in enumerate(zip(costs, sides, strict=True), 1)
    ]
    return float(sum(beyond))


def non_dominated(costs: Costs) -> list[int]:
    """Return the positions of points that no other dominates, by the first objective; of equals the first."""
    order = np.lexsort(costs.T[::-1])
    if not len(order):
        return []
    if costs.shape[1] == 2:
        second = costs[order, 1]
        lower = second[1:] < np.minimum.accumulate(second)[:-1]
        return [int(i) for i in order[np.concatenate([[True], lower])]]
    kept: list[int] = []
    for i in order:
        if not kept or not (costs[kept] <= costs[i]).all(1).any():
            kept.append(int(i))
    return kept


def spread(values: Sequence[float], size: int) -> list[int]:
    """Choose `size` positions of ascending values that are spread evenly over their range, ends included."""
    n = len(values)
    if size >= n:
        return list(range(n))
    if size < 2:
        return [n - 1][:size]
    targets = np.linspace(values[0], values[-1], size)
    chosen: list[int] = []
    for k, target in enumerate(targets):
        first = chosen[-1] + 1 if chosen else 0
        last = n - (size - k)  # the targets that follow need one position each
        chosen.append(min(range(first, last + 1), key=lambda i: abs(values[i] - target)))
    return chosen
