"""The module that TorchScript compiles: the recorded network, and which integers each subnet runs it with."""

import math

import torch
from torch import Tensor, nn


class ScriptedSubnets(nn.Module):
    """All registered subnets by number; `to_torchscript` adds `forward`, whose inputs are the network's."""

    rows: list[list[int]]  # a size row, then where the statistics of every BatchNorm start in `means`
    keys: list[str]
    columns: list[int]  # by waiting requests: the position of the batch size that they round up to
    steps: list[tuple[list[float], list[tuple[int, int]]]]
    """Per batch size: the slacks in ms at which the decision changes, and one more (subnet, batch size)."""

    def __init__(
        self,
        network: nn.Module,
        rows: list[list[int]],
        means: Tensor,
        variances: Tensor,
        keys: list[str],
        columns: list[int],
        steps: list[tuple[list[float], list[tuple[int, int]]]],
    ) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("means", means)
        self.register_buffer("variances", variances)
        self.rows = rows
        self.keys = keys
        self.columns = columns
        self.steps = steps

    @torch.jit.export
    def num_subnets(self) -> int:
        """Return the number of registered subnets."""
        return len(self.rows)

    @torch.jit.export
    def known(self, subnet: int) -> int:
        """Return the number of a subnet, if there is such a subnet."""
        if subnet < 0 or subnet >= len(self.rows):
            raise ValueError("no subnet " + str(subnet) + "; this file has 0.." + str(len(self.rows) - 1))
        return subnet

    @torch.jit.export
    def describe(self, subnet: int) -> str:
        """Return the readable key of a subnet."""
        return self.keys[self.known(subnet)]

    @torch.jit.export
    def choose(self, slack_ms: float, queued: int) -> tuple[int, int]:
        """Return the subnet and the batch size that SlackFit chooses, with so many requests waiting."""
        if len(self.columns) == 0:
            raise ValueError("exported without a latency table; give to_torchscript table=")
        if math.isnan(slack_ms):
            raise ValueError("slack_ms is not a number")
        if queued < 1:
            raise ValueError("queued: " + str(queued) + " must be at least 1")
        slacks, decisions = self.steps[self.columns[min(queued, len(self.columns) - 1)]]
        reached = 0
        for slack in slacks:
            if slack <= slack_ms:
                reached += 1
        return decisions[reached]

    @torch.jit.export
    def require_dims(self, name: str, dims: int, expected: int) -> None:
        """Refuse an input with another number of dimensions than the example's."""
        if dims != expected:
            raise ValueError(name + " has " + str(dims) + " dimensions; this file takes " + str(expected))

    @torch.jit.export
    def select(self, subnet: Tensor, batch: int) -> list[int]:
        """Return the integers of the subnet that a tensor names, for a batch of this size."""
        if subnet.dtype != torch.int64:
            raise ValueError("subnet must be an int64 tensor")
        alone = subnet.dim() == 1 and subnet.size(0) == 1
        if not alone and not (subnet.dim() == 2 and subnet.size(0) == batch and subnet.size(1) == 1):
            shapes = "; give [1], or [" + str(batch) + ", 1], one per sample"
            raise ValueError("subnet has shape " + str(subnet.size()) + shapes)
        if subnet.numel() == 0:
            raise ValueError("the batch is empty; give at least one sample, or subnet as [1]")
        first = int(subnet.min())
        if first != int(subnet.max()):
            raise ValueError("one batch holds different subnets; batch per subnet, they cannot run together")
        return self.rows[self.known(first)]
