"""LayerSelect: which layers of a stack a subnet keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from subnetact.operators.base import Operator
from subnetact.operators.view_module import view_module
from subnetact.space import Row

__all__ = ["LayerSelect"]


class LayerSelect(Operator):
    """Keeps any subset of a container's layers, in order (SuperServe section 3.1).

    Covers `nn.Sequential` and `nn.ModuleList`. `LayerSelect.on(**{"3": "block3.keep"})` names, for
    each layer that can be skipped, the dimension that is 1 where it is kept and 0 where not; layers
    that are not named are always kept. A prefix (OFA), a strided choice (DynaBERT) or any other list
    differ only in the rows the space resolves to.
    """

    def check(self) -> None:
        """Refuse other containers and layers that do not exist."""
        if not isinstance(self.template, nn.Sequential | nn.ModuleList):
            raise self.refuse("only Sequential and ModuleList are stacks of layers")
        missing = [name for name in self.dims if name not in self._modules]
        if missing:
            raise self.refuse(f"it has no layers {missing}; choose from {list(self._modules)}")

    def full(self, part: str) -> int:  # noqa: ARG002
        """Return 1: a layer is kept or not."""
        return 1

    def legal(self, part: str) -> Sequence[int]:  # noqa: ARG002
        """Return 0 and 1: a layer is skipped or kept."""
        return (0, 1)

    def gate(self, name: str) -> tuple[int, int] | None:
        """Return the position in a row, and the value there with which a layer is kept; None = always."""
        return (self.dims[name], 1) if name in self.dims else None

    def kept(self, row: Row) -> list[str]:
        """Return the names of the layers the subnet keeps, in order."""
        gates = {name: self.gate(name) for name in self._modules}
        return [name for name, gate in gates.items() if gate is None or row[gate[0]] == gate[1]]

    def chain(self, layers: dict[str, nn.Module | None]) -> nn.Module:
        """Return the container of all layers, of which those not kept hand on their input."""
        return self.select(layers)

    def select(self, layers: dict[str, nn.Module | None]) -> nn.Module:
        """Return the container of already bound kept layers, renumbered where names are numbers."""
        numbered = all(name.isdigit() for name in self._modules)
        modules = {str(i) if numbered else name: m for i, (name, m) in enumerate(layers.items())}
        return view_module(self.template, modules=modules)

    def bind(self, row: Row, trainable: bool = False) -> Any:
        """Binding a stack binds its layers; `subnetact.binding` does it."""
        raise NotImplementedError
