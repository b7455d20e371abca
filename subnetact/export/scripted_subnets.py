"""The module that TorchScript compiles: the recorded network, and which integers each subnet runs it with."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.slackfit import SlackFit


class ScriptedSubnets(nn.Module):
    """All registered subnets by number; `to_torchscript` adds `forward`, whose inputs are the network's.

    The attributes are the file's own description, which Python reads as `model.accuracy` and C++ as
    `model.attr("accuracy")`.

    Attributes:
        accuracy: of every subnet, percent; NaN if it is not known.
        inputs: of every input its name, dtype, and axes, `InputAxes.described`.
        limits: of every axis of every input, `InputAxes.limits`.
        facts: fingerprint, space, machine and versions. If there is a latency table, those of its
            measurement.
        latency_ms: of every subnet at every batch size; NaN if it does not run. Empty without a table.
        options: per batch size: latency, accuracy and number of the Pareto-optimal subnets, the most accurate
            first.
        cheapest: per accuracy: that, the cheapest subnet that reaches it, and its largest batch size.
    """

    rows: list[list[int]]  # a size row, then where the statistics of every BatchNorm start in `means`
    keys: list[str]
    accuracy: list[float]
    inputs: list[str]
    limits: list[list[tuple[str, int, int]]]
    facts: dict[str, str]
    slo_ms: float
    buckets: int
    batch_sizes: list[int]
    latency_ms: list[list[float]]
    options: list[list[tuple[float, float, int]]]
    cheapest: list[tuple[float, int, int]]

    def __init__(
        self, network: nn.Module, means: Tensor, variances: Tensor, description: dict[str, Any]
    ) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("means", means)
        self.register_buffer("variances", variances)
        undecided = {"slo_ms": 0.0, "buckets": 1, "batch_sizes": [], "latency_ms": []}
        undecided |= {"options": [], "cheapest": []}
        for name, value in (undecided | description).items():
            setattr(self, name, value)

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
    def choose(
        self, slack_ms: float, queued: int, min_accuracy: float = 0.0, slo_ms: float = 0.0
    ) -> tuple[int, int]:
        """Return the subnet and the batch size that SlackFit chooses, with so many requests waiting.

        `min_accuracy`, percent, is that of the most urgent request. `slo_ms` is the time that a request
        usually has; 0 means that of the file.
        """
        if len(self.options) == 0:
            raise ValueError("exported without latencies; give to_torchscript slo_ms=, and it measures them")
        if not slack_ms <= math.inf:  # math.isnan fails in TorchScript of torch 2.6
            raise ValueError("slack_ms is not a number")
        if queued < 1:
            raise ValueError("queued: " + str(queued) + " must be at least 1")
        if not min_accuracy <= self.cheapest[-1][0]:
            best = str(self.cheapest[-1][0])
            raise ValueError("min_accuracy: " + str(min_accuracy) + " % is above the best, " + best)
        slo = self.slo_ms if slo_ms == 0.0 else slo_ms
        fastest, low, high, column = math.inf, math.inf, -math.inf, 0
        for front in self.options:
            for ms, accuracy, _ in front:
                fastest = min(fastest, ms)
                if ms <= slo and accuracy >= min_accuracy:
                    low, high = min(low, ms), max(high, ms)
        if not (fastest <= slo and slo < math.inf):
            raise ValueError("slo_ms: " + str(slo) + " must be finite and at least " + str(fastest))
        while column < len(self.batch_sizes) - 1 and self.batch_sizes[column] < queued:
            column += 1
        width, usable = (high - low) / self.buckets, int(high <= slack_ms)
        for bucket in range(1, self.buckets):
            usable += int(low + width * bucket <= slack_ms)
        for in_buckets in (True, False):  # what a usable bucket holds, or else what ends within the slack
            limit = slo if in_buckets else slack_ms
            for at in range(column, -1, -1):
                for ms, accuracy, subnet in self.options[at]:
                    if ms <= limit and accuracy >= min_accuracy:
                        bucket = int((ms - low) / width) if in_buckets and width > 0.0 else 0
                        if not in_buckets or min(bucket, self.buckets - 1) < usable:
                            return subnet, self.batch_sizes[at]
        for accuracy, subnet, size in self.cheapest:
            if accuracy >= min_accuracy:
                return subnet, size
        raise ValueError("unreachable")

    @torch.jit.export
    def check(self, inputs: list[Tensor], dtypes: list[bool]) -> None:
        """Refuse inputs of other sizes or, where `dtypes` is false, dtypes than the engine takes."""
        sizes: dict[str, int] = {}
        for i, (x, limits) in enumerate(zip(inputs, self.limits)):  # noqa: B905
            right = dtypes[i] and x.dim() == len(limits)
            if right:
                for size, (axis, least, most) in zip(x.size(), limits):  # noqa: B905
                    right = right and least <= size and size <= most and sizes.setdefault(axis, size) == size
            if not right:
                shape = str(x.size()) + ("" if dtypes[i] else " and another dtype")
                raise ValueError("this file takes " + self.inputs[i] + ", not a tensor of shape " + shape)

    @torch.jit.export
    def select(self, subnet: Tensor, batch: int) -> list[int]:
        """Return the integers of the subnet that a tensor names, for a batch of this size."""
        if subnet.dtype == torch.bool and subnet.dim() == 2 and subnet.size(0) == batch:
            return self.rows[self.known(subnet.size(1) - 1)]
        if subnet.dtype != torch.int64:
            raise ValueError("subnet must be an int64 tensor, or bool of shape [batch, number + 1]")
        alone = subnet.dim() == 1 and subnet.size(0) == 1
        if not alone and not (subnet.dim() == 2 and subnet.size(0) == batch and subnet.size(1) == 1):
            shapes = "; give [1], or [" + str(batch) + ", 1], one per sample"
            raise ValueError("subnet has shape " + str(subnet.size()) + shapes)
        first = int(subnet.min())
        if first != int(subnet.max()):
            raise ValueError("one batch holds different subnets; batch per subnet, they cannot run together")
        return self.rows[self.known(first)]


def decide_by(module: Any, table: LatencyTable, slo_ms: float) -> None:
    """Let a `ScriptedSubnets`, compiled or not, choose as `SlackFit(table, slo_ms)` does."""
    policy = SlackFit(table, slo_ms)
    fronts, module.cheapest = policy.fronts()
    module.options = [[(one.latency_ms, one.accuracy, one.subnet) for one in front[::-1]] for front in fronts]
    module.accuracy, module.batch_sizes = [*table.accuracy], [*table.batch_sizes]
    module.latency_ms, module.slo_ms = table.latency_ms.tolist(), float(slo_ms)
    module.buckets = policy.buckets
