"""Latency of a subnet without running it, from a few dozen that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from subnetact.costs.model import CostModel
from subnetact.errors import SearchError
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["LatencyPredictor", "PredictionError"]

Array: TypeAlias = npt.NDArray[np.float64]

FEWEST = 8
RIDGE = 1e-4
"""Pull of the weights towards zero, as a share of the strongest feature's."""
SWEEPS, SETTLED = 5000, 1e-9


@dataclass(frozen=True)
class PredictionError:
    """How far predictions were off for subnets that the prediction had not seen.

    Attributes:
        mean_percent: mean of the absolute errors, in percent of the measured latency.
        worst_percent: the largest.
        rank_correlation: of predicted and measured latencies (Spearman), 1 where the order is right.
        train: subnets behind each prediction.
        test: subnets predicted.
    """

    mean_percent: float
    worst_percent: float
    rank_correlation: float
    train: int
    test: int

    def __str__(self) -> str:
        return (
            f"{self.mean_percent:.1f} % off on average, {self.worst_percent:.1f} % at worst, rank "
            f"correlation {self.rank_correlation:.3f}, over {self.test} subnets, each predicted from "
            f"{self.train} others"
        )


class LatencyPredictor:
    """A sum of costs, none negative, over the kinds of layers: operations, bytes, and calls.

    A function of a subnet, for `search(..., latency=predictor)`; made by `fit`. ProxylessNAS and
    once-for-all look up latencies layer by layer; here the price of each kind of layer is fitted to
    latencies of whole subnets, so that the engine that will serve them is what is measured.

    Attributes:
        error: of predictions for subnets that the prediction had not seen.
        batch_size: what the latencies are of.
    """

    def __init__(self, costs: CostModel, weights: Array, error: PredictionError, batch_size: int) -> None:
        self.costs = costs
        self.weights = weights
        self.error = error
        self.batch_size = batch_size

    @classmethod
    def fit(
        cls,
        supernet: Supernet,
        specs: Sequence[SubnetSpec],
        latency_ms: Sequence[float] | npt.NDArray[Any],
        batch_size: int = 1,
        input_shape: Sequence[int] | None = None,
        costs: CostModel | None = None,
        folds: int = 5,
        seed: int = 0,
    ) -> LatencyPredictor:
        """Fit the prices of layers to measured subnets; a few dozen, from the smallest to the largest.

        The error is of cross-validation: the subnets are dealt into `folds` parts, and each part is
        predicted by a fit to the others. The predictor itself is a fit to all.

        Args:
            supernet: whose subnets they are.
            specs: measured subnets, at least 8 distinct ones.
            latency_ms: of each, in milliseconds.
            batch_size: what they were measured at.
            input_shape: of one input; either this or `costs` is needed.
            costs: a cost model of this supernet, to be shared with other predictors.
            folds: parts that the measured subnets are dealt into, at least 2.
            seed: of the dealing.

        Raises:
            SearchError: too few subnets, or latencies that are not positive numbers, one a subnet.
            SpecError: a specification is not of this supernet.
        """
        measured = np.asarray(latency_ms, dtype=np.float64)
        if measured.shape != (len(specs),) or not np.isfinite(measured).all() or (measured <= 0).any():
            raise SearchError("latency_ms: one positive number for each subnet is needed")
        if len(set(specs)) < max(FEWEST, folds) or folds < 2:
            raise SearchError(
                f"specs: a fit needs at least {max(FEWEST, folds)} distinct subnets and 2 folds, got "
                f"{len(set(specs))} and {folds}"
            )
        if costs is None:
            if input_shape is None:
                raise SearchError("input_shape: give the shape of one input, or a cost model")
            costs = CostModel(supernet, input_shape)
        features = np.stack([_features(costs, supernet.space.check(spec)) for spec in specs])
        part = np.random.default_rng(seed).permutation(len(specs)) % folds
        predicted = np.empty(len(specs))
        for fold in range(folds):
            rest = part != fold
            predicted[~rest] = features[~rest] @ _prices(features[rest], measured[rest])
        off = 100 * np.abs(predicted / measured - 1)
        error = PredictionError(
            float(off.mean()),
            float(off.max()),
            _rank_correlation(predicted, measured),
            int(len(specs) - np.bincount(part).max()),
            len(specs),
        )
        return cls(costs, _prices(features, measured), error, batch_size)

    @overload
    def __call__(self, specs: SubnetSpec) -> float: ...
    @overload
    def __call__(self, specs: Sequence[SubnetSpec]) -> list[float]: ...
    def __call__(self, specs: SubnetSpec | Sequence[SubnetSpec]) -> float | list[float]:
        """Return the predicted latency in milliseconds: one number for one subnet, else a list."""
        if isinstance(specs, SubnetSpec):
            return float(_features(self.costs, specs) @ self.weights)
        return [float(_features(self.costs, spec) @ self.weights) for spec in specs]


def _features(costs: CostModel, spec: SubnetSpec) -> Array:
    return np.array([1.0, *costs.vector(spec)])


def _prices(features: Array, measured: Array) -> Array:
    """Return weights >= 0 that make the squares of the relative errors small, by coordinate descent."""
    scale = features.max(0)
    scale[scale == 0] = 1.0
    a = features / scale / measured[:, None]
    gram, aim = a.T @ a, a.sum(0)
    gram[np.diag_indices_from(gram)] += RIDGE * gram.diagonal().max()
    weights = np.zeros(len(aim))
    for _ in range(SWEEPS):
        before = weights.copy()
        for i in range(len(aim)):
            weights[i] = max(0.0, weights[i] + (aim[i] - gram[i] @ weights) / gram[i, i])
        if np.abs(weights - before).max() <= SETTLED * max(np.abs(weights).max(), math.ulp(1.0)):
            break
    prices: Array = weights / scale
    return prices


def _rank_correlation(one: Array, two: Array) -> float:
    first, second = _ranks(one), _ranks(two)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return math.nan
    return float(np.asarray(np.corrcoef(np.stack([first, second])))[0, 1])


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends: Array = np.cumsum(counts).astype(np.float64)
    return (ends - (counts - 1) / 2)[inverse]  # equal values share the mean of their ranks
