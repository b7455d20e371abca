"""A guess at the objectives of subnets not evaluated yet, from those that were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from subnetact.pareto import Costs, non_dominated

__all__ = ["Surrogate", "promising"]

Array: TypeAlias = npt.NDArray[np.float64]

NOISES = (1e-4, 1e-3, 1e-2, 1e-1)
STEPS = (0.5, 2.0)
SWEEPS = 3
TUNED_ON = 150
"""Subnets behind the settings; all given ones are behind the predictions."""
CURVED = 0.3
"""Share of the prior that is not linear in the features."""
BOLD = 0.5
"""Share of the doubt that counts as a chance; all of it tries too much where little is known."""


class Surrogate:
    """A Gaussian process: linear in the features, plus what is smooth (Rasmussen and Williams, 2006).

    How far it reaches along each group of features, and how noisy the values are, are settings that
    best predict each given subnet from the others.

    Args:
        features: of shape (subnets, features), the most telling subnets first.
        values: of shape (subnets,).
        groups: for each feature the number of its group, from 0.

    Attributes:
        doubt: root mean square of the errors for subnets left out.
    """

    def __init__(self, features: Array, values: Array, groups: Sequence[int]) -> None:
        self._groups = np.asarray(groups)
        self._centre = features.mean(0)
        self._mean, self._scale = float(values.mean()), float(values.std()) or 1.0
        self._spread = float(2 * features.var(0).sum()) or 1.0
        target = (values - self._mean) / self._scale
        self._reach = np.ones(int(self._groups.max()) + 1)
        self._noise = self._tune(features[:TUNED_ON], target[:TUNED_ON])
        self._features = features
        self._weights = self._inverse(features, self._noise) @ target

    def _tune(self, features: Array, target: Array) -> float:
        def error(noise: float) -> float:
            inverse = self._inverse(features, noise)
            return float((((inverse @ target) / inverse.diagonal()) ** 2).mean())

        best, noise = min((error(noise), noise) for noise in NOISES)
        for _ in range(SWEEPS):
            before = best
            for group in range(len(self._reach)):
                for step in STEPS:
                    self._reach[group] *= step
                    found = error(noise)
                    if found < best:
                        best = found
                    else:
                        self._reach[group] /= step
            best, noise = min((error(noise), noise) for noise in NOISES)
            if best >= before:
                break
        self.doubt = self._scale * float(best) ** 0.5
        return noise

    def _inverse(self, features: Array, noise: float) -> Array:
        inverse = np.linalg.inv(self._kernel(features, features) + noise * np.eye(len(features)))
        return np.asarray(inverse, dtype=np.float64)

    def _kernel(self, one: Array, two: Array) -> Array:
        a, b = ((f - self._centre) / np.sqrt(self._spread) for f in (one, two))
        near, close = a / self._reach[self._groups], b / self._reach[self._groups]
        squares = (near**2).sum(1)[:, None] + (close**2).sum(1)[None] - 2 * near @ close.T
        kernel: Array = CURVED * np.exp(-np.maximum(squares, 0) / 2) + 2 * (1 - CURVED) * a @ b.T + 1.0
        return kernel

    def predict(self, features: Array) -> Array:
        """Return what the values of other subnets are expected to be."""
        mean: Array = self._mean + self._scale * (self._kernel(features, self._features) @ self._weights)
        return mean


def promising(guesses: Costs, doubt: float, known: Costs, count: int) -> list[int]:
    """Choose rows that are expected to add the most hypervolume, each as if the last ones were true.

    The expected improvement of the hypervolume (Emmerich et al., 2006), with a logistic law of errors.
    With several latencies the improvements of accuracy over each of them, in units of their extents,
    are added.

    Args:
        guesses: objectives, each to have less of and the accuracy first, of shape (subnets, objectives).
        doubt: standard deviation of the guessed accuracies.
        known: objectives of the subnets evaluated so far.
        count: how many to choose.
    """
    worst = known.max(0)
    fronts = [known[non_dominated(known[:, [0, j]])][:, [0, j]] for j in range(1, known.shape[1])]
    extents = [float(np.ptp(known[:, j])) or 1.0 for j in range(1, known.shape[1])]
    scale = max(BOLD * doubt, 1e-9 * (float(np.ptp(known[:, 0])) or 1.0)) * math.sqrt(3) / math.pi
    chosen: list[int] = []
    for _ in range(min(count, len(guesses))):
        gain = np.zeros(len(guesses))
        for j, (front, extent) in enumerate(zip(fronts, extents, strict=True), 1):
            gain += _expected_area(guesses[:, [0, j]], front, worst[[0, j]], scale) / extent
        gain[chosen] = -1.0
        chosen.append(int(np.argmax(gain)))
        for j in range(1, known.shape[1]):
            extended = np.vstack([fronts[j - 1], guesses[chosen[-1]][[0, j]]])
            fronts[j - 1] = extended[non_dominated(extended)]
    return chosen


def _expected_area(guesses: Costs, front: Costs, worst: Array, scale: float) -> Array:
    order = np.argsort(front[:, 1])
    level = np.array([worst[0], *front[order, 0]])
    ends = np.array([*front[order, 1], max(worst[1], front[:, 1].max())])
    starts = np.array([0.0, *front[order, 1]])
    width = np.clip(ends[None] - np.maximum(starts[None], guesses[:, 1:]), 0, None)
    better: Array = scale * np.logaddexp(0, (level[None] - guesses[:, :1]) / scale)
    area: Array = (width * better).sum(1)
    return area
