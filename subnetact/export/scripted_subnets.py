"""The module that TorchScript compiles: the recorded network, and which integers each subnet runs it with."""

import math

import torch
from torch import Tensor, nn


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
    options: list[list[tuple[float, float, int]]]
    """Per batch size, the Pareto-optimal subnets by descending latency: that in ms, accuracy, number."""
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
        for at, options in enumerate(self.options):
            if at > 0 and self.batch_sizes[at - 1] < queued:
                column = at
            for latency, accuracy, _ in options:
                fastest = min(fastest, latency)
                if latency <= slo and accuracy >= min_accuracy:
                    low, high = min(low, latency), max(high, latency)
        if not (fastest <= slo and slo < math.inf):
            raise ValueError("slo_ms: " + str(slo) + " must be finite and at least " + str(fastest))
        usable, width = 0, (high - low) / self.buckets
        if low <= high:  # else the buckets are empty
            while usable < self.buckets - 1 and low + width * (usable + 1) <= slack_ms:
                usable += 1
            if usable == self.buckets - 1 and high <= slack_ms:
                usable = self.buckets
        if usable > 0:
            for at in range(column, -1, -1):
                for latency, accuracy, subnet in self.options[at]:
                    reached = usable == self.buckets or (latency - low) / width < usable
                    if reached and latency <= slo and accuracy >= min_accuracy:
                        return subnet, self.batch_sizes[at]
        for at in range(column, -1, -1):
            for latency, accuracy, subnet in self.options[at]:
                if accuracy >= min_accuracy and latency <= slack_ms:
                    return subnet, self.batch_sizes[at]
        for accuracy, subnet, size in self.cheapest:
            if accuracy >= min_accuracy:
                return subnet, size
        raise ValueError("unreachable")

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
