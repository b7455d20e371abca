"""Prefixes of names: what wrappers around a network add to the names of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["prefix_hint", "without_prefix"]

PREFIXES = ("module.", "network.", "_orig_mod.")
"""The prefixes of DataParallel and DistributedDataParallel, of `Supernet`, and of `torch.compile`."""


def without_prefix(state_dict: Mapping[str, Any], own: Collection[str]) -> Mapping[str, Any]:
    """Return a state_dict without a prefix that all its names have, if the prefix is none of the network.

    Args:
        state_dict: tensors by name.
        own: the names of the network.

    Returns:
        The given mapping if a name in it is one of the network, or if the names have no such prefix.
    """
    found = state_dict
    while found and not any(name in own for name in found):
        prefix = next((p for p in PREFIXES if all(str(name).startswith(p) for name in found)), None)
        if prefix is None:
            return state_dict
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def prefix_hint(state_dict: Mapping[str, Any], own: Collection[str]) -> str:
    """Return what to say of names that would fit without a prefix; nothing if there are none.

    Args:
        state_dict: tensors by name, some of which do not fit.
        own: the names of the network.
    """
    for prefix in PREFIXES:
        named = [name for name in state_dict if name not in own and str(name).removeprefix(prefix) in own]
        if named:
            return (
                f"; {len(named)} names, {named[0]!r} first, fit without the prefix {prefix!r}, but not all "
                "names have it: remove the prefix from these"
            )
    return ""
