"""A network of elastic and fixed layers, and what its subnets compute, which slices nothing by operators."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subnetact
from subnetact.operators import ElasticKernel, KernelConv2d
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

__all__ = ["Convolutions", "Rows", "State", "new_supernet", "plain"]

State = dict[str, Tensor]
Rows = dict[SubnetSpec, dict[str, tuple[Tensor, Tensor]]]
WIDTHS, KERNELS = (5, 8), (1, 3)


class Convolutions(nn.Module):
    """Elastic and fixed layers, kernels that are computed with matrices, BatchNorms and a buffer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.kernel = nn.ModuleList(KernelConv2d(8, list(KERNELS), matrices=True) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(layers))
        self.norm = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(layers))
        self.register_buffer("shift", torch.zeros(8, 1, 1))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for kernel, narrow, wide, norm in zip(self.kernel, self.narrow, self.wide, self.norm, strict=True):
            x = norm(x + wide(narrow(kernel(x)).relu())) + self.shift
        return self.head(x.mean((2, 3)))


def new_supernet(network: Convolutions) -> Supernet:
    """Return a supernet with an elastic width and kernel, the same in all layers, in evaluation mode."""
    axes = [subnetact.Axis.uniform(name, ["all"], c) for name, c in (("w", WIDTHS), ("k", KERNELS))]
    space = subnetact.SubnetSpace("deep", axes, lambda v: {"w": v["w"][0], "k": v["k"][0], "c": 8})
    elastic: dict[str, Any] = {}
    for i in range(len(network.kernel)):
        elastic[f"kernel.{i}"] = ElasticKernel.on(channels="c", kernel="k")
        elastic[f"narrow.{i}"] = subnetact.WeightSlice.on(out="w")
        elastic[f"wide.{i}"] = subnetact.WeightSlice.on(in_="w")
    return subnetact.insert_(network, space, elastic).eval()


def plain(state: State, rows: Rows, spec: SubnetSpec, x: Tensor, found: list[Any] | None = None) -> Tensor:
    """Compute a subnet from a checkpoint; with `found`, normalise with the batch and note its statistics."""
    width, kernel = (int(spec[axis][0]) for axis in ("w", "k"))  # type: ignore[arg-type]
    for i in range(sum(name.startswith("kernel.") and name.endswith(".weight") for name in state)):
        weight = state[f"kernel.{i}.weight"]
        if kernel == 1:
            weight = weight[:, :, 1:2, 1:2] * state[f"kernel.{i}.3to1_matrix"]
        y = F.conv2d(x, weight, padding=kernel // 2, groups=8)
        y = F.conv2d(y, state[f"narrow.{i}.weight"][:width], state[f"narrow.{i}.bias"][:width]).relu()
        x = x + F.conv2d(y, state[f"wide.{i}.weight"][:, :width], state[f"wide.{i}.bias"])
        if found is not None:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
            found.append((mean, var))
        elif spec in rows:
            mean, var = rows[spec][f"norm.{i}"]
        else:
            mean, var = state[f"norm.{i}.running_mean"], state[f"norm.{i}.running_var"]
        weight, bias = state[f"norm.{i}.weight"], state[f"norm.{i}.bias"]
        x = F.batch_norm(x, mean, var, weight, bias) + state["shift"]
    return F.linear(x.mean((2, 3)), state["head.weight"], state["head.bias"])
