"""LayerSelect: which layers of a stack a subnet keeps. ModuleSwitch: which of several modules it uses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

from torch import Tensor, nn

from subnetact.operators.actuation import Run, in_forward
from subnetact.operators.base import Operator
from subnetact.operators.skipped_layer import RECORDING, skipped
from subnetact.operators.view_module import called_module, view_module
from subnetact.space import SizeRow


class LayerSelect(Operator):
    """Keeps any subset of the layers of a stack, in their places.

    A stack is an `nn.Sequential`, an `nn.ModuleList`, or another module that calls layers and has no
    parameters and buffers of its own.

    In the place of a skipped layer a subnet has the identity, so that networks may index their layers, masks
    and position embeddings by position. What a network adds or applies between two layers stays.

    The parts are the names of layers in the stack, each with a dimension that is 1 if the layer is kept and 0
    if it is skipped. Layers that are not named are always kept.

    Source:
        SuperServe, section 3.1.

    Example:
        >>> LayerSelect.on(**{"2": "block2.keep", "3": "block3.keep"})
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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

    def resized_in_reference(self, part: str) -> bool:  # noqa: ARG002
        """Return True: a skipped layer is an identity."""
        return True

    def gate(self, name: str) -> tuple[int, int] | None:
        """Return a position in size rows, and the size there with which the layer of a `name` is kept.

        It is None for a layer that every subnet keeps.
        """
        return (self.dims[name], 1) if name in self.dims else None

    def path_of(self, name: str) -> str:
        """Return the name in the network of the layer `name` of this stack."""
        return f"{self.path}.{name}".lstrip(".")

    def kept(self, row: SizeRow) -> list[str]:
        """Return the names of the layers that the subnet of a size row keeps, in order."""
        gates = {name: self.gate(name) for name in self._modules}
        return [name for name, gate in gates.items() if gate is None or row[gate[0]] == gate[1]]

    def select(self, layers: dict[str, nn.Module | None]) -> nn.Module:
        """Return a container of the kept `layers` by name, with identities in the places of the others."""
        put = {n: layers[n] if n in layers else view_module(self._stand_in(n)) for n in self._modules}
        return view_module(self.template, modules=put)

    def module_of(self, run: Run) -> Any:
        """Return the container of the layers that the subnet of a `run` keeps, and of identities."""
        kept = self.kept(run.row)
        modules: dict[str, Any] = {n: m if n in kept else self._stand_in(n) for n, m in self._modules.items()}
        if not self.training and self.actuation is not None:
            for name in modules.keys() - kept:
                modules[name] = self.actuation.corrected(copy(modules[name]), run, self.path_of(name))
        return called_module(self, {}, {}, modules, {})

    def _layers(self, inside: bool) -> dict[str, nn.Module | None]:
        """Return the layers by name: those of the subnet that runs for a forward, otherwise all."""
        return self.module_of(self._run())._modules if inside and self.actuation else self._modules

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module | None]:
        return iter(self._layers(in_forward(self)).values())

    def __getitem__(self, position: int | slice | str) -> Any:
        """Return a layer by its position or name, or a list of layers for a slice."""
        layers = self._layers(in_forward(self))
        return layers[position] if isinstance(position, str) else list(layers.values())[position]

    def _varies(self, name: str, value: Any) -> bool:
        return name in self._modules or super()._varies(name, value)

    def _stand_in(self, name: str) -> nn.Module:
        layer: Any = self._modules[name]
        if name not in self._stand_ins:
            self._stand_ins[name] = skipped(nn.Identity() if layer is None else layer)
        stand_in, hooks = self._stand_ins[name], {} if layer is None else layer._forward_hooks
        recording = {i: hook for i, hook in hooks.items() if getattr(hook, "__module__", "") == RECORDING}
        object.__setattr__(stand_in, "_forward_hooks", OrderedDict(recording))
        return stand_in


class SwitchableModule(nn.Module):
    """Several modules of which one is used. Without an operator around it, that is the default one.

    Args:
        modules: the alternatives; their positions are their names.
        default: the position of the alternative of the full network.
    """

    def __init__(self, *modules: nn.Module, default: int) -> None:
        super().__init__()
        for i, module in enumerate(modules):
            self.add_module(str(i), module)
        self.default = str(default)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the default alternative for an input `x`."""
        return self._modules[self.default](x)  # type: ignore[misc, no-any-return]


class ModuleSwitch(LayerSelect):
    """Uses one of the alternatives of a `SwitchableModule` in each subnet; they share nothing.

    Parts:
        choice: which alternative: 1 for the first one, 2 for the second, and so on. It must be described.

    Source:
        The switchable BatchNorm of Slimmable Neural Networks (Yu et al., 2019).
    """

    parts = ("choice",)

    def check(self) -> None:
        """Refuse templates that are no SwitchableModule, and descriptions without `choice`."""
        if not isinstance(self.template, SwitchableModule) or "choice" not in self.dims:
            raise self.refuse("only SwitchableModule, with a dimension for 'choice', can be switched")

    def full(self, part: str) -> int:  # noqa: ARG002
        """Return the number of alternatives."""
        return len(self._modules)

    def legal(self, part: str) -> Sequence[int]:
        """Return the numbers from 1 to the number of alternatives."""
        return range(1, self.full(part) + 1)

    def gate(self, name: str) -> tuple[int, int]:
        """Return the position in size rows, and the size there with which an alternative is chosen."""
        return self.dims["choice"], int(name) + 1

    def kept(self, row: SizeRow) -> list[str]:
        """Return the name of the alternative that the subnet of a size `row` uses, as a list of one."""
        self.size("choice", row)
        return super().kept(row)

    def module_of(self, run: Run) -> Any:
        """Return the alternative that the subnet of a `run` uses."""
        return self._modules[self.kept(run.row)[0]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the alternative of the subnet, with its hooks, returns for `args` and `kwargs`."""
        return self.module_of(self._run())(*args, **kwargs)

    def select(self, layers: dict[str, nn.Module | None]) -> nn.Module:
        """Return the chosen alternative; exports give all of them, of which the others are identities."""
        chosen = [layer for layer in layers.values() if layer is not None]
        return chosen[0] if len(chosen) == 1 else nn.Sequential(*chosen)
