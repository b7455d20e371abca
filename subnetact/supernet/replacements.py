"""Replacements: notices modules, parameters and buffers of a network that are replaced by others.

`network.fc = nn.Linear(...)`, `del network.fc` and `torch.func.functional_call` write into the registries of
`nn.Module`, which torch does not count. Here they do, so that one number is compared per call. Whoever takes
the network out of its supernet counts as well, because `parameter.data = ...` writes nothing that counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subnetact.errors import InsertError
from subnetact.operators.base import Operator, template_of

__all__ = ["Replacements", "substituted"]

_REGISTRIES = ("_parameters", "_buffers", "_modules")


class _Registry(dict[str, Any]):
    """The parameters, the buffers or the submodules of one module; it counts every write."""

    __slots__ = ("count",)

    def __init__(self, entries: dict[str, Any], count: Replacements) -> None:
        super().__init__(entries)
        self.count = count

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # A copy is watched again by the supernet that it belongs to.


def _counting(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def write(self: _Registry, *args: Any, **kwargs: Any) -> Any:
        self.count.writes += 1
        try:
            return plain(self, *args, **kwargs)
        finally:
            self.count.writes += 1

    write.__name__ = name
    return write


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(_Registry, _name, _counting(_name))


class _Insertion(NamedTuple):
    """An operator in its place, and what a module that is put there instead needs to become elastic.

    Only weak references lead to modules, so that their end is not delayed.
    """

    operator: Callable[[], Operator | None]
    parent: Callable[[], nn.Module | None]
    kind: type[Operator]
    template: type[nn.Module]
    path: str
    dims: dict[str, int]
    segments: dict[str, tuple[int, ...]]
    sizes: dict[str, int]
    settings: dict[str, Any]

    @classmethod
    def of(cls, operator: Operator, parent: nn.Module) -> _Insertion:
        """Return the insertion of an operator that a module has as a submodule."""
        sizes = {part: operator.full(part) for part in operator.dims if part in operator.parts}
        settings = {n: v for n, v in vars(operator).items() if n in ("precision_dim", "packs")}
        described = operator.dims, operator.segments, sizes, settings
        kinds = type(operator), type(operator.template)
        return cls(weakref.ref(operator), weakref.ref(parent), *kinds, operator.path, *described)

    def renew(self, parent: nn.Module, name: str) -> None:
        """Make a module elastic that was put into the place of the operator, if it fits there."""
        module: Any = parent._modules[name]
        if type(module) is self.template and self.parent() is parent:
            operator = self.kind(module, self.path, self.dims, *[self.segments][: bool(self.segments)])
            if all(operator.full(part) == size for part, size in self.sizes.items()):
                operator.check()
                vars(operator).update(self.settings)
                parent._modules[name] = operator
                return
        raise InsertError(
            f"{self.path} was an elastic {self.template.__name__} ({self.kind.__name__}: "
            f"{', '.join(self.dims)}) and was replaced by a {type(module).__name__} that cannot be sliced in "
            "the same way; put a layer of the same class and sizes there, or take the network with "
            "supernet.remove() and call insert_ again"
        )


class Replacements:
    """Counts the `writes` into the registries of a network, and remembers what the registries held."""

    def __init__(self) -> None:
        self.writes = 0
        self._members: list[Callable[[], Any]] = []
        self._places: list[Any] = []
        self._insertions: list[_Insertion] = []
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def note(self, network: nn.Module) -> None:
        """Remember the modules, parameters and buffers that a network has now, and watch all of them."""
        for module in list(network.modules()):
            for name in _REGISTRIES:
                entries = module.__dict__[name]
                if not isinstance(entries, _Registry) or entries.count is not self:
                    watched = _Registry(entries, self)
                    for owner in (module, template_of(module)):  # An operator and its template share them.
                        if owner.__dict__[name] is entries:
                            object.__setattr__(owner, name, watched)
                            self._watched.add(owner)
        members = _members(network)
        self._members = [weakref.ref(entry) for entry in members]
        self._places = [_place(entry) for entry in members]
        self._insertions = [
            _Insertion.of(child, module)
            for module in network.modules()
            for child in module._modules.values()
            if isinstance(child, Operator)
        ]

    def release(self) -> None:
        """Watch nothing any longer: all modules, also those replaced since, get ordinary registries again."""
        for module in list(self._watched):
            for name in _REGISTRIES:
                entries = module.__dict__[name]
                if isinstance(entries, _Registry) and entries.count is self:
                    object.__setattr__(module, name, dict(entries))
        self._insertions = []

    def renew_operators(self, supernet: nn.Module) -> None:
        """Make modules elastic again that were put into the place of operators.

        Raises:
            InsertError: one cannot be sliced as the operator was.
        """
        present = {id(module) for module in supernet.modules()}
        for insertion in self._insertions:
            if id(insertion.operator()) not in present:
                path, _, name = f"network.{insertion.path}".rpartition(".")
                parent = nn.Module()
                with suppress(AttributeError):  # It may be there no more.
                    parent = supernet.get_submodule(path)
                module = parent._modules.get(name)
                if isinstance(module, Operator) or not insertion.dims:
                    continue
                if module is not None and list(module.parameters()):
                    insertion.renew(parent, name)

    def moved(self, network: nn.Module) -> list[str]:
        """Return the names of parameters and buffers that are on other storage than at the last `note`."""
        names = {id(t): name for name, t in (*network.named_parameters(), *network.named_buffers())}
        known = zip(self._members, self._places, strict=True)
        return [
            names[id(entry)]
            for entry, place in ((member(), place) for member, place in known)
            if id(entry) in names and _place(entry) != place
        ]

    def replaced(self, network: nn.Module) -> bool:
        """Tell whether a network has other modules, parameters or buffers now than at the last `note`, or
        has them on other storage.
        """
        present = _members(network)
        return (
            len(present) != len(self._members)
            or any(known() is not entry for known, entry in zip(self._members, present, strict=True))
            or [_place(entry) for entry in present] != self._places
        )


def substituted(network: nn.Module) -> bool:
    """Tell whether plain tensors stand in for parameters, as while `functional_call` runs."""
    parameters = (p for module in network.modules() for p in module._parameters.values())
    return any(p is not None and not isinstance(p, nn.Parameter) for p in parameters)


def _place(entry: Any) -> Any:
    """Return where an ordinary tensor is in memory, or None."""
    if type(entry) not in (Tensor, nn.Parameter) or entry.layout != torch.strided:
        return None
    return entry.data_ptr(), entry.shape, entry.stride()


def _members(network: nn.Module) -> list[Any]:
    return [
        entry
        for module in network.modules()
        for entry in (module, *module._parameters.values(), *module._buffers.values())
        if entry is not None
    ]
