"""Kinds of layers, and the vector of counts per kind that describes what a subnet costs."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from subnetact.operators.subnet_norm import BATCH_NORMS

__all__ = ["FEATURES", "KINDS", "MEASURES", "MULTIPLYING", "Vector", "feature", "kind_of"]

Vector: TypeAlias = npt.NDArray[np.int64]
"""One count per entry of `FEATURES`."""

KINDS = ("convolution", "pointwise", "depthwise", "linear", "low", "norm", "product", "other")
"""What a module computes. `product` is a matrix product outside any layer, as in attention; `low` is a linear
layer or convolution at a lower precision."""
MEASURES = ("modules", "macs", "activation_bytes", "weight_bytes")
FEATURES = ("parameters", *(f"{kind}.{measure}" for kind in KINDS for measure in MEASURES))

MULTIPLYING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
"""Layers whose multiply-accumulates belong to their own kind; those of all other modules are products."""


def kind_of(layer: nn.Module) -> str:
    """Return which of `KINDS` an ordinary module is.

    Args:
        layer: the module; for an operator, pass its template.
    """
    if isinstance(layer, nn.Linear):
        return "linear"
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if layer.groups > 1:
            return "depthwise"
        return "pointwise" if set(layer.kernel_size) == {1} else "convolution"
    return "norm" if isinstance(layer, (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm)) else "other"


def feature(kind: str, measure: str) -> int:
    """Return the position in `FEATURES` of one of `MEASURES` of one of `KINDS`."""
    return FEATURES.index(f"{kind}.{measure}")
