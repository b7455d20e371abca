"""The module that TorchScript compiles: rows, statistics and decisions around the symbolic network."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from subnetact.export.torchscript.layout import Layout
from subnetact.serving.policies.slackfit import SlackFit

__all__ = ["METHODS", "ScriptedSubnets", "forward_source"]

METHODS = [
    "forward",
    "forward_row",
    "num_subnets",
    "describe",
    "accuracy",
    "row",
    "select",
    "batch_sizes",
    "latency_ms",
    "choose",
]
"""What callers of the file may call."""


class ScriptedSubnets(nn.Module):
    """All registered subnets, by number; `forward_source` adds what depends on the network's inputs.

    Args:
        network: of `trace_network`.
        rows: each subnet's, of its layout.
        statistics: what they point into.
        layout: of the rows.
        keys: readable keys.
        accuracy: percent, NaN where not known.
        policy: what `choose` decides by; None = there is no table.
    """

    columns: list[int]
    profiled: list[int]
    latencies: list[list[float]]
    slack_steps: list[list[float]]
    answers: list[list[tuple[int, int]]]
    rows: list[list[int]]
    legal: list[tuple[int, list[int], int, list[tuple[int, int]], str]]

    def __init__(
        self,
        network: nn.Module,
        rows: list[list[int]],
        statistics: Tensor,
        layout: Layout,
        keys: list[str],
        accuracy: list[float],
        policy: SlackFit | None,
    ) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("statistics", statistics)
        self.rows = rows
        self.sizes = layout.sizes
        self.normed = len(layout.norms) > 0
        self.legal = [
            (
                dim,
                [legal[0], legal[-1]] if isinstance(legal, range) else list(legal),
                legal.step if isinstance(legal, range) else 0,
                list(gates),
                _not_legal(dim, legal, layout),
            )
            for dim, legal, gates in sorted(layout.legal, key=str)
        ]
        self.keys = keys
        self.accuracies = accuracy
        steps = [] if policy is None else policy.steps()
        self.columns = [] if policy is None else list(policy.table.pad_index)
        self.profiled = [] if policy is None else list(policy.table.batch_sizes)
        self.latencies = [] if policy is None else policy.table.latency_ms.tolist()
        self.margin_ms = 0.0 if policy is None else policy.margin_ms
        self.margin = 0.0 if policy is None else policy.margin
        self.slack_steps = [slacks for slacks, _ in steps]
        self.answers = [answers for _, answers in steps]

    @torch.jit.export
    def num_subnets(self) -> int:
        """Return how many subnets are registered."""
        return len(self.rows)

    @torch.jit.export
    def known(self, subnet: int) -> int:
        """Return the number of a subnet if it is registered."""
        if subnet < 0 or subnet >= len(self.rows):
            raise ValueError("no subnet " + str(subnet) + "; this file has 0.." + str(len(self.rows) - 1))
        return subnet

    @torch.jit.export
    def describe(self, subnet: int) -> str:
        """Return a subnet's readable key."""
        return self.keys[self.known(subnet)]

    @torch.jit.export
    def accuracy(self, subnet: int) -> float:
        """Return a subnet's accuracy, percent; NaN where it is not known."""
        return self.accuracies[self.known(subnet)]

    @torch.jit.export
    def row(self, subnet: int) -> list[int]:
        """Return a subnet's control tuple."""
        return self.rows[self.known(subnet)][: self.sizes]

    @torch.jit.export
    def batch_sizes(self) -> list[int]:
        """Return the profiled batch sizes, ascending; none without a table."""
        return self.profiled

    @torch.jit.export
    def latency_ms(self, subnet: int, batch_size: int) -> float:
        """Return a profiled latency, ms; NaN for one that cannot run."""
        if len(self.profiled) == 0:
            raise ValueError("exported without a latency table; give to_torchscript table= or policy=")
        if batch_size not in self.profiled:
            raise ValueError("batch size " + str(batch_size) + " was not profiled; see batch_sizes()")
        return self.latencies[self.known(subnet)][self.profiled.index(batch_size)]

    @torch.jit.export
    def choose(self, slack_ms: float, queued: int) -> tuple[int, int]:
        """Return (subnet, batch size) for `queued` requests, the most urgent due in `slack_ms`."""
        if len(self.profiled) == 0:
            raise ValueError("exported without a latency table; give to_torchscript table= or policy=")
        if math.isnan(slack_ms):
            raise ValueError("slack_ms is not a number")
        if queued < 1:
            raise ValueError("queued: " + str(queued) + " must be at least 1")
        column = self.columns[queued] if queued < len(self.columns) else len(self.profiled) - 1
        within_ms = (slack_ms - self.margin_ms) / (1.0 + self.margin)
        slacks = self.slack_steps[column]
        low, high = 0, len(slacks)
        while low < high:  # bisect_right
            middle = (low + high) // 2
            if within_ms < slacks[middle]:
                high = middle
            else:
                low = middle + 1
        return self.answers[column][low]

    @torch.jit.export
    def select(self, subnet: Tensor, batch: int) -> list[int]:
        """Return the row of the one subnet that an int64 tensor of shape (1,) or (batch, 1) names."""
        if subnet.dtype != torch.int64:
            raise ValueError("subnet must be an int64 tensor")
        alone = subnet.dim() == 1 and subnet.size(0) == 1
        if not alone and not (subnet.dim() == 2 and subnet.size(0) == batch and subnet.size(1) == 1):
            raise ValueError(
                "subnet has shape "
                + str(subnet.size())
                + "; give [1], or ["
                + str(batch)
                + ", 1], one a sample"
            )
        if subnet.numel() == 0:
            raise ValueError("the batch is empty; give at least one sample, or subnet as [1]")
        first = int(subnet.min())
        if first != int(subnet.max()):
            raise ValueError("one batch holds different subnets; batch per subnet, they cannot run together")
        return self.rows[self.known(first)]

    @torch.jit.export
    def whole(self, row: list[int]) -> list[int]:
        """Return the whole row of a subnet with these sizes."""
        if len(row) != self.sizes:
            raise ValueError("row has " + str(len(row)) + " numbers; this file takes " + str(self.sizes))
        if self.normed:
            found, count = row, 0
            for known in self.rows:
                if known[: self.sizes] == row:
                    found, count = known, count + 1
            if count > 1:
                raise ValueError("several subnets have this row; call forward with a number")
            if count == 1:
                return found
        for dim, legal, step, gates, message in self.legal:
            size, kept = row[dim], True
            for position, value in gates:
                kept = kept and row[position] == value
            if step == 0:
                inside = size in legal
            else:
                inside = size >= legal[0] and size <= legal[1] and (size - legal[0]) % step == 0
            if kept and not inside:
                raise ValueError(message)
        if self.normed:
            raise ValueError("no BatchNorm statistics for this row; calibrate its subnet and export it too")
        return row


