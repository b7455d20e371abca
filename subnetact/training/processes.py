"""Processes that train together, as those of torchrun: which one this is, and what the first one says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, distributed


def rank_and_count() -> tuple[int, int]:
    """Return the number of this process, from 0, and how many there are."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def agreed(value: Any) -> Any:
    """Return what the first process has for a value."""
    values = [value]
    if rank_and_count()[1] > 1:
        distributed.broadcast_object_list(values)
    return values[0]


def copy_from_first_(tensors: Iterable[Tensor]) -> None:
    """Give tensors the values that they have in the first process."""
    for tensor in tensors if rank_and_count()[1] > 1 else ():
        distributed.broadcast(tensor.detach(), 0)
