"""Kinds of layers, and the vector of counts per kind that describes what a subnet costs."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from subnetact.operators.layer_traits import traits_of

Vector: TypeAlias = npt.NDArray[np.int64]
"""One count per entry of `FEATURES`."""

KINDS = ("convolution", "pointwise", "depthwise", "linear", "low", "norm", "product", "other")
"""What a module computes. `product` is a matrix product outside any layer, as in attention; `low` is a linear
layer or convolution at a lower precision."""
COUNTS = ("modules", "macs", "activation_bytes", "weight_bytes")
FEATURES = ("parameters", *(f"{kind}.{count}" for kind in KINDS for count in COUNTS))


def kind_of(layer: nn.Module) -> str:
    """Return which of `KINDS` an ordinary module is; of an operator, pass the template."""
    kind = traits_of(layer).kind
    if kind.endswith("convolution"):
        convolution: Any = layer
        if convolution.groups > 1:
            return "depthwise"
        return "pointwise" if set(convolution.kernel_size) == {1} else "convolution"
    return "linear" if kind == "linear" else "norm" if kind.endswith("norm") else "other"


def feature(kind: str, count: str) -> int:
    """Return the position in `FEATURES` of one of `COUNTS` of one of `KINDS`."""
    return FEATURES.index(f"{kind}.{count}")
