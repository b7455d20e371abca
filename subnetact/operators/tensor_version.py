"""The version counter of a tensor, which tells whether the tensor has changed in place, and its storage."""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_version = attrgetter("_version")


def tensor_version(tensor: Tensor) -> int:
    """Return a number that grows when a tensor changes in place; always 0 if made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def counting(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that count their changes; those that were made in inference mode do not."""
    return [tensor for tensor in tensors if not tensor.is_inference()]


def changes_of(tensors: Iterable[Tensor]) -> int:
    """Return a number that grows whenever one of some tensors that are `counting` is changed in place."""
    return sum(map(_version, tensors))


def storage_id(tensor: Tensor) -> int:
    """Return a number that tells storages apart; it exists for tensors on the meta device as well."""
    return int(tensor.untyped_storage()._cdata)


def tensor_place(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tensors that are the same numbers in memory share; a tensor without storage is alone."""
    if tensor.layout != torch.strided or not tensor.numel():
        return (id(tensor),)
    return storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _count_fused_step(optimizer: Optimizer, _: Any, __: Any) -> None:
    """Count a step of an optimizer with `fused=True`, which changes parameters without counting it."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([p for p in group["params"] if p.grad is not None])


_count_fused_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # Compiled steps call it all the same.
register_optimizer_step_post_hook(_count_fused_step)
