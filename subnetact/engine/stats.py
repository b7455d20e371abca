"""What an engine reports of itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

__all__ = ["EngineStats", "weight_bytes"]


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine.

    Attributes:
        subnets: how many are served.
        fused: how many of them run as fused programs.
        actuate_us: median time to choose a ready subnet, microseconds.
        bind_ms: median time it took to make a subnet ready, ms.
        weights: bytes of the supernet's parameters and buffers.
        norm_table: bytes of the statistics of all calibrated subnets.
        fused_bytes: bytes of the tensors of all fused programs.
        graphs: bytes of captured graphs.
        budget: the most bytes that `fused_bytes` and `graphs` may have together.
        compiled: how many subnets have code that torch.compile made.
    """

    subnets: int
    fused: int
    actuate_us: float
    bind_ms: float
    weights: int
    norm_table: int
    fused_bytes: int
    graphs: int
    budget: int
    compiled: int


def weight_bytes(network: nn.Module) -> int:
    """Return the bytes of a network's parameters and buffers, each storage once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*network.parameters(), *network.buffers())
    }
    return sum(storages.values())
