"""The hypervolume of fronts, by which searches are compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from subnetact.errors import TableError
from subnetact.latency.pareto import Costs, non_dominated


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
