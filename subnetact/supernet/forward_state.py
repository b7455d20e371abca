"""The state of a forward: buffers that it writes itself, such as a count of its calls, or frequencies.

They are no weights: every view has its own, which begins as the network's is when the view is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from subnetact.operators.tensor_version import tensor_version
from subnetact.supernet.bind import private_buffers


def own_state_(view: nn.Module, names: Collection[str]) -> None:
    """Give a view copies of the buffers with these names, where it has them."""
    modules, own = dict(view.named_modules() if names else ()), private_buffers()
    for path, _, name in (name.rpartition(".") for name in names):
        buffers = modules[path]._buffers if path in modules else {}
        if buffers.get(name) is not None:
            object.__setattr__(modules[path], "_buffers", {**buffers, name: own(buffers[name])})


def note_state_(supernet: Any, names: Collection[str]) -> None:
    """Note that a forward writes the buffers with these names, of which every view then has its own."""
    buffers = (name for name, _ in supernet._present().named_buffers(remove_duplicate=False))
    with supernet._generation.lock:
        known = supernet.state
        supernet.state = known.union(name for name in buffers if name in names)
        if supernet.state != known:
            supernet._generation.move(same=True)


def watched_buffers(network: nn.Module) -> Callable[[], list[str]]:
    """Return a function that names the buffers of a network that were written since now."""
    buffers = dict(network.named_buffers(remove_duplicate=False))
    versions = {name: tensor_version(buffer) for name, buffer in buffers.items()}
    return lambda: [name for name, buffer in buffers.items() if tensor_version(buffer) != versions[name]]
