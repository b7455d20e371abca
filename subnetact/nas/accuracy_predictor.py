"""Predicts the accuracy of a subnet without running it: fitted to measured ones, or as once-for-all does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ofa_adapters.checkpoint import read, unwrap
from subnetact.errors import CheckpointError, SpecError
from subnetact.nas.genes import encoded
from subnetact.nas.prediction_error import PredictionError, held_out_error, training_values
from subnetact.nas.surrogate import Surrogate
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec

HIDDEN_WIDTH, HIDDEN_LAYERS = 400, 3
TUTORIAL_NAMES = {"6.weight": "layers.3.weight", "6.bias": "base_acc"} | {
    f"{2 * i}.{part}": f"layers.{i}.0.{part}" for i in range(HIDDEN_LAYERS) for part in ("weight", "bias")
}
"""The parameter names of the tutorial's predictor, whose last bias is the added mean, and ours."""


class _Network(nn.Module):
    """Three hidden layers and an added mean. Its parameters are named as in ofa's `AccuracyPredictor`."""

    def __init__(self, features: int) -> None:
        super().__init__()
        widths = [features, *[HIDDEN_WIDTH] * HIDDEN_LAYERS]
        hidden = [nn.Sequential(nn.Linear(i, o), nn.ReLU()) for i, o in pairwise(widths)]
        self.layers = nn.Sequential(*hidden, nn.Linear(HIDDEN_WIDTH, 1, bias=False))
        self.base_acc = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map features (N, features) to accuracies (N,), as a share of one."""
        return self.layers(x).squeeze(-1) + self.base_acc  # type: ignore[no-any-return]


def _encoded(space: SubnetSpace, spec: SubnetSpec) -> Any:
    return encoded(space, [space.check(spec)])[0]


class AccuracyPredictor:
    """Predicts the accuracy of a subnet from an encoding of its choices.

    `AccuracyPredictor.fit` makes one of subnets that you have measured, in any space; `from_checkpoint` loads
    a published predictor of once-for-all, a small network. Pass it to `search(..., accuracy=predictor)`. The
    weights of `AccuracyPredictor(encode, n_features)` are random until its `network` is trained.

    Args:
        encode: returns the features of a subnet, of shape (n_features,). For published families use
            `functools.partial(ofa_adapters.encode, supernet.space, image_size=224)`, with
            `encoding="tutorial"` for the predictor of once-for-all's tutorial.
        n_features: number of features.

    Attributes:
        network: an ordinary module that maps features of shape (N, n_features) to accuracies of shape
            (N,), as a share of one. Its parameters are named as in the ofa package. After `fit` it is a
            Gaussian process, whose `predict` maps them to percent.
        error: the error of a fit in cross-validation, in percentage points; None if it was not fitted here.

    Source:
        Cai et al., "Once-for-all", ICLR 2020; ofa/nas/accuracy_predictor.
    """

    def __init__(self, encode: Callable[[SubnetSpec], Any], n_features: int) -> None:
        self.encode = encode
        self.n_features = n_features
        self.network: Any = _Network(n_features).eval()
        self.error: PredictionError | None = None

    @classmethod
    def from_checkpoint(
        cls, checkpoint: str | os.PathLike[str] | Mapping[str, Tensor], encode: Callable[[SubnetSpec], Any]
    ) -> AccuracyPredictor:
        """Load published weights: `ofa_resnet50_acc_predictor.pth` for example, or the tutorial's.

        Args:
            checkpoint: a path, which is read without running pickled code, or a state_dict.
            encode: returns the features of a subnet, by the encoding that the weights were trained with.

        Returns:
            The predictor with these weights.

        Raises:
            CheckpointError: the file cannot be read, or its tensors are not those of a predictor.
        """
        if isinstance(checkpoint, str | os.PathLike):
            tensors = read(checkpoint)
        else:
            tensors = unwrap(checkpoint, "accuracy predictor")
        tensors = {TUTORIAL_NAMES.get(key, key): tensor for key, tensor in tensors.items()}
        try:
            predictor = cls(encode, int(tensors["layers.0.0.weight"].shape[1]))
            predictor.network.load_state_dict(tensors)
        except (KeyError, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"accuracy predictor: the tensors are not those of {HIDDEN_LAYERS} hidden layers of "
                f"{HIDDEN_WIDTH} ({error})"
            ) from error
        return predictor

    @classmethod
    def fit(
        cls, space: SubnetSpace, specs: Sequence[SubnetSpec], accuracy: npt.ArrayLike
    ) -> AccuracyPredictor:
        """Fit a predictor to subnets whose accuracies were measured, in any space; a few dozen are enough.

        What is fitted is the Gaussian process by which `search` selects subnets, not once-for-all's network,
        which needs thousands of subnets. Its features say which choice the subnet takes in every slot. The
        error comes from cross-validation: the subnets are divided into five parts, and each part is
        predicted by a fit to the others. The returned predictor is fitted to all subnets.

        Args:
            space: the space of the supernet.
            specs: measured subnets, at least 8 distinct ones, `space.sample(0, 40)` for example.
            accuracy: measured accuracy of each subnet in percent, of shape (subnets,).

        Returns:
            The predictor; its `error` says how good it is.

        Raises:
            SearchError: there are too few subnets, or there is not one finite accuracy per subnet.
            SpecError: a specification is not of this space.
            MissingExtra: scipy is not installed (`pip install 'subnetact[nas]'`).

        Source:
            Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006.

        Example:
            >>> specs = supernet.space.sample(0, 40)
            >>> predictor = AccuracyPredictor.fit(supernet.space, specs, evaluate(supernet, specs, batches))
            >>> print(predictor.error)
        """
        measured = training_values(specs, accuracy, "accuracy", positive=False)
        features = encoded(space, [space.check(spec) for spec in specs])
        predictor = cls(partial(_encoded, space), features.shape[1])
        predictor.network = Surrogate(features, measured)
        predict = lambda known, percent, new: Surrogate(known, percent).predict(new)  # noqa: E731
        predictor.error = held_out_error(features, measured, predict, "points")
        return predictor

    def __call__(self, spec: SubnetSpec) -> float:
        """Return a subnet's predicted accuracy in percent; SpecError if the encoding does not fit."""
        features = np.asarray(self.encode(spec), dtype=np.float32)
        if features.shape != (self.n_features,):
            raise SpecError(
                f"the accuracy predictor reads {self.n_features} features, the encoding gives "
                f"{features.shape}; use the encoding and the space it was trained with"
            )
        if isinstance(self.network, Surrogate):
            return float(self.network.predict(features[None].astype(np.float64))[0])
        with torch.inference_mode():
            return 100.0 * float(self.network(torch.from_numpy(features)))
