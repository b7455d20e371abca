"""What every operator is: full-size parameters under their own names, and the dimensions they follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from subnetact.errors import InsertError, SpecError
from subnetact.operators.view_module import view_module
from subnetact.space import Row

__all__ = ["Elastic", "Operator"]


@dataclass(frozen=True)
class Elastic:
    """One entry of an elastic description: which operator, and which dimension each part follows."""

    operator: type[Operator]
    follows: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.operator.__name__}({', '.join(f'{k}={v}' for k, v in self.follows.items())})"


class Operator(nn.Module):
    """An elastic module.

    It holds the parameters of the module it replaces (its `template`) under the same names. The
    slicing rule is `tensors`; subnets that agree on `sizes` share the tensors it gives.

    Args:
        template: the ordinary module; its parameters are taken over, not copied.
        path: its name in the network, for error messages.
        dims: for each part the operator knows (see `parts`), the position in a resolved row.
    """

    parts: ClassVar[tuple[str, ...]] = ()
    """Names `Elastic.follows` may use; any where empty."""

    template: Any

    checks: bool = True
    """Whether sizes are compared with what is legal; a traced row has none to compare yet."""

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
        """Describe an elastic module: `WeightSlice.on(out="stage1.width")`."""
        return Elastic(cls, follows)

    def full(self, part: str) -> int:
        """Return the size of a part in the full network."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse a module this operator cannot make elastic.

        Raises:
            InsertError: the module's type or settings are not supported.
        """

    def legal(self, part: str) -> Sequence[int]:
        """Return the sizes a part can have, ascending."""
        return range(1, self.full(part) + 1)

    def size(self, part: str, row: Row) -> int:
        """Return a part's size in the subnet; the full size where no dimension is followed.

        Raises:
            SpecError: it is not `legal`.
        """
        if part not in self.dims:
            return self.full(part)
        size = row[self.dims[part]]
        if self.checks and size not in self.legal(part):
            raise SpecError(f"{self.path}: {self._not_legal(part, size)}")
        return size

    def _not_legal(self, part: str, size: int) -> str:
        legal = self.legal(part)
        if isinstance(legal, range):
            steps = f" in steps of {legal.step}" if legal.step > 1 else ""
            return f"{part} of {size} is outside {legal[0]}..{legal[-1]}{steps}"
        return f"{part} {size} is not a choice; choose from {', '.join(map(str, legal))}"

    def sizes(self, row: Row) -> tuple[int, ...]:
        """Return the sizes that decide this operator's part of a subnet."""
        return tuple(self.size(part, row) for part in self.parts)

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Apply the slicing rule: a subnet's parameters, as differentiable views of the full ones."""
        raise NotImplementedError

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the plain attributes that the subnet's module has other than the template."""
        raise NotImplementedError

    def parameters_of(self, sizes: tuple[int, ...], trainable: bool) -> dict[str, Any]:
        """Return a subnet's parameters: shared, frozen Parameters, or slices that carry gradients."""
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

    def bind(self, row: Row, trainable: bool = False) -> nn.Module:
        """Return the plain module of one subnet, whose parameters share this operator's storage."""
        sizes = self.sizes(row)
        return view_module(
            self.template, parameters=self.parameters_of(sizes, trainable), **self.attributes(sizes)
        )

    def forget(self) -> None:
        """Drop the shared tensors, after the parameters have moved to other storage."""
        self._shared.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shared": {}}

    def extra_repr(self) -> str:
        """Show the template and the parts that are elastic."""
        return f"{self.template!r}, elastic: {', '.join(self.dims)}"

    def refuse(self, why: str) -> InsertError:
        """Make the error for a module this operator cannot make elastic."""
        kind = type(self.template).__name__
        return InsertError(f"{self.path}: {type(self).__name__} cannot make this {kind} elastic: {why}")
