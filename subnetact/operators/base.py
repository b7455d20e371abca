"""Operator: an elastic module. Elastic: one entry of a description of elastic modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from subnetact.errors import InsertError, SpecError
from subnetact.operators.view_module import view_module
from subnetact.space import SizeRow

__all__ = ["Elastic", "Operator"]


LISTED = 6
"""Messages list a range of at most this many legal sizes one by one."""


@dataclass(frozen=True)
class Elastic:
    """One entry of an elastic description; `WeightSlice.on(out="width")` makes one.

    Attributes:
        operator: the class of the operator that replaces the module.
        follows: part of the operator -> dimension of the space that gives the part its size.
    """

    operator: type[Operator]
    follows: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.operator.__name__}({', '.join(f'{k}={v}' for k, v in self.follows.items())})"


class Operator(nn.Module):
    """An elastic module: it holds full-size parameters and slices the module of any subnet out of them.

    An operator has the parameters of the module that it replaces, its template, under the same names. A
    subclass implements the slicing rule in `tensors`. Subnets with equal `sizes` share the sliced tensors.

    Args:
        template: the ordinary module; its parameters are taken over, not copied.
        path: the name of the module in the network.
        dims: part -> position in the size row that gives the part its size. Parts that are not named
            keep their full size.

    Attributes:
        path: as given.
        dims: as given.
        template: as given.
    """

    parts: ClassVar[tuple[str, ...]] = ()
    """The names of the parts that a description may name. If empty, the template decides which are legal."""

    template: Any

    checks: bool = True
    """Whether sizes are compared with the legal ones. Export switches this off to trace symbolic sizes."""

    def __init__(self, template: nn.Module, path: str, dims: Mapping[str, int]) -> None:
        super().__init__()
        self._parameters = template._parameters
        self._buffers = template._buffers
        self._modules = template._modules
        self._non_persistent_buffers_set = template._non_persistent_buffers_set
        self.training = template.training
        self.path = path
        self.dims = dict(dims)
        self.__dict__["template"] = template  # past nn.Module's registration: not a submodule
        self._shared: dict[tuple[int, ...], dict[str, Tensor | None]] = {}

    @classmethod
    def on(cls, **follows: str) -> Elastic:
        """Describe an elastic module, for `insert_`.

        Args:
            follows: part -> the dimension that gives the part its size; `parts` has the legal names.

        Returns:
            An entry of an elastic description.

        Example:
            >>> elastic = {"stage1.0.conv": WeightSlice.on(out="stage1.width")}
        """
        return cls._described(**follows)

    @classmethod
    def _described(cls, **follows: str | None) -> Elastic:
        return Elastic(cls, {part: dimension for part, dimension in follows.items() if dimension is not None})

    def full(self, part: str) -> int:
        """Return the size of a part, one of `parts`, in the full network."""
        raise NotImplementedError

    def check(self) -> None:
        """Check that this operator can make its template elastic.

        Raises:
            InsertError: the operator does not support the template's type or settings, or the given parts.
        """

    def legal(self, part: str) -> Sequence[int]:
        """Return the sizes that a part may have, in ascending order."""
        return range(1, self.full(part) + 1)

    def size(self, part: str, row: SizeRow) -> int:
        """Return the size of a part in a subnet.

        Args:
            part: one of `parts`.
            row: the size row of the subnet.

        Returns:
            The size in the row, or the full size if the part follows no dimension.

        Raises:
            SpecError: the size is not among the `legal` ones.
        """
        if part not in self.dims:
            return self.full(part)
        size = row[self.dims[part]]
        if self.checks and size not in self.legal(part):
            raise SpecError(f"{self.path}: {self._not_legal(part, size)}")
        return size

    def _not_legal(self, part: str, size: int) -> str:
        legal = self.legal(part)
        if isinstance(legal, range) and len(legal) > LISTED:
            among = f"{legal[0]} to {legal[-1]}" + (f" in steps of {legal.step}" if legal.step > 1 else "")
        else:
            among = " or ".join(filter(None, [", ".join(map(str, legal[:-1])), str(legal[-1])]))
        return f"{part}={size} is not legal; choose {among}"

    def sizes(self, row: SizeRow) -> tuple[int, ...]:
        """Return the sizes on which this operator's module in a subnet depends.

        Args:
            row: the size row of the subnet.

        Returns:
            One size per part, in the order of `parts`.
        """
        return tuple(self.size(part, row) for part in self.parts)

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Apply the slicing rule: return a subnet's parameters as differentiable views of the full ones.

        Args:
            sizes: what `sizes` returned for the subnet.

        Returns:
            The parameters under the template's names. For a parameter that the template lacks, None.
        """
        raise NotImplementedError

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the plain attributes in which the subnet's module differs from the template.

        Args:
            sizes: what `sizes` returned for the subnet.

        Returns:
            The values of the attributes by name, for example `{"out_channels": 32}`.
        """
        raise NotImplementedError

    def parameters_of(self, sizes: tuple[int, ...], trainable: bool) -> dict[str, Any]:
        """Return a subnet's parameters.

        Args:
            sizes: what `sizes` returned for the subnet.
            trainable: whether to return slices that carry gradients to the full parameters. Otherwise the
                result consists of frozen parameters, which all subnets of these sizes share.

        Returns:
            The parameters under the template's names.
        """
        if trainable:
            return self.tensors(sizes)
        found = self._shared.get(sizes)
        if found is None:
            made: dict[str, Tensor | None] = {
                name: None if t is None else nn.Parameter(t, requires_grad=False)
                for name, t in self.tensors(sizes).items()
            }
            found = self._shared.setdefault(sizes, made)
        return found

    def bind(self, row: SizeRow, trainable: bool = False) -> nn.Module:
        """Return the ordinary module of one subnet, whose parameters share this operator's storage.

        Args:
            row: the size row of the subnet.
            trainable: whether its parameters carry gradients to this operator's parameters.

        Raises:
            SpecError: a size in the row is not legal.
        """
        sizes = self.sizes(row)
        return view_module(
            self.template, parameters=self.parameters_of(sizes, trainable), **self.attributes(sizes)
        )

    def forget(self) -> None:
        """Drop the shared slices. This is needed after the parameters have moved to other storage."""
        self._shared.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shared": {}}

    def extra_repr(self) -> str:
        """Return the template and the elastic parts, for the printed network."""
        return f"{self.template!r}, elastic: {', '.join(self.dims)}"

    def refuse(self, why: str) -> InsertError:
        """Return the error that says why this operator cannot make its template elastic."""
        kind = type(self.template).__name__
        return InsertError(f"{self.path}: {type(self).__name__} cannot make this {kind} elastic: {why}")
