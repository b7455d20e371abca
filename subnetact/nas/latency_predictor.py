"""Predicts the latency of a subnet from a few dozen measured subnets, without running it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from subnetact.costs import CostModel
from subnetact.latency.arrays import Floats
from subnetact.nas.prediction_error import PredictionError, held_out_error, training_values
from subnetact.spec import SubnetSpec

RIDGE = 1e-4
"""Strength of the penalty on the squared weights, relative to the strongest feature."""


@dataclass(frozen=True, eq=False)
class LatencyPredictor:
    """A linear model of the latency, with non-negative weights on the costs of each kind of layer.

    The features are those of `CostModel.vector`. Once-for-all and ProxylessNAS look up a latency per layer;
    here the weights are fitted to whole subnets, measured by the engine that will serve them.

    Make one with `LatencyPredictor.fit`, and pass it to `search(..., latency=predictor)`.

    Attributes:
        costs: the cost model that computes the features.
        weights: milliseconds per unit of each feature, of shape (1 + features,); the first entry is the
            constant part of the latency.
        error: the error of predictions in cross-validation.
        batch_size: the batch size that the latencies were measured at.
    """

    costs: CostModel
    weights: Floats
    error: PredictionError
    batch_size: int

    @classmethod
    def fit(
        cls, costs: CostModel, specs: Sequence[SubnetSpec], latency_ms: npt.ArrayLike, batch_size: int = 1
    ) -> LatencyPredictor:
        """Fit a predictor to measured subnets; a few dozen, from the smallest to the largest, are enough.

        The error comes from cross-validation: the subnets are divided into five parts, and each part is
        predicted by a fit to the others. The returned predictor is fitted to all subnets.

        Args:
            costs: the cost model of the supernet. Several predictors may share it.
            specs: measured subnets, at least 8 distinct ones.
            latency_ms: measured latency of each subnet, in ms, of shape (subnets,).
            batch_size: the batch size of the measurements.

        Returns:
            The predictor; its `error` says how good it is.

        Raises:
            SearchError: there are too few subnets, or the latencies are not one positive number per
                subnet.
            SpecError: a specification is not of this supernet.
            MissingExtra: scipy is not installed (`pip install 'subnetact[nas]'`).
        """
        measured = training_values(specs, latency_ms, "latency_ms", positive=True)
        features = np.stack([_features(costs, spec) for spec in specs])
        error = held_out_error(features, measured, lambda f, ms, new: new @ _weights(f, ms), "%")
        return cls(costs, _weights(features, measured), error, batch_size)

    def __call__(self, spec: SubnetSpec) -> float:
        """Return the predicted latency of a subnet in ms; SpecError if it is not of this supernet."""
        return float(_features(self.costs, spec) @ self.weights)


def _features(costs: CostModel, spec: SubnetSpec) -> Floats:
    return np.array([1.0, *costs.vector(spec)])


def _weights(features: Floats, measured: Floats) -> Floats:
    """Return the non-negative weights that minimise the squared relative errors plus a ridge penalty."""
    from scipy.optimize import nnls

    scale = features.max(0)
    scale[scale == 0] = 1.0
    relative = features / scale / measured[:, None]
    penalty = math.sqrt(RIDGE * (relative**2).sum(0).max()) * np.eye(relative.shape[1])
    target = np.concatenate([np.ones(len(relative)), np.zeros(len(penalty))])
    weights, _ = nnls(np.vstack([relative, penalty]), target)
    return np.asarray(weights / scale, dtype=np.float64)
