"""The module that TorchScript compiles: the traced network, full rows, statistics and decisions.

The statistics of all subnets are one flat tensor. A full row is what one forward pass needs to know of its
subnet: the subnet's size row, followed by one position in this tensor for each BatchNorm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.serving.policies.slackfit import SlackFit

__all__ = ["METHODS", "Gate", "RowLayout", "ScriptedSubnets", "forward_source"]

METHODS = [
    "forward",
    "forward_size_row",
    "num_subnets",
    "describe",
    "accuracy",
    "size_row",
    "select",
    "batch_sizes",
    "latency_ms",
    "choose",
]
"""The methods that callers of the file may use."""

Gate = tuple[int, int]
"""A position in a size row, and the value that it must have so that a layer is kept."""


@dataclass(frozen=True)
class RowLayout:
    """The layout of a full row: the size row of a subnet, then one position for each BatchNorm.

    The size row is `SubnetSpace.resolve(spec)`. The position of a BatchNorm is where its means start in the
    flat statistics; its variances come after its means.

    Attributes:
        names: names of the sizes, in order (`SubnetSpace.dimensions`).
        norms: paths of the norms, in order.
        legal: for each size that an operator reads, its position, its legal values, and the gates that keep
            the operator.
    """

    names: tuple[str, ...]
    norms: tuple[str, ...]
    legal: set[tuple[int, Any, tuple[Gate, ...]]] = field(default_factory=set)

    @property
    def sizes(self) -> int:
        """The number of sizes in a size row."""
        return len(self.names)


class ScriptedSubnets(nn.Module):
    """All registered subnets by number; `forward_source` adds the methods that depend on the inputs.

    Args:
        network: the traced network, from `trace_network`.
        rows: the full row of every subnet.
        statistics: the flat BatchNorm statistics of all subnets.
        layout: the layout of the full rows.
        keys: readable key of every subnet.
        accuracy: accuracy of every subnet in percent, NaN if it is unknown.
        policy: the policy of `choose`, with the latency table. If None, the file has neither.
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
        layout: RowLayout,
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
        """Return the number of registered subnets."""
        return len(self.rows)

    @torch.jit.export
    def known(self, subnet: int) -> int:
        """Return `subnet`, the number of a registered subnet.

        Raises:
            ValueError: no subnet has this number.
        """
        if subnet < 0 or subnet >= len(self.rows):
            raise ValueError("no subnet " + str(subnet) + "; this file has 0.." + str(len(self.rows) - 1))
        return subnet

    @torch.jit.export
    def describe(self, subnet: int) -> str:
        """Return the readable key of a subnet."""
        return self.keys[self.known(subnet)]

    @torch.jit.export
    def accuracy(self, subnet: int) -> float:
        """Return the accuracy of a subnet in percent, NaN if it is unknown."""
        return self.accuracies[self.known(subnet)]

    @torch.jit.export
    def size_row(self, subnet: int) -> list[int]:
        """Return the size row of a subnet, which `forward_size_row` takes."""
        return self.rows[self.known(subnet)][: self.sizes]

    @torch.jit.export
    def batch_sizes(self) -> list[int]:
        """Return the profiled batch sizes, ascending; the list is empty if there is no latency table."""
        return self.profiled

    @torch.jit.export
    def latency_ms(self, subnet: int, batch_size: int) -> float:
        """Return the profiled latency of a batch in ms, NaN if the subnet cannot run this batch size.

        Raises:
            ValueError: there is no latency table, the batch size was not profiled, or no subnet has this
                number.
        """
        if len(self.profiled) == 0:
            raise ValueError("exported without a latency table; give to_torchscript table= or policy=")
        if batch_size not in self.profiled:
            raise ValueError("batch size " + str(batch_size) + " was not profiled; see batch_sizes()")
        return self.latencies[self.known(subnet)][self.profiled.index(batch_size)]

    @torch.jit.export
    def choose(self, slack_ms: float, queued: int) -> tuple[int, int]:
        """Choose a subnet and a batch size as `SlackFit` does.

        Args:
            slack_ms: time until the most urgent request is due, in ms.
            queued: number of waiting requests.

        Returns:
            The number of the subnet, and the batch size.

        Raises:
            ValueError: there is no latency table, `slack_ms` is NaN, or `queued` is below 1.
        """
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
        """Return the full row of the subnet that a tensor names.

        Args:
            subnet: the number of the subnet, int64, of shape (1,), or of shape (batch, 1) with equal entries.
            batch: the batch size of the inputs.

        Raises:
            ValueError: the tensor has another dtype or shape, names several subnets, or names no registered
                one.
        """
        if subnet.dtype != torch.int64:
            raise ValueError("subnet must be an int64 tensor")
        alone = subnet.dim() == 1 and subnet.size(0) == 1
        if not alone and not (subnet.dim() == 2 and subnet.size(0) == batch and subnet.size(1) == 1):
            raise ValueError(
                "subnet has shape "
                + str(subnet.size())
                + "; give [1], or ["
                + str(batch)
                + ", 1], one per sample"
            )
        if subnet.numel() == 0:
            raise ValueError("the batch is empty; give at least one sample, or subnet as [1]")
        first = int(subnet.min())
        if first != int(subnet.max()):
            raise ValueError("one batch holds different subnets; batch per subnet, they cannot run together")
        return self.rows[self.known(first)]

    @torch.jit.export
    def full_row(self, sizes: list[int]) -> list[int]:
        """Return the full row of the subnet with a size row.

        Raises:
            ValueError: the size row has the wrong length or an illegal size, or belongs to several subnets
                or, if the network has BatchNorm, to none of the registered ones.
        """
        if len(sizes) != self.sizes:
            raise ValueError(
                "size row has " + str(len(sizes)) + " numbers; this file takes " + str(self.sizes)
            )
        if self.normed:
            found, count = sizes, 0
            for known in self.rows:
                if known[: self.sizes] == sizes:
                    found, count = known, count + 1
            if count > 1:
                raise ValueError("several subnets have this size row; call forward with a number")
            if count == 1:
                return found
        for dim, legal, step, gates, message in self.legal:
            size, kept = sizes[dim], True
            for position, value in gates:
                kept = kept and sizes[position] == value
            if step == 0:
                inside = size in legal
            else:
                inside = size >= legal[0] and size <= legal[1] and (size - legal[0]) % step == 0
            if kept and not inside:
                raise ValueError(message)
        if self.normed:
            raise ValueError("no BatchNorm statistics for this size row; calibrate its subnet and export it")
        return sizes


def forward_source(inputs: Sequence[str], ranks: Sequence[int | None]) -> str:
    """Write the methods `forward` and `forward_size_row` as TorchScript source.

    Args:
        inputs: names of the network's inputs.
        ranks: number of dimensions of each input. If None, it is not checked.

    Returns:
        The source of both methods.
    """
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
    lines += [f"def forward_size_row(self, {names}, size_row: List[int]):", *rank_lines]
    lines += [run.format("self.full_row(size_row)")]
    return "\n".join(lines) + "\n"


def _not_legal(dim: int, legal: range | tuple[int, ...], layout: RowLayout) -> str:
    among = f"one of {', '.join(map(str, legal))}"
    if isinstance(legal, range):
        steps = f" in steps of {legal.step}" if legal.step > 1 else ""
        among = f"{legal[0]} to {legal[-1]}{steps}"
    return f"size_row[{dim}] ({layout.names[dim]}) must be {among}"
