"""Pareto fronts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from subnetact.errors import TableError

__all__ = ["pareto_front"]

Candidate = TypeVar("Candidate")


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
