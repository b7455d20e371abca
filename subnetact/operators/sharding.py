"""Sharded networks: which are, and whether all processes run the same subnet where they have to."""

from __future__ import annotations

import sys
from typing import Any
from zlib import crc32

import torch
from torch import distributed, nn

from subnetact.errors import TrainingError

__all__ = ["is_collective", "is_sharded", "require_same_subnet"]


def _instances(network: nn.Module, module: str, name: str) -> bool:
    """Tell whether a module or a parameter is of a class, which nothing is before somebody imports it."""
    cls = getattr(sys.modules.get(module), name, ())
    return any(isinstance(part, cls) for part in (*network.modules(), *network.parameters()))


def _is_fsdp(network: nn.Module) -> bool:
    return _instances(network, "torch.distributed.fsdp", "FSDPModule")


def is_sharded(network: nn.Module) -> bool:
    """Tell whether the parameters of a network are spread over processes, as by `fully_shard`."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return _is_fsdp(network) or _instances(network, "torch.distributed.tensor", "DTensor")


def is_collective(network: nn.Module) -> bool:
    """Tell whether every forward of a network needs all processes, which must then run the same subnet."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    synchronous = network.training and any(isinstance(m, nn.SyncBatchNorm) for m in network.modules())
    return synchronous or is_sharded(network)


def require_same_subnet(network: nn.Module, row: tuple[int, ...]) -> None:
    """Refuse to run a subnet while other processes run others, for which this one would wait for ever.

    Raises:
        TrainingError: they do, in every process; or tensors are parallel, which no operator slices.
    """
    if not is_collective(network):
        return
    if is_sharded(network) and not _is_fsdp(network):
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
