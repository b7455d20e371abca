"""The state of a forward: buffers that it writes itself, such as a mask that grows or a count of its calls.

They are no weights: every view has its own, which begins as the network's is when the view is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from subnetact.operators.base import template_of
from subnetact.operators.tensor_version import tensor_version

__all__ = ["STATE", "note_state_", "state_names", "state_of", "watched_buffers"]

STATE = "_state_of_forward"
"""The attribute of a module with the names of its buffers that are state."""


def state_of(module: nn.Module) -> Collection[str]:
    """Return the names of those buffers of a module that are state."""
    names: Collection[str] = vars(template_of(module)).get(STATE, ())
    return names


def state_names(network: nn.Module) -> list[str]:
    """Return the names, in a network, of all buffers that are state."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in network.named_modules(remove_duplicate=False)
        for name in sorted(state_of(module))
    ]


def note_state_(network: nn.Module, names: Collection[str]) -> bool:
    """Note that buffers with these names are state; tell whether this was not known of one of them."""
    before = state_names(network)
    for path, module in network.named_modules(remove_duplicate=False):
        written = {name for name in module._buffers if f"{path}.{name}".lstrip(".") in names}
        if written:
            vars(template_of(module))[STATE] = frozenset(written.union(state_of(module)))
    return state_names(network) != before


def watched_buffers(network: nn.Module) -> Callable[[], list[str]]:
    """Return a function that names the buffers of a network that were written or replaced since now."""
    buffers = dict(network.named_buffers(remove_duplicate=False))
    versions = {name: tensor_version(buffer) for name, buffer in buffers.items()}

    def written() -> list[str]:
        present = dict(network.named_buffers(remove_duplicate=False))
        return [
            name
            for name, buffer in buffers.items()
            if not hasattr(buffer, "packed")  # These follow the weights.
            and (present.get(name) is not buffer or tensor_version(buffer) != versions[name])
        ]

    return written
