"""LayerNormSlice: LayerNorm over the first features."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from subnetact.operators.base import Elastic, Operator

__all__ = ["LayerNormSlice"]


class LayerNormSlice(Operator):
    """Slices `weight[:features]` and `bias[:features]` of a LayerNorm over the last axis of its input.

    LayerNorm has no running statistics, so subnets need no calibration for it.

    Source:
        AutoFormer and DynaBERT slice their LayerNorms in this way.
    """

    parts = ("features",)

    @classmethod
    def on(cls, *, features: str | None = None, **others: str) -> Elastic:
        """Describe an elastic LayerNorm, for `insert_`.

        Args:
            features: the dimension that gives the number of features. If None, all are kept.
            others: parts that this operator does not have; `insert_` refuses them.
        """
        return cls._described(features=features, **others)

    def check(self) -> None:
        """Check that the template is a LayerNorm over one axis.

        Raises:
            InsertError: the template is another module, or a LayerNorm over several axes.
        """
        if not isinstance(self.template, nn.LayerNorm) or len(self.template.normalized_shape) != 1:
            raise self.refuse("only LayerNorm over the last axis has an affine it can slice")

    def full(self, part: str) -> int:  # noqa: ARG002
        """Return the number of features of the full network."""
        return int(self.template.normalized_shape[0])

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return the weight and the bias of the first features."""
        (features,) = sizes
        affine: dict[str, Any] = {"weight": self.weight, "bias": self.bias}
        return {name: None if t is None else t[:features] for name, t in affine.items()}

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the `normalized_shape` of the subnet's module."""
        return {"normalized_shape": sizes}
