"""Pareto dominance: fronts, and even choices from them.

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
