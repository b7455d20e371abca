"""Changes of weights that leave no trace, found by comparing what is cached with what is there.

No counter of torch moves at `parameter.data = ...`, at writes through NumPy or into tensors that were made in
inference mode, or when a plain attribute of a module gets another value. One moves at `parameter.set_(...)`,
but views stay where the parameter was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from torch import nn

from subnetact.errors import StaleWeights
from subnetact.operators.base import template_of
from subnetact.operators.tensor_version import storage_id
from subnetact.supernet.bind import operators_in

NamedView: TypeAlias = tuple[str, nn.Module]
"""The name of a subnet, and its view."""

_PLAIN = (bool, int, float, str, tuple, type(None))


def plain_attributes(network: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the plain numbers, texts and tuples of all modules inside of a network now, by path and name."""
    attributes = {path: vars(template_of(module)).items() for path, module in network.named_modules()}
    return {
        path: {name: value for name, value in own if name != "training" and isinstance(value, _PLAIN)}
        for path, own in attributes.items()
    }


def changed_attributes(network: nn.Module, former: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return which of the `former` plain attributes have another value in a network now, one line each."""
    present = plain_attributes(network)
    return [
        f"{path or type(network).__name__}: the attribute {name} was changed"
        for path, known in former.items()
        for name in known.keys() | present.get(path, known).keys()
        if not alike(known.get(name), present.get(path, known).get(name))
    ]


def alike(one: Any, other: Any) -> bool:
    """Tell whether values are equal in all their members; what has no members that Python compares is not."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if hasattr(one, "__dict__"):
        return alike(vars(one), vars(other))
    return isinstance(one, str | bytes | int | float | complex | set | frozenset) and one == other


def outdated(network: nn.Module, views: Iterable[NamedView]) -> list[str]:
    """Return which views and packed copies do not match the weights of a network now, one line each."""
    present = {storage_id(parameter) for parameter in network.parameters()}
    found = []
    for name, view in views:
        tensors = view.named_parameters()
        moved = [n for n, t in tensors if "packed" not in t.__dict__ and storage_id(t) not in present]
        if moved:
            found.append(f"{name}: {', '.join(moved[:3])} ({len(moved)} in all) moved to other storage")
    for operator in operators_in(network):
        if not all(copy.matches() for copy in operator.packed_copies()):
            found.append(f"{operator.path}: a packed copy is out of date")
    return found


def stale_weights(found: list[str], owner: str) -> StaleWeights:
    """Return the error of `verify`; the owner, `supernet` or `engine`, has the methods that mend it."""
    return StaleWeights(
        f"{'; '.join(found[:5])} ({len(found)} in all); weights were changed without a trace: call "
        f"{owner}.verify(refresh=True), and change weights in place (with torch.no_grad()) or with "
        "supernet.load_state_dict"
    )
