"""Kinds of layers, and the vector of counts per kind that describes what a subnet costs."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from subnetact.operators.layer_traits import traits_of

__all__ = ["FEATURES", "MEASURES", "Vector", "feature", "kind_of"]

Vector: TypeAlias = npt.NDArray[np.int64]
"""One count per entry of `FEATURES`."""

KINDS = ("convolution", "pointwise", "depthwise", "linear", "low", "norm", "product", "other")
"""What a module computes. `product` is a matrix product outside any layer, as in attention; `low` is a linear
layer or convolution at a lower precision."""
MEASURES = ("modules", "macs", "activation_bytes", "weight_bytes")
FEATURES = ("parameters", *(f"{kind}.{measure}" for kind in KINDS for measure in MEASURES))


def kind_of(layer: nn.Module) -> str:
    """Return which of `KINDS` an ordinary module is; of an operator, pass the template."""
    kind = traits_of(layer).kind
    if kind.endswith("convolution"):
        convolution: Any = layer
        if convolution.groups > 1:
            return "depthwise"
        return "pointwise" if set(convolution.kernel_size) == {1} else "convolution"
    return "linear" if kind == "linear" else "norm" if kind.endswith("norm") else "other"


def feature(kind: str, measure: str) -> int:
    """Return the position in `FEATURES` of one of `MEASURES` of one of `KINDS`."""
    return FEATURES.index(f"{kind}.{measure}")
