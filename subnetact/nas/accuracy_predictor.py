"""Predicts the accuracy of a subnet with the published predictors of once-for-all, without running it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ofa_adapters.checkpoint import read, unwrap
from subnetact.errors import CheckpointError, SpecError
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


class AccuracyPredictor:
    """The accuracy predictor of once-for-all, a small network over an encoding of the subnet.

    Pass a predictor to `search(..., accuracy=predictor)`. Its weights are random until they are loaded with
    `from_checkpoint`, or until `network` is trained.

    Args:
        encode: returns the features of a subnet, of shape (n_features,). For published families use
            `functools.partial(ofa_adapters.encode, supernet.space, image_size=224)`, with
            `encoding="tutorial"` for the predictor of once-for-all's tutorial.
        n_features: number of features.

    Attributes:
        network: an ordinary module that maps features of shape (N, n_features) to accuracies of shape
            (N,), as a share of one. Its parameters are named as in the ofa package.

    Source:
        Cai et al., "Once-for-all", ICLR 2020; ofa/nas/accuracy_predictor.
    """

    def __init__(self, encode: Callable[[SubnetSpec], Any], n_features: int) -> None:
        self.encode = encode
        self.n_features = n_features
        self.network = _Network(n_features).eval()

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

    def __call__(self, spec: SubnetSpec) -> float:
        """Return a subnet's predicted accuracy in percent; SpecError if the encoding does not fit."""
        features = np.asarray(self.encode(spec), dtype=np.float32)
        if features.shape != (self.n_features,):
            raise SpecError(
                f"the accuracy predictor reads {self.n_features} features, the encoding gives "
                f"{features.shape}; use the encoding and the space it was trained with"
            )
        with torch.inference_mode():
            return 100.0 * float(self.network(torch.from_numpy(features)))
