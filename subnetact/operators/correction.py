"""Corrections: what a subnet adds behind a linear layer, or in the place of a layer that it skips.

A correction is a product of low rank and a bias, statistics of one subnet beside weights that all share. It
is to output projections what a statistics row is to BatchNorm, and is measured in the same way, without a
gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.errors import PrecisionError
from subnetact.operators.layer_traits import traits_of
from subnetact.operators.lowered_weight import Low
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.operators.view_module import Corrected, mix_in_

NAMES = ("correction_down", "correction_up", "correction_bias")


class Correction(NamedTuple):
    """Maps x of shape (..., inputs) to `up @ (down @ x) + bias`, of shape (..., outputs)."""

    down: Tensor  # (rank, inputs)
    up: Tensor  # (outputs, rank)
    bias: Tensor  # (outputs,)

    def __call__(self, x: Tensor) -> Tensor:
        """Return what is added for inputs `x`."""
        return F.linear(F.linear(x.to(self.down.dtype), self.down), self.up, self.bias).to(x.dtype)


class CorrectedLayer(Corrected):
    """A linear layer, or what stands for a skipped one, with a correction of what it gets."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer returns, corrected."""
        y = super().forward(*args, **kwargs)  # type: ignore[misc]
        x = y if isinstance(self, SkippedLayer) else (*args, *kwargs.values())[0]
        return y + Correction(*(self._parameters[name] for name in NAMES))(x)


def correct_(module: Any, correction: Correction, trainable: bool = False) -> nn.Module:
    """Let a module of one subnet, which nobody else holds, add a correction; return the module."""
    own = [t for t in module._parameters.values() if t is not None]
    like = own[0] if own and not isinstance(module, Low) else correction.bias
    given = [nn.Parameter(t.to(like.device, like.dtype), requires_grad=trainable) for t in correction]
    mix_in_(module, CorrectedLayer)
    parameters = {**module._parameters, **dict(zip(NAMES, given, strict=True))}
    object.__setattr__(module, "_parameters", parameters)
    return module  # type: ignore[no-any-return]


def merge_(module: Any, correction: Correction, name: str) -> None:
    """Put a correction into the weights of an extracted layer; what stands for a skipped one keeps it apart.

    Raises:
        PrecisionError: the layer has a lower precision.
    """
    if isinstance(module, SkippedLayer):
        correct_(module, Correction(*(t.clone() for t in correction)), trainable=True)
        return
    if isinstance(module, Low):
        raise PrecisionError(
            f"{name} has a correction, which cannot be merged into weights of a lower precision; extract the "
            "subnet at float32, or drop its corrections with supernet.norms.drop([spec])"
        )
    down, up, bias = (t.to(module.weight.device, module.weight.dtype) for t in correction)
    change = up @ down
    with torch.no_grad():
        module.weight.add_(change.t() if traits_of(module).axes["weight"][0] == "in_" else change)
        if module.bias is None:
            module.bias = nn.Parameter(bias.clone())
        else:
            module.bias.add_(bias)
