"""A Gaussian process that predicts the objectives of subnets, and the selection of the best predictions."""

from __future__ import annotations

import math

import numpy as np

from subnetact.latency.arrays import Floats
from subnetact.latency.pareto import Costs, non_dominated

NOISE_VARIANCES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Variances of the noise that are tried, relative to the variance of the values."""
CURVED_WEIGHT = 0.3
"""Weight of the squared-exponential kernel; the linear kernel has the rest."""
UNCERTAINTY_SHARE = 0.5
"""The predictions are assumed to be this share of their leave-one-out error uncertain. At 1.0 the search
spends too many evaluations on subnets of which little is known."""


class Surrogate:
    """A Gaussian process of a linear and a squared-exponential kernel."""

    # The noise minimises the leave-one-out error (Rasmussen and Williams, Gaussian Processes, 5.4.2).

    def __init__(self, features: Floats, values: Floats) -> None:
        self._features, self._centre = features, features.mean(0)
        self._mean, self._scale = float(values.mean()), float(values.std()) or 1.0
        self._spread = float(2 * features.var(0).sum()) or 1.0
        target, kernel = (values - self._mean) / self._scale, self._kernel(features, features)
        least = math.inf
        for noise in NOISE_VARIANCES:
            inverse = np.linalg.inv(kernel + noise * np.eye(len(features)))
            weights = inverse @ target
            error = float(((weights / inverse.diagonal()) ** 2).mean())
            if error < least:
                least, self._weights = error, weights
        self.loo_rmse = self._scale * math.sqrt(least)

    def _kernel(self, one: Floats, two: Floats) -> Floats:
        a, b = ((f - self._centre) / np.sqrt(self._spread) for f in (one, two))
        products = a @ b.T
        squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * products
        curved = CURVED_WEIGHT * np.exp(-np.maximum(squares, 0) / 2)
        return curved + 2 * (1 - CURVED_WEIGHT) * products + 1.0  # type: ignore[no-any-return]

    def predict(self, features: Floats) -> Floats:
        """Return the mean of the Gaussian process, (subnets,), at features of shape (subnets, features)."""
        return self._mean + self._scale * (self._kernel(features, self._features) @ self._weights)


def select_by_expected_improvement(predicted: Costs, loo_rmse: float, known: Costs, count: int) -> list[int]:
    """Return the positions of those that are expected to add the most hypervolume, the best first."""
    # The expected improvement of Emmerich et al. (2006): errors of the accuracy, the first objective, follow
    # a logistic distribution, latencies are exact, and subnets selected before are as predicted.
    worst = known.max(0)
    fronts = [known[non_dominated(known[:, [0, j]])][:, [0, j]] for j in range(1, known.shape[1])]
    extents = [float(np.ptp(known[:, j])) or 1.0 for j in range(1, known.shape[1])]
    deviation = max(UNCERTAINTY_SHARE * loo_rmse, 1e-9 * (float(np.ptp(known[:, 0])) or 1.0))
    scale = deviation * math.sqrt(3) / math.pi
    chosen: list[int] = []
    for _ in range(min(count, len(predicted))):
        gain = np.zeros(len(predicted))
        for j, (front, extent) in enumerate(zip(fronts, extents, strict=True), 1):
            gain += _expected_area(predicted[:, [0, j]], front, worst[[0, j]], scale) / extent
        gain[chosen] = -1.0
        chosen.append(int(np.argmax(gain)))
        for j in range(1, known.shape[1]):
            extended = np.vstack([fronts[j - 1], predicted[chosen[-1]][[0, j]]])
            fronts[j - 1] = extended[non_dominated(extended)]
    return chosen


def _expected_area(predicted: Costs, front: Costs, worst: Floats, scale: float) -> Floats:
    """Return the area that each predicted point is expected to add to a front of two objectives."""
    order = np.argsort(front[:, 1])
    accuracy_cost = np.array([worst[0], *front[order, 0]])
    ends = np.array([*front[order, 1], max(worst[1], front[:, 1].max())])
    starts = np.array([0.0, *front[order, 1]])
    width = np.clip(ends[None] - np.maximum(starts[None], predicted[:, 1:]), 0, None)
    better: Floats = scale * np.logaddexp(0, (accuracy_cost[None] - predicted[:, :1]) / scale)
    return (width * better).sum(1)  # type: ignore[no-any-return]