def forward_source(inputs: Sequence[str], ranks: Sequence[int | None]) -> str:
    """Write `forward` and `forward_row`, whose arguments depend on the network's, as TorchScript source."""
    names = ", ".join(inputs)
    lines = [f"def forward(self, {names}, subnet):"]
    rank_lines = [
        line
        for name, rank in zip(inputs, ranks, strict=True)
        if rank is not None
        for line in (
            f"    if {name}.dim() != {rank}:",
            f"        dims = str({name}.dim())",
            f"        raise ValueError('{name} has ' + dims + ' dimensions; this file takes {rank}')",
        )
    ]
    run = f"    return self.network({names}, {{}}, self.statistics)"
    lines += [*rank_lines, run.format(f"self.select(subnet, {inputs[0]}.size(0))")]
    lines += [f"def forward_row(self, {names}, row: List[int]):", *rank_lines, run.format("self.whole(row)")]
    return "\n".join(lines) + "\n"


def _not_legal(dim: int, legal: range | tuple[int, ...], layout: Layout) -> str:
    among = f"one of {', '.join(map(str, legal))}"
    if isinstance(legal, range):
        steps = f" in steps of {legal.step}" if legal.step > 1 else ""
        among = f"{legal[0]} to {legal[-1]}{steps}"
    return f"row[{dim}] ({layout.names[dim]}) must be {among}"
