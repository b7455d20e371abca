"""LayerSelect: which layers of a stack a subnet keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from subnetact.operators.base import Operator
from subnetact.operators.skipped_layer import skipped
from subnetact.operators.view_module import view_module
from subnetact.space import SizeRow

__all__ = ["LayerSelect"]


class LayerSelect(Operator):
    """Keeps any subset of the layers of a stack, in their places.

    A stack is an `nn.Sequential`, an `nn.ModuleList`, or another module that calls layers and has no
    parameters and buffers of its own.

    In the place of a skipped layer a subnet has the identity, so that networks may index their layers, masks
    and position embeddings by position. Residual connections belong inside of the layers: what a network adds
    or applies between two layers stays. Which layers are kept is up to the size rows of the space: OFA keeps
    the first ones, DynaBERT every n-th.

    The parts are the names of layers in the stack, each with a dimension that is 1 if the layer is kept and 0
    if it is skipped. Layers that are not named are always kept.

    Source:
        SuperServe, section 3.1.

    Example:
        >>> LayerSelect.on(**{"2": "block2.keep", "3": "block3.keep"})
    """

    def __init__(self, template: nn.Module, path: str, dims: Mapping[str, int]) -> None:
        super().__init__(template, path, dims)
        self._stand_ins: dict[str, nn.Module] = {}

    def check(self) -> None:
        """Refuse templates that are no stack, and layers that do not exist."""
        own = [*self.template._parameters, *self.template._buffers]
        if own or not (self._modules or isinstance(self.template, nn.Sequential | nn.ModuleList)):
            raise self.refuse(
                "a stack of layers is a Sequential, a ModuleList, or another module with layers and without "
                f"own parameters and buffers; this one has {', '.join(own) or 'no layers'}"
            )
        missing = [name for name in self.dims if name not in self._modules]
        if missing:
            raise self.refuse(f"it has no layers {missing}; choose from {list(self._modules)}")

    def full(self, part: str) -> int:  # noqa: ARG002
        """Return 1, the size of a layer that is kept."""
        return 1

    def legal(self, part: str) -> Sequence[int]:  # noqa: ARG002
        """Return 0 (the layer is skipped) and 1 (it is kept)."""
        return (0, 1)

    def gate(self, name: str) -> tuple[int, int] | None:
        """Return the condition under which the layer of a `name` is kept; None if it is always kept.

        It is a position in size rows, and the size there with which the layer is kept.
        """
        return (self.dims[name], 1) if name in self.dims else None

    def kept(self, row: SizeRow) -> list[str]:
        """Return the names of the layers that the subnet of a size row keeps, in order."""
        gates = {name: self.gate(name) for name in self._modules}
        return [name for name, gate in gates.items() if gate is None or row[gate[0]] == gate[1]]

    def chain(self, layers: dict[str, nn.Module | None]) -> nn.Module:
        """Return a container of all layers, in which a skipped layer is the identity. Exports use it."""
        return self.select(layers)

    def select(self, layers: dict[str, nn.Module | None]) -> nn.Module:
        """Return a container of the kept `layers` by name, with identities in the places of the others."""
        modules = {
            name: layers[name] if name in layers else view_module(self._stand_in(name))
            for name in self._modules
        }
        return view_module(self.template, modules=modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module | None]:
        return iter(self._modules.values())

    def __getitem__(self, position: int | slice | str) -> Any:
        """Return a layer of the full stack by its position or name, or a list of layers for a slice."""
        if isinstance(position, str):
            return self._modules[position]
        return list(self._modules.values())[position]

    def _stand_in(self, name: str) -> nn.Module:
        found = self._stand_ins.get(name)
        if found is None:
            layer = self._modules[name]
            found = skipped(nn.Identity() if layer is None else layer)
            self._stand_ins[name] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stand_ins": {}}

    def bind(self, row: SizeRow, trainable: bool = False) -> Any:
        """Not implemented: `subnetact.supernet.bind` binds the kept layers and calls `select`."""
        raise NotImplementedError
