"""Shards: which networks are spread over processes, and whether these run the same subnet if they have to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import torch
from torch import distributed, nn

from subnetact.errors import TrainingError

__all__ = ["is_collective", "is_sharded", "require_same_subnet"]


def _any(parts: Iterable[Any], name: str) -> bool:
    """Tell whether something is of a class of torch with this name, which may not be imported yet."""
    return any(cls.__name__ == name for part in parts for cls in type(part).__mro__)


def is_sharded(network: nn.Module) -> bool:
    """Tell whether the parameters of a network are spread over processes, as by `fully_shard`."""
    grouped = distributed.is_available() and distributed.is_initialized()
    return grouped and (_any(network.modules(), "FSDPModule") or _any(network.parameters(), "DTensor"))


def is_collective(network: nn.Module) -> bool:
    """Tell whether every forward of a network needs all processes, which must then run the same subnet."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return is_sharded(network) or (
        network.training and any(isinstance(m, nn.SyncBatchNorm) for m in network.modules())
    )


def require_same_subnet(network: nn.Module, row: tuple[int, ...]) -> None:
    """Refuse to run a subnet while other processes run others, for which this one would wait for ever.

    Raises:
        TrainingError: they do, in every process; or tensors are parallel, which no operator slices.
    """
    if not is_collective(network):
        return
    if is_sharded(network) and not _any(network.modules(), "FSDPModule"):
        raise TrainingError(
            "the network has tensor-parallel parameters, which subnets cannot slice; shard it with "
            "fully_shard (FSDP2) instead of parallelize_module"
        )
    number, device = crc32(repr(row).encode()), next(network.parameters()).device
    ends: Any = torch.tensor([number, -number], device=device)
    distributed.all_reduce(ends, distributed.ReduceOp.MAX)
    if int(ends[0]) != -int(ends[1]):
        raise TrainingError(
            "processes run different subnets of a network whose forward needs all of them, as it is sharded "
            "or has SyncBatchNorm; they would wait for ever: draw with the same seed in every process, or "
            "use sandwich_step"
        )
