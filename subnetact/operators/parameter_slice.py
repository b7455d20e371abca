"""ParameterSlice and ElasticAttribute: own parameters and plain numbers that belong to the subnet."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subnetact.operators.base import Operator
from subnetact.space import Row

__all__ = ["ElasticAttribute", "ParameterSlice"]


class ParameterSlice(Operator):
    """Slices every parameter of a module on its last axis: a class token, position embeddings ..."""

    parts = ("features",)

    def check(self) -> None:
        """Refuse modules without parameters of their own, or with several widths."""
        widths = {p.shape[-1] for p in self._parameters.values() if p is not None and p.dim()}
        if len(widths) != 1 or self._modules:
            raise self.refuse("it slices the parameters of a module without submodules, all of one width")

    def full(self, part: str) -> int:  # noqa: ARG002
        """Return the length of the last axis in the full network."""
        return next(p.shape[-1] for p in self._parameters.values() if p is not None)

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return the first features of every parameter."""
        (features,) = sizes
        return {name: None if p is None else p[..., :features] for name, p in self._parameters.items()}

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:  # noqa: ARG002
        """Return nothing: the module's forward reads its parameters only."""
        return {}


class ElasticAttribute(Operator):
    """Gives a module plain numbers that depend on the subnet: heads, an input resolution ...

    `ElasticAttribute.on(heads="block0.heads")` sets the attribute `heads`, whose value in the full network is
    the largest. The module has no submodules, and its forward reads the attribute.
    """

    def check(self) -> None:
        """Refuse attributes that are no whole numbers, and modules with submodules."""
        wrong = [name for name in self.dims if not isinstance(getattr(self.template, name, None), int)]
        if wrong or self._modules:
            raise self.refuse(f"it sets whole numbers of a module without submodules, not {wrong}")

    def full(self, part: str) -> int:
        """Return the attribute in the full network."""
        return int(getattr(self.template, part))

    def sizes(self, row: Row) -> tuple[int, ...]:
        """Return the attributes of the subnet."""
        return tuple(self.size(name, row) for name in self.dims)

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:  # noqa: ARG002
        """Return the parameters as they are."""
        return dict(self._parameters)

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the attributes of the subnet's module."""
        return dict(zip(self.dims, sizes, strict=True))
