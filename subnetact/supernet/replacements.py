"""Replacements: notices modules, parameters and buffers of a network that are replaced by others.

`network.fc = nn.Linear(...)`, `del network.fc` and `torch.func.functional_call` write into the registries of
`nn.Module`, which torch does not count. Here they do, so that one number is compared per call. Whoever takes
the network out of its supernet counts as well, because `parameter.data = ...` writes nothing that counts.

A layer that is put into the place of an elastic one becomes elastic in the same way, or is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.errors import InsertError
from subnetact.operators.base import Operator, exchange_modules_, template_of
from subnetact.operators.view_module import Registry
from subnetact.supernet.adapters import adapted, is_adapter, slices_of, switches

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class _Registry(Registry):
    """The parameters, the buffers or the submodules of one module; it counts every write.

    The parameters of an elastic `layer` get no other names, as pruning and parametrisations would give them.
    """

    __slots__ = ("count", "layer")

    def __init__(self, entries: dict[str, Any], count: Replacements, layer: str) -> None:
        super().__init__(entries)
        self.count, self.layer = count, layer

    def write(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of `dict` that writes, and count it, for those who look meanwhile and afterwards.

        Raises:
            InsertError: it takes a parameter of an elastic layer away or adds one.
        """
        sets = method.__name__ == "__setitem__"
        if self.layer and (method.__name__ in _REMOVING or (sets and args[0] not in self)):
            raise InsertError(
                f"{self.layer} is elastic: subnets are slices of its parameters, and nothing can stand for "
                "them; prune, normalise or parametrise supernet.extract(spec), shard with fully_shard, or "
                "take the network with supernet.remove(), change it, and call insert_ again"
            )

        if sets:
            args = args[0], _successor(self.get(args[0]), args[1])
            if is_adapter(args[1]):
                self.count.adapters.append((weakref.ref(args[1]), None))
        self.count.writes += 1
        try:
            return method(self, *args, **kwargs)
        finally:
            self.count.writes += 1


_OF_PEFT = {"base_layer", "modules_to_save", "original_module"}
_REMOVING = ("__delitem__", "clear", "pop", "popitem")


def _successor(former: Any, entry: Any) -> Any:
    """Return what goes into the place of a former entry; on a new layer, the operator of an elastic one.

    Raises:
        InsertError: the operator does not fit there.
    """
    if not isinstance(former, nn.Module) or not isinstance(entry, nn.Module):
        return entry
    lost = [m for m in former.modules() if isinstance(m, Operator) and m.dims and m.template is not entry]
    elastic = [module for module in entry.modules() if isinstance(module, Operator)]
    known = {id(parameter) for module in (former, *elastic) for parameter in module.parameters()}
    if not lost or not any(p.numel() > 1 and id(p) not in known for p in entry.parameters()):
        return entry
    if isinstance(former, Operator) and not elastic and (operator := former.on_another(entry)) is not None:
        return operator
    if is_adapter(entry) and adapted(entry) is adapted(former):
        exchange_modules_(entry, slices_of(entry, adapted(entry), lost[0].path))
        return entry
    raise InsertError(
        f"{lost[0].path} is an elastic {type(lost[0].template).__name__} ({lost[0].extra_repr()}), and this "
        f"{type(entry).__name__} cannot be sliced in its place; put a layer of the same class and sizes "
        "there, put adapters on supernet.extract(spec), or take the network with supernet.remove(), change "
        "it, and call insert_ again"
    )


class Replacements:
    """Counts the `writes` into the registries of a network, and remembers what the registries held."""

    def __init__(self) -> None:
        self.writes = 0
        self._members: list[tuple[Callable[[], Any], Any]] = []
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.adapters: list[tuple[Callable[[], Any], Any]] = []

    def note(self, network: nn.Module, holder: Any) -> None:
        """Remember the modules, parameters and buffers that a network has now, and watch all of them.

        The network's `holder` shares its registries, and so do an operator and its template.
        """
        for path, module in network.named_modules():  # and what is put into a module that it has come to
            if isinstance(module, Operator):
                module.actuation = holder._actuation  # PEFT copies what it lets train.
                if module.slices and not _OF_PEFT.isdisjoint(path.split(".")):
                    module.path = path
            if is_adapter(module):
                exchange_modules_(module, slices_of(module, adapted(module), path))
            for name in _REGISTRIES:
                entries = module.__dict__[name]
                if not isinstance(entries, _Registry) or entries.count is not self:
                    layer = name == "_parameters" and isinstance(module, Operator) and module.traits.axes
                    watched = _Registry(entries, self, str(module.path) if layer else "")
                    for owner in (module, template_of(module), holder):
                        if owner.__dict__[name] is entries:
                            object.__setattr__(owner, name, watched)
                            self._watched.add(owner)
        self._members = [(weakref.ref(entry), _place(entry)) for entry in _members(network)]
        self.adapters = [(m, place) for m, place in self._members if place and len(place) > len(_HOOKS)]

    def release(self) -> None:
        """Watch nothing any longer: all modules, also those replaced since, get ordinary registries again."""
        for module in list(self._watched):
            for name in _REGISTRIES:
                entries = module.__dict__[name]
                if isinstance(entries, _Registry) and entries.count is self:
                    object.__setattr__(module, name, dict(entries))

    def switched(self) -> bool:
        """Tell whether other adapters of a network count now than at the last `note`."""
        return any(place != _place(layer()) for layer, place in self.adapters)

    def replaced(self, network: nn.Module) -> bool:
        """Tell whether a network has other modules, parameters or buffers now than at the last `note`, or
        has them on other storage, or other hooks, or other adapters that count.
        """
        present = _members(network)
        return len(present) != len(self._members) or any(
            known() is not entry or place != _place(entry)
            for (known, place), entry in zip(self._members, present, strict=True)
        )


def substituted(network: nn.Module) -> bool:
    """Tell whether plain tensors stand in for parameters, as while `functional_call` runs."""
    parameters = (p for module in network.modules() for p in module._parameters.values())
    return any(p is not None and not isinstance(p, nn.Parameter) for p in parameters)


def _place(entry: Any) -> Any:
    """Return where an ordinary tensor is in memory; the hooks and adapters of a module; otherwise None."""
    if isinstance(entry, nn.Module):
        return [tuple(vars(entry)[name]) for name in _HOOKS] + switches(entry)
    plain = type(entry) in (Tensor, nn.Parameter) and entry.layout == torch.strided
    return (entry.data_ptr(), entry.shape, entry.stride()) if plain else None


def _members(network: nn.Module) -> list[Any]:
    entries = ((m, *m._parameters.values(), *m._buffers.values()) for m in network.modules())
    return [entry for of_module in entries for entry in of_module if entry is not None]
