"""Checkpoints: whether a state_dict fits a network, and whether the network has its values already."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.errors import CheckpointError
from subnetact.operators import SubnetNorm

__all__ = ["fitting", "has_values"]

PREFIXES = ("module.", "network.", "_orig_mod.")
"""The prefixes of DataParallel and DistributedDataParallel, of `Supernet`, and of `torch.compile`."""


def fitting(state_dict: Any, own: Mapping[str, Any], strict: bool) -> Mapping[str, Any]:
    """Return a state_dict under the names of a network, or refuse one that does not fit.

    Args:
        state_dict: what was given.
        own: the state_dict of the network.
        strict: whether all tensors must be there, and no others.

    Raises:
        CheckpointError: it is no mapping, a tensor has another shape, or the names do not fit.
    """
    if not isinstance(state_dict, Mapping):
        kind = type(state_dict).__name__
        raise CheckpointError(f"state_dict: expected tensors by name, got {kind}; torch.load(path) reads one")
    named = _without_prefix(state_dict, own)
    wrong = [
        f"{n} is no tensor"
        if not isinstance(t, Tensor)
        else f"{n} {tuple(t.shape)} should be {tuple(own[n].shape)}"
        for n, t in named.items()
        if n in own and not (isinstance(t, Tensor) and t.shape == own[n].shape)
    ]
    if strict:
        missing = [f"{n} is missing" for n in own if n not in named]
        wrong = [*missing, *(f"{n} is extra" for n in named if n not in own), *wrong]
    if wrong:
        hint = _prefix_hint(named, own)
        raise CheckpointError(f"state_dict: {'; '.join(wrong[:10])} ({len(wrong)} in all){hint}")
    return named


def _without_prefix(state_dict: Mapping[str, Any], own: Collection[str]) -> Mapping[str, Any]:
    """Drop a prefix that all names have, if the prefix is none of the network."""
    found = state_dict
    while found and not any(name in own for name in found):
        prefix = next((p for p in PREFIXES if all(str(name).startswith(p) for name in found)), None)
        if prefix is None:
            return state_dict
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def _prefix_hint(state_dict: Mapping[str, Any], own: Collection[str]) -> str:
    """Return what to say of names that would fit without a prefix; nothing if there are none."""
    for prefix in PREFIXES:
        named = [name for name in state_dict if name not in own and str(name).removeprefix(prefix) in own]
        if named:
            return (
                f"; {len(named)} names, {named[0]!r} first, fit without the prefix {prefix!r}, but not all "
                "names have it: remove the prefix from these"
            )
    return ""


def has_values(network: nn.Module, state_dict: Mapping[str, Any], exact: bool) -> bool:
    """Tell whether a network has the values of a state_dict, apart from shared BatchNorm statistics.

    With `exact`, the dtypes must be equal, too. A name that the network does not have means other values,
    because a hook may make something of it. Tensors on the meta device have no values and count as equal.
    """
    statistics = {
        id(buffer) for m in network.modules() if isinstance(m, SubnetNorm) for buffer in m._buffers.values()
    }
    own = network.state_dict(keep_vars=True)
    for name, given in state_dict.items():
        tensor = own.get(name)
        if not isinstance(tensor, Tensor) or not isinstance(given, Tensor):
            return False
        if id(tensor) in statistics or name.endswith("num_batches_tracked") or tensor.is_meta:
            continue
        if (exact and given.dtype != tensor.dtype) or not _equal(_dense(tensor), _dense(given)):
            return False
    return True


def _equal(a: Tensor, b: Tensor) -> bool:
    b = b.to(a.device, a.dtype)
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()))


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
