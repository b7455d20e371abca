"""The hypervolume of a front, by which the tests and benchmarks of the search compare fronts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]


def hypervolume(points: Any, reference: Sequence[float]) -> float:
    """Return the volume of the objective space that points dominate, bounded by a reference point.

    The first objective, the accuracy, is maximised, and all others, the latencies, are minimised. Points that
    are worse than the reference in any objective add nothing.

    Source: Zitzler and Thiele, "Multiobjective optimization using evolutionary algorithms", PPSN 1998.
    """
    worst = np.asarray(reference, dtype=np.float64)
    sign = np.array([-1.0] + [1.0] * (len(worst) - 1))
    return _volume(np.asarray(points, dtype=np.float64).reshape(-1, len(worst)) * sign, worst * sign)


def _volume(costs: Array, worst: Array) -> float:
    """Cut the volume into slices along the last objective, and add up the slices."""
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
