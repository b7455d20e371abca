"""LayerNormSlice: LayerNorm over the first features."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from subnetact.operators.base import Operator

__all__ = ["LayerNormSlice"]


class LayerNormSlice(Operator):
    """Slices `weight[:features]` and `bias[:features]` of a LayerNorm over its last axis.

    It keeps no running statistics, so a subnet needs no calibration for it.
    """

    parts = ("features",)

    def check(self) -> None:
        """Refuse other modules, and LayerNorm over several axes."""
        if not isinstance(self.template, nn.LayerNorm) or len(self.template.normalized_shape) != 1:
            raise self.refuse("only LayerNorm over the last axis has an affine it can slice")

    def full(self, part: str) -> int:  # noqa: ARG002
        """Return the number of features of the full network."""
        return int(self.template.normalized_shape[0])

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return the affine of the first features."""
        (features,) = sizes
        affine: dict[str, Any] = {"weight": self.weight, "bias": self.bias}
        return {name: None if t is None else t[:features] for name, t in affine.items()}

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the normalised shape of the subnet's module."""
        return {"normalized_shape": sizes}
