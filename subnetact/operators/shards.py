"""Shards: which networks are spread over processes, and whether these run the same subnet if they have to."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import distributed, nn

from subnetact.errors import TrainingError, ViewError

SHARDED = {"FSDPModule", "FullyShardedDataParallel", "DTensor"}
"""The classes of torch, which may not be imported yet, of sharded modules and of their parameters."""


def shards(module: nn.Module) -> set[str]:
    """Return which of the `SHARDED` classes are those of a module and of its own parameters."""
    return {c.__name__ for part in (module, *module.parameters(False)) for c in type(part).__mro__} & SHARDED


def is_sharded(network: nn.Module) -> bool:
    """Tell whether the parameters of a network are spread over processes, as by `fully_shard`."""
    grouped = distributed.is_available() and distributed.is_initialized()
    return grouped and any(map(shards, network.modules()))


def require_whole(network: nn.Module) -> None:
    """Refuse a network with shards, with ViewError, where slices of whole weights are needed."""
    if is_sharded(network):
        raise ViewError(
            "the weights are sharded over processes, and views are slices of whole ones; run "
            "supernet(x, subnet=spec), or gather the state_dict and load it into an own supernet"
        )


def is_collective(network: nn.Module) -> bool:
    """Tell whether every forward of a network needs all processes, which must then run the same subnet."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    normalises = network.training and any(isinstance(m, nn.SyncBatchNorm) for m in network.modules())
    return normalises or is_sharded(network)


def require_same_subnet(network: nn.Module, holder: Any, row: tuple[int, ...]) -> None:
    """Refuse to run a subnet while other processes run others, for which this one would wait for ever.

    Args:
        network: the network.
        holder: its supernet, if there is one, which may be what is sharded.
        row: the size row of the subnet.

    Raises:
        TrainingError: they do, in every process; or tensors are parallel, which no operator slices.
    """
    if not is_collective(network):
        return
    kinds = set[str]().union(*map(shards, (holder or network, *network.modules())))
    if kinds == {"DTensor"}:
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
