"""EngineStats: the figures that an engine reports about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine at one moment. All sizes are in bytes.

    Attributes:
        subnets: number of subnets that are served.
        fused: number of them that run as fused programs now.
        weights: bytes of the supernet's parameters and buffers.
        packed_bytes: bytes of slices that are no views of the weights, such as copies of segments. Subnets
            with the same slice of a layer share one.
        lowered_bytes: bytes of the copies of weights at lower precisions, which all subnets share.
        norm_table: bytes of the statistics of all calibrated subnets.
        fused_bytes: bytes of the tensors that belong to fused programs.
        graphs: bytes of captured graphs.
        budget: the engine's `memory_budget_mb` in bytes. `fused_bytes` and `graphs` together stay below it.
        compiled: number of subnets that torch.compile has compiled.
        unfused: for each subnet id that cannot become a fused program, the reason in one line.
    """

    subnets: int
    fused: int
    weights: int
    packed_bytes: int
    lowered_bytes: int
    norm_table: int
    fused_bytes: int
    graphs: int
    budget: int
    compiled: int
    unfused: Mapping[int, str]


def weight_bytes(network: nn.Module) -> int:
    """Return the bytes of a network's parameters and buffers. Every storage counts once."""
    storages = [t.untyped_storage() for t in (*network.parameters(), *network.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
