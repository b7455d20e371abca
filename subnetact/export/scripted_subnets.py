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
    inputs: list[str]
    """Of every input its name, dtype, and axes, `InputAxes.described`."""
    limits: list[list[tuple[str, int, int]]]
    """Of every axis of every input, `InputAxes.limits`."""
    facts: dict[str, str]
    """Fingerprint, space, machine and versions. If there is a latency table, those of its measurement."""
    slo_ms: float
    buckets: int
    batch_sizes: list[int]
    latency_ms: list[list[float]]
    """Of every subnet at every batch size; NaN if it does not run. Empty without a latency table."""
    options: list[tuple[float, int]]
    """Accuracy and number of the subnets that are Pareto-optimal at a batch size, by ascending accuracy."""
    option_ms: Tensor
    """Their latencies, float64 of shape (options, batch sizes); NaN where they are not optimal."""
    cheapest: list[tuple[float, int, int]]
    """Per accuracy: that, the cheapest subnet that reaches it, and its largest batch size."""

    def __init__(
        self, network: nn.Module, means: Tensor, variances: Tensor, description: dict[str, Any]
    ) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("means", means)
        self.register_buffer("variances", variances)
        undecided = {"slo_ms": 0.0, "buckets": 1, "batch_sizes": [], "latency_ms": [], "options": []}
        undecided |= {"option_ms": torch.empty(0, 0), "cheapest": []}
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
        if math.isnan(slack_ms):
            raise ValueError("slack_ms is not a number")
        if queued < 1:
            raise ValueError("queued: " + str(queued) + " must be at least 1")
        if not min_accuracy <= self.cheapest[-1][0]:
            best = str(self.cheapest[-1][0])
            raise ValueError("min_accuracy: " + str(min_accuracy) + " % is above the best, " + best)
        slo, fastest = (
            self.slo_ms if slo_ms == 0.0 else slo_ms,
            float(self.option_ms.nan_to_num(math.inf).min()),
        )
        if not (fastest <= slo and slo < math.inf):
            raise ValueError("slo_ms: " + str(slo) + " must be finite and at least " + str(fastest))
        sizes = 1
        while sizes < len(self.batch_sizes) and self.batch_sizes[sizes - 1] < queued:
            sizes += 1
        accurate = torch.tensor([accuracy >= min_accuracy for accuracy, _ in self.options]).unsqueeze(1)
        possible = accurate & (self.option_ms <= slo)
        latencies = self.option_ms[possible]
        if latencies.numel() > 0:
            low, high = float(latencies.min()), float(latencies.max())
            width = (high - low) / self.buckets
            usable = int(high <= slack_ms)
            for bucket in range(1, self.buckets):
                usable += int(low + width * bucket <= slack_ms)
            buckets = ((self.option_ms - low) / (width if width > 0.0 else 1.0)).floor()
            possible = possible & (buckets.clamp(max=self.buckets - 1) < usable)
        for reached in (possible, accurate & (self.option_ms <= slack_ms)):
            found = reached[:, :sizes].t().reshape(-1).nonzero()
            if found.numel() > 0:  # the last is the most accurate of the largest batch
                last = int(found[-1])
                return self.options[last % len(self.options)][1], self.batch_sizes[last // len(self.options)]
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
    options = sorted({(option.accuracy, option.subnet) for front in fronts for option in front})
    places = {subnet: place for place, (_, subnet) in enumerate(options)}
    module.option_ms = torch.full((len(options), len(fronts)), math.nan, dtype=torch.float64)
    for column, front in enumerate(fronts):
        for option in front:
            module.option_ms[places[option.subnet], column] = option.latency_ms
    module.options, module.accuracy, module.batch_sizes = options, [*table.accuracy], [*table.batch_sizes]
    module.latency_ms, module.slo_ms = table.latency_ms.tolist(), float(slo_ms)
    module.buckets = policy.buckets
