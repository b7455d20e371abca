"""How far a predictor is off for subnets that it was not fitted to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from subnetact.errors import SearchError, extra_needed
from subnetact.latency.arrays import Floats
from subnetact.spec import SubnetSpec

FEWEST_SUBNETS = 8
"""Distinct measured subnets that a fit needs at least."""
FOLDS = 5
"""Parts of the measured subnets in cross-validation."""


@dataclass(frozen=True)
class PredictionError:
    """How far predictions are off for subnets that were not used for the fit.

    Attributes:
        mean_percent: mean of the absolute errors, in percent of the measured latency; of accuracies, in
            percentage points.
        worst_percent: largest absolute error, in the same unit.
        rank_correlation: Spearman's rank correlation of predicted and measured values. It is 1 if
            the order is right, and NaN if all values are equal.
        train: number of subnets that each prediction was fitted to, at least.
        test: number of subnets that were predicted.
        unit: "%" or "points".
    """

    mean_percent: float
    worst_percent: float
    rank_correlation: float
    train: int
    test: int
    unit: str = "%"

    def __str__(self) -> str:
        return (
            f"{self.mean_percent:.1f} {self.unit} off on average, {self.worst_percent:.1f} {self.unit} at "
            f"worst, rank correlation {self.rank_correlation:.3f}, over {self.test} subnets, each predicted "
            f"from {self.train} others"
        )


def training_values(specs: Sequence[SubnetSpec], values: npt.ArrayLike, name: str, positive: bool) -> Floats:
    """Return what a predictor is fitted to, (subnets,); raise SearchError if it cannot be."""
    require_scipy()
    measured = np.asarray(values, dtype=np.float64)
    least, kind = (0.0, "positive") if positive else (-math.inf, "finite")
    if measured.shape != (len(specs),) or not (np.isfinite(measured) & (measured > least)).all():
        raise SearchError(f"{name}: one {kind} number for each subnet is needed")
    if (distinct := len(set(specs))) < FEWEST_SUBNETS:
        raise SearchError(f"specs: a fit needs at least {FEWEST_SUBNETS} distinct subnets, got {distinct}")
    return measured


def held_out_error(
    features: Floats, measured: Floats, predict: Callable[[Floats, Floats, Floats], Floats], unit: str
) -> PredictionError:
    """Return the error of cross-validation: each of five parts is predicted by a fit to the others.

    Args:
        features: what describes each subnet, (subnets, features).
        measured: the value of each subnet, (subnets,).
        predict: takes features and values to fit to, and the features of others; returns the others' values.
        unit: "%" of the measured value, or "points", of which the values are.
    """
    from scipy.stats import spearmanr

    part = np.random.default_rng(0).permutation(len(measured)) % FOLDS
    predicted = np.empty(len(measured))
    for fold in range(FOLDS):
        rest = part != fold
        predicted[~rest] = predict(features[rest], measured[rest], features[~rest])
    off = 100 * np.abs(predicted / measured - 1) if unit == "%" else np.abs(predicted - measured)
    equal = np.ptp(predicted) == 0 or np.ptp(measured) == 0
    rank = math.nan if equal else float(spearmanr(predicted, measured).statistic)
    train = int(len(measured) - np.bincount(part).max())
    return PredictionError(float(off.mean()), float(off.max()), rank, train, len(measured), unit)


def require_scipy() -> None:
    """Raise MissingExtra without scipy, before subnets are measured for a fit."""
    with extra_needed("fitted predictors need scipy; pip install 'subnetact[nas]'"):
        import scipy.optimize
        import scipy.stats  # noqa: F401
