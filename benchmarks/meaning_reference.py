"""What a subnet has to compute, apart from the library's own proof.

The reference is a copy of the model from before `insert_`. Which elements of a parameter a subnet uses is
read from the memory that the parameters of its view share with the supernet; the others are zero in the copy.
Skipped blocks return their input, and norms see the kept features only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from subnetact import Supernet
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.spec import SubnetSpec
from subnetact.supernet.unused_weights import _used

SENTINEL = 1e5
"""Larger numbers that are equal on both sides, -1e9 where padded, say nothing about an output's scale."""


def used_elements(supernet: Supernet, spec: SubnetSpec, view: nn.Module) -> dict[str, Tensor]:
    """Return, for every parameter of the supernet's network, 1 where a view reads it and 0 elsewhere."""
    parameters = dict(supernet.network.named_parameters(remove_duplicate=False))
    used = {id(p): torch.zeros(p.numel()) for p in parameters.values()}
    by_memory = {p.untyped_storage().data_ptr(): p for p in parameters.values()}

    def mark(part: Tensor, whole: Tensor) -> None:
        offset = part.storage_offset() - whole.storage_offset()
        used[id(whole)].as_strided(part.shape, part.stride(), offset).fill_(1)

    packed = []
    for name, part in view.named_parameters(remove_duplicate=False):
        whole = by_memory.get(part.untyped_storage().data_ptr())
        if whole is None:
            packed.append(name)
        elif part.numel():
            mark(part, whole)
    for module in view.modules():  # Some hold their parts as lists.
        for value in vars(module).values():
            for leaf in [] if isinstance(value, dict) else tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in by_memory:
                    mark(leaf, by_memory[leaf.untyped_storage().data_ptr()])
    row = supernet.space.resolve(spec)
    for name in packed:  # These are copies: what they are copied from is only known to the operator.
        path, _, leaf = name.rpartition(".")
        if name in parameters:
            operator: Any = supernet.network.get_submodule(path)
            read = _used(operator, operator.sizes(row)).get(leaf)
            if read is not None:
                used[id(parameters[name])] = read.float().flatten()
    return {name: used[id(p)].view(p.shape) for name, p in parameters.items()}


def reference_of(model: nn.Module, view: nn.Module, used: dict[str, Tensor]) -> nn.Module:
    """Return a copy of the model that computes what a subnet has to compute."""
    reference = copy.deepcopy(model)
    for name, module in view.named_modules():
        if isinstance(module, SkippedLayer):
            skipped = reference.get_submodule(name)
            skipped.__class__ = type("Skipped", (type(skipped),), {"forward": _first})
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.mul_(used[name])
    for name, module in list(reference.named_modules()):
        kept = used.get(f"{name}.weight")
        if kept is not None and _is_norm(module) and kept.dim() == 1 and 0 < kept.sum() < kept.numel():
            _narrow(module, kept.nonzero().flatten())
    return reference


def _first(*arguments: Any, **_: Any) -> Any:
    return arguments[1]  # after the module


def _is_norm(module: nn.Module) -> bool:
    norms = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
    return isinstance(module, norms) or type(module).__name__.endswith("RMSNorm")


def _narrow(norm: Any, kept: Tensor) -> None:
    """Let a norm see some features only, and return zeros for the others."""
    small: Any = copy.deepcopy(norm)
    if isinstance(norm, nn.GroupNorm):
        groups = len(kept) // (norm.num_channels // norm.num_groups) if norm.num_groups > 1 else 1
        small.num_channels, small.num_groups = len(kept), groups
    elif isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        small.normalized_shape = (len(kept),)
    axis = 1 if isinstance(norm, nn.GroupNorm) else -1

    def narrowed(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        own = {name: p.index_select(0, kept) for name, p in module.named_parameters()}
        seen = functional_call(small, own, (inputs[0].index_select(axis, kept),))
        return torch.zeros_like(output).index_copy(axis, kept, seen)

    norm.register_forward_hook(narrowed)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output, also those in dataclasses, distributions and other objects."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict | list | tuple):
        for part in output.values() if isinstance(output, dict) else output:
            yield from tensors_in(part)
    elif hasattr(output, "__dict__"):
        yield from tensors_in(vars(output))


def relative_difference(found: Any, expected: Any) -> float | str:
    """Return the largest difference relative to the largest number of a tensor, or what else is not equal.

    Of whole numbers and truth values, it is the share of those that differ.
    """
    ours, theirs = list(tensors_in(found)), list(tensors_in(expected))
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return f"shapes {[tuple(t.shape) for t in ours]}, not {[tuple(t.shape) for t in theirs]}"
    return max(
        (_difference(a, b) for a, b in zip(ours, theirs, strict=True)), default="no tensors", key=_size
    )


def _size(difference: float | str) -> float:
    return float("inf") if isinstance(difference, str) else difference


def _difference(ours: Tensor, theirs: Tensor) -> float | str:
    equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(equal.all()):
        return 0.0
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return float((~equal).float().mean())
    finite = ours.isfinite() & theirs.isfinite()
    if not bool((equal | finite).all()):
        return "a number that is not finite on one side only"
    counted = finite & ~(equal & (theirs.abs() > SENTINEL))
    return float((ours - theirs)[finite].abs().max() / theirs[counted].abs().max().clamp(min=1e-12))
