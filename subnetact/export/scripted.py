"""The module that TorchScript compiles: rows, statistics and policy around the symbolic network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["METHODS", "ScriptedSubnets", "forward_source"]

METHODS = ["num_subnets", "describe"]


class ScriptedSubnets(nn.Module):
    """All registered subnets."""

    def __init__(self, network: nn.Module, rows: list[list[int]], statistics: Tensor) -> None:
        super().__init__()
        self.network = network
        self.rows = rows
        self.register_buffer("statistics", statistics)

    @torch.jit.export
    def num_subnets(self) -> int:
        """Return how many subnets are registered."""
        return len(self.rows)

    @torch.jit.export
    def describe(self, subnet: int) -> str:
        return str(subnet)

    @torch.jit.export
    def select(self, subnet: Tensor) -> list[int]:
        return self.rows[int(subnet.flatten()[0])]


def forward_source(inputs: Sequence[str]) -> str:
    names = ", ".join(inputs)
    return f"def forward(self, {names}, subnet):\n    return self.network({names}, self.select(subnet), self.statistics)\n"
