"""Accuracy of a subnet without running it, by once-for-all's published predictors."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from subnetact.errors import CheckpointError, SpecError
from subnetact.spec import SubnetSpec

__all__ = ["AccuracyPredictor"]

HIDDEN, LAYERS = 400, 3
PERCENT = 100.0
"""The network answers with a share of one."""


class _Network(nn.Module):
    """Three hidden layers and a mean that is added; names as in ofa's `AccuracyPredictor`."""

    def __init__(self, features: int) -> None:
        super().__init__()
        widths = [features, *[HIDDEN] * LAYERS]
        hidden = [nn.Sequential(nn.Linear(i, o), nn.ReLU()) for i, o in pairwise(widths)]
        self.layers = nn.Sequential(*hidden, nn.Linear(HIDDEN, 1, bias=False))
        self.base_acc = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map features (N, features) to accuracies (N,), as a share of one."""
        return self.layers(x).squeeze(-1) + self.base_acc  # type: ignore[no-any-return]


class AccuracyPredictor:
    """Once-for-all's accuracy predictor (Cai et al., ICLR'20; ofa/nas/accuracy_predictor).

    A function of a subnet, for `search(..., accuracy=predictor)`. Its weights are random until they
    are loaded, or trained: `network` is an ordinary module from features to a share of one.

    Args:
        encode: subnet -> features of shape (n_features,). For published families that is
            `functools.partial(ofa_adapters.encode, supernet.space, image_size=224)`, with
            `encoding="tutorial"` for the predictor of once-for-all's tutorial.
        n_features: how many features there are.
    """

    def __init__(self, encode: Callable[[SubnetSpec], Any], n_features: int) -> None:
        self.encode = encode
        self.n_features = n_features
        self.network = _Network(n_features).eval()

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | os.PathLike[str] | Mapping[str, Tensor],
        encode: Callable[[SubnetSpec], Any],
    ) -> AccuracyPredictor:
        """Load published weights: `ofa_resnet50_acc_predictor.pth`, the tutorial's `acc_predictor.pth` ...

        Args:
            checkpoint: a path, read without unpickling code, or a state_dict.
            encode: as for the class; it must be the encoding that the weights were trained with.

        Raises:
            CheckpointError: the file is unreadable, or its tensors are not a predictor's.
        """
        tensors = _read(checkpoint)
        try:
            predictor = cls(encode, int(tensors["layers.0.0.weight"].shape[1]))
            predictor.network.load_state_dict(tensors)
        except (KeyError, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"accuracy predictor: the tensors are not those of {LAYERS} hidden layers of {HIDDEN} "
                f"({error})"
            ) from error
        return predictor

    @overload
    def __call__(self, specs: SubnetSpec) -> float: ...
    @overload
    def __call__(self, specs: Sequence[SubnetSpec]) -> list[float]: ...
    def __call__(self, specs: SubnetSpec | Sequence[SubnetSpec]) -> float | list[float]:
        """Return the predicted accuracy in percent: one number for one subnet, else a list.

        Raises:
            SpecError: the encoding has not as many features as the network reads.
        """
        given = [specs] if isinstance(specs, SubnetSpec) else list(specs)
        if not given:
            return []
        features = np.stack([np.asarray(self.encode(spec), dtype=np.float32) for spec in given])
        if features.shape[1:] != (self.n_features,):
            raise SpecError(
                f"the accuracy predictor reads {self.n_features} features, the encoding gives "
                f"{features.shape[1:]}; use the encoding and the space it was trained with"
            )
        with torch.inference_mode():
            percent = [PERCENT * share for share in self.network(torch.from_numpy(features)).tolist()]
        return percent[0] if isinstance(specs, SubnetSpec) else percent

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights under ofa's names."""
        return self.network.state_dict()


def _read(checkpoint: str | os.PathLike[str] | Mapping[str, Tensor]) -> dict[str, Tensor]:
    content: Any = checkpoint
    if isinstance(checkpoint, str | os.PathLike):
        try:
            content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"{checkpoint}: no such file") from error
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise CheckpointError(
                f"{checkpoint}: not a checkpoint, or more than tensors ({error})"
            ) from error
    if isinstance(content, Mapping):
        content = content.get("state_dict", content)
    if not isinstance(content, Mapping) or not all(isinstance(t, Tensor) for t in content.values()):
        raise CheckpointError("accuracy predictor: the checkpoint holds no state_dict")
    return {_name(key): tensor for key, tensor in content.items()}


def _name(key: str) -> str:
    """Map a name of the tutorial's plain Sequential, whose last bias is the added mean."""
    found = re.fullmatch(r"(\d+)\.(weight|bias)", key)
    if found is None:
        return key
    layer = int(found[1]) // 2
    if layer < LAYERS:
        return f"layers.{layer}.0.{found[2]}"
    return f"layers.{LAYERS}.weight" if found[2] == "weight" else "base_acc"
