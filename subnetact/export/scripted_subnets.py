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
    """

    rows: list[list[int]]  # a size row, then where the statistics of every BatchNorm start in `means`
    keys: list[str]
    accuracy: list[float]
    """Of every subnet, percent; NaN if it is not known."""
    input_names: list[str]
    input_dtypes: list[str]
    """Such as float32."""
    input_axes: list[list[tuple[str, int, int]]]
    """Name, least and greatest size of every axis; axes of one name are equally long in all inputs."""
    facts: dict[str, str]
    """Fingerprint, space, machine and versions. If there is a latency table, those of its measurement."""
    slo_ms: float
    buckets: int
    batch_sizes: list[int]
    latency_ms: list[list[float]]
    """Of every subnet at every batch size; NaN if it does not run. Empty without a latency table."""
    options: list[list[list[float]]]
    """Per batch size: latencies of the Pareto-optimal subnets, descending, their accuracies and numbers."""
    cheapest: list[tuple[float, int, int]]
    """Per accuracy: that, the cheapest subnet that reaches it, and its largest batch size."""

    def __init__(
        self,
        network: nn.Module,
        rows: list[list[int]],
        means: Tensor,
        variances: Tensor,
        keys: list[str],
        accuracy: list[float],
        inputs: list[tuple[str, str, list[tuple[str, int, int]]]],
        facts: dict[str, str],
    ) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("means", means)
        self.register_buffer("variances", variances)
        self.rows = rows
        self.keys = keys
        self.accuracy = accuracy
        self.input_names = [name for name, _, _ in inputs]
        self.input_dtypes = [dtype for _, dtype, _ in inputs]
        self.input_axes = [axes for _, _, axes in inputs]
        self.facts = facts
        self.slo_ms = 0.0
        self.buckets = 0
        self.batch_sizes = []
        self.latency_ms = []
        self.options = []
        self.cheapest = []

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
        if math.isnan(slack_ms):
            raise ValueError("slack_ms is not a number")
        if queued < 1:
            raise ValueError("queued: " + str(queued) + " must be at least 1")
        best = self.cheapest[-1][0]
        if not min_accuracy <= best:
            raise ValueError("min_accuracy: " + str(min_accuracy) + " % is above the best, " + str(best))
        slo = self.slo_ms if slo_ms == 0.0 else slo_ms
        fastest, column, low, high = math.inf, 0, math.inf, -math.inf
        firsts: list[int] = []
        for at, (latencies, accuracies, _) in enumerate(self.options):
            if at > 0 and self.batch_sizes[at - 1] < queued:
                column = at
            first = 0
            if len(latencies) > 0:
                fastest = min(fastest, latencies[-1])
                if latencies[0] > slo:
                    first = self.position(latencies, slo, False, 0.0, 1.0)
                last = self.position(accuracies, min_accuracy, True, 0.0, 1.0) - 1
                if first <= last:
                    low, high = min(low, latencies[last]), max(high, latencies[first])
            firsts.append(first)
        if not (fastest <= slo and slo < math.inf):
            raise ValueError("slo_ms: " + str(slo) + " must be finite and at least " + str(fastest))
        usable, width = 0, (high - low) / self.buckets
        if low <= high:  # else the buckets are empty
            while usable < self.buckets - 1 and low + width * (usable + 1) <= slack_ms:
                usable += 1
            if usable == self.buckets - 1 and high <= slack_ms:
                usable = self.buckets
        for in_buckets in (True, False):  # what a usable bucket holds, or else what ends within the slack
            for at in range(column if usable > 0 or not in_buckets else -1, -1, -1):
                latencies, accuracies, subnets = self.options[at]
                first = firsts[at]
                if not in_buckets:
                    first = self.position(latencies, slack_ms, False, 0.0, 1.0)
                elif usable < self.buckets:
                    first = max(first, self.position(latencies, float(usable), True, low, width))
                if first < len(latencies) and accuracies[first] >= min_accuracy:
                    return int(subnets[first]), self.batch_sizes[at]
        for accuracy, subnet, size in self.cheapest:
            if accuracy >= min_accuracy:
                return subnet, size
        raise ValueError("unreachable")

    @torch.jit.export
    def position(self, values: list[float], limit: float, strict: bool, low: float, width: float) -> int:
        """Return the first of descending values where (value - low) / width is at most, or below, a limit."""
        start, end = 0, len(values)
        at = end - 1
        while start < end:
            reach = (values[at] - low) / width
            if reach < limit or (reach == limit and not strict):
                end = at
            else:
                start = at + 1
            at = (start + end) // 2
        return start

    @torch.jit.export
    def check(self, inputs: list[Tensor], dtypes: list[bool]) -> None:
        """Refuse inputs of other sizes or, where `dtypes` is false, dtypes than the engine takes."""
        sizes: dict[str, int] = {}
        for i, (x, axes) in enumerate(zip(inputs, self.input_axes)):  # noqa: B905
            right = dtypes[i] and x.dim() == len(axes)
            if right:
                for size, (axis, least, most) in zip(x.size(), axes):  # noqa: B905
                    right = right and least <= size and size <= most and sizes.setdefault(axis, size) == size
            if not right:
                shape = ""
                for axis, least, most in axes:
                    between = "" if axis == "batch" or least == most else f" {least} to {most}"
                    shape += (", " if len(shape) > 0 else "") + axis + between
                takes = self.input_names[i] + ": this file takes " + self.input_dtypes[i] + " of shape ["
                dtype = "" if dtypes[i] else " of another dtype"
                raise ValueError(takes + shape + "], not " + str(x.size()) + dtype)

    @torch.jit.export
    def select(self, subnet: Tensor, batch: int) -> list[int]:
        """Return the integers of the subnet that a tensor names, for a batch of this size."""
        if subnet.dtype != torch.int64:
            raise ValueError("subnet must be an int64 tensor")
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
    module.options = [[[float(option[i]) for option in front[::-1]] for i in range(3)] for front in fronts]
    module.accuracy, module.batch_sizes = list(table.accuracy), list(table.batch_sizes)
    module.latency_ms, module.slo_ms, module.buckets = (
        table.latency_ms.tolist(),
        float(slo_ms),
        policy.buckets,
    )
