"""A Gaussian process that predicts the objectives of subnets, and the selection of the best predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from subnetact.latency.arrays import Floats
from subnetact.latency.pareto import Costs, non_dominated

__all__ = ["Surrogate", "select_by_expected_improvement"]

NOISE_VARIANCES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Variances of the noise that are tried, relative to the variance of the values."""
LENGTH_FACTORS = (0.5, 2.0)
"""Factors by which a length scale is changed to see whether the leave-one-out error falls."""
MOST_SWEEPS = 3
"""Passes over all length scales, at most."""
LARGEST_TUNING_SET = 150
"""Subnets that the length scales and the noise are tuned on. Predictions use the whole training set."""
CURVED_WEIGHT = 0.3
"""Weight of the squared-exponential kernel; the linear kernel has the rest."""
UNCERTAINTY_SHARE = 0.5
"""The predictions are assumed to be this share of their leave-one-out error uncertain. At 1.0 the search
spends too many evaluations on subnets of which little is known."""


class Surrogate:
    """A Gaussian process of a linear and a squared-exponential kernel, with one length scale per group."""

    # Scales and noise minimise the leave-one-out error (Rasmussen and Williams, Gaussian Processes, 5.4.2).

    def __init__(self, features: Floats, values: Floats, groups: Sequence[int]) -> None:
        self._groups = np.asarray(groups)
        self._centre = features.mean(0)
        self._mean, self._scale = float(values.mean()), float(values.std()) or 1.0
        self._spread = float(2 * features.var(0).sum()) or 1.0
        target = (values - self._mean) / self._scale
        self.length_scales = np.ones(int(self._groups.max()) + 1)
        self._noise = self._tune(features[:LARGEST_TUNING_SET], target[:LARGEST_TUNING_SET])
        self._features = features
        self._weights = self._inverse(features, self._noise) @ target

    def _tune(self, features: Floats, target: Floats) -> float:
        """Set the length scales by coordinate descent, and return the noise."""

        def error(noise: float) -> float:
            inverse = self._inverse(features, noise)
            return float((((inverse @ target) / inverse.diagonal()) ** 2).mean())

        best, noise = min((error(noise), noise) for noise in NOISE_VARIANCES)
        for _ in range(MOST_SWEEPS):
            before = best
            for group in range(len(self.length_scales)):
                for step in LENGTH_FACTORS:
                    self.length_scales[group] *= step
                    found = error(noise)
                    if found < best:
                        best = found
                    else:
                        self.length_scales[group] /= step
            best, noise = min((error(noise), noise) for noise in NOISE_VARIANCES)
            if best >= before:
                break
        self.loo_rmse = self._scale * float(best) ** 0.5
        return noise

    def _inverse(self, features: Floats, noise: float) -> Floats:
        inverse = np.linalg.inv(self._kernel(features, features) + noise * np.eye(len(features)))
        return np.asarray(inverse, dtype=np.float64)

    def _kernel(self, one: Floats, two: Floats) -> Floats:
        a, b = ((f - self._centre) / np.sqrt(self._spread) for f in (one, two))
        scaled_a, scaled_b = a / self.length_scales[self._groups], b / self.length_scales[self._groups]
        squares = (scaled_a**2).sum(1)[:, None] + (scaled_b**2).sum(1)[None] - 2 * scaled_a @ scaled_b.T
        curved = CURVED_WEIGHT * np.exp(-np.maximum(squares, 0) / 2)
        kernel: Floats = curved + 2 * (1 - CURVED_WEIGHT) * a @ b.T + 1.0
        return kernel

    def predict(self, features: Floats) -> Floats:
        """Return the mean of the Gaussian process, (subnets,), at features of shape (subnets, features)."""
        mean: Floats = self._mean + self._scale * (self._kernel(features, self._features) @ self._weights)
        return mean


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
    area: Floats = (width * better).sum(1)
    return area
