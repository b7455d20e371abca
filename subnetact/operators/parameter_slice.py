"""ParameterSlice and ElasticAttribute: own parameters, and plain numbers, that follow the subnet."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subnetact.operators.base import Elastic, Operator
from subnetact.space import SizeRow

__all__ = ["ElasticAttribute", "ParameterSlice"]


class ParameterSlice(Operator):
    """Slices every parameter of a module on its last axis.

    It is meant for modules with parameters of their own, such as a class token or position embeddings.
    """

    parts = ("features",)

    @classmethod
    def on(cls, *, features: str | None = None, **others: str) -> Elastic:
        """Describe a module with elastic parameters of its own, for `insert_`.

        Args:
            features: the dimension that gives the length of the last axis of every parameter. If None, it
                is kept whole.
            others: parts that this operator does not have; `insert_` refuses them.
        """
        return cls._described(features=features, **others)

    def check(self) -> None:
        """Check that the template has parameters of one width and no submodules.

        Raises:
            InsertError: it has no parameters of its own, parameters of several widths, or submodules.
        """
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
        """Return nothing, because the forward of the module reads its parameters only."""
        return {}


class ElasticAttribute(Operator):
    """Gives a module plain numbers that depend on the subnet, such as a number of attention heads.

    The template has each number as an attribute, with its largest value, and its forward reads the attribute.
    It has no submodules.
    """

    @classmethod
    def on(cls, **follows: str) -> Elastic:
        """Describe a module with elastic attributes, for `insert_`.

        Args:
            follows: name of an attribute -> the dimension that gives its value.

        Example:
            >>> ElasticAttribute.on(heads="block0.heads")
        """
        return cls._described(**follows)

    def check(self) -> None:
        """Check that the described attributes are whole numbers and that there are no submodules.

        Raises:
            InsertError: an attribute is missing or no whole number, or the template has submodules.
        """
        wrong = [name for name in self.dims if not isinstance(getattr(self.template, name, None), int)]
        if wrong or self._modules:
            raise self.refuse(f"it sets whole numbers of a module without submodules, not {wrong}")

    def full(self, part: str) -> int:
        """Return the value of an attribute in the full network."""
        return int(getattr(self.template, part))

    def sizes(self, row: SizeRow) -> tuple[int, ...]:
        """Return the values of the described attributes in the subnet."""
        return tuple(self.size(name, row) for name in self.dims)

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:  # noqa: ARG002
        """Return the full parameters, which are not sliced."""
        return dict(self._parameters)

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the described attributes of the subnet's module, by name."""
        return dict(zip(self.dims, sizes, strict=True))
