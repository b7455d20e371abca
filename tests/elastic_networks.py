"""Networks of one's own with an elastic width, and functions in threads: what tests of many rooms need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from subnetact import Axis, Engine, SubnetNorm, SubnetSpace, SubnetSpec, Supernet, WeightSlice, insert_

__all__ = [
    "BATCHES",
    "PARTS",
    "in_threads",
    "one_width",
    "plain_engine",
    "pretrained",
    "supernet_of",
    "width_space",
]

PARTS: dict[str, Any] = {
    "out": WeightSlice.on(out="w"),
    "in": WeightSlice.on(in_="w"),
    "both": WeightSlice.on(in_="w", out="w"),
    "norm": SubnetNorm.on(channels="w"),
}
"""What is elastic in a module: its outputs, its inputs, both, or the channels of a BatchNorm."""


def width_space(widths: Iterable[int] = (4, 8), name: str = "own") -> SubnetSpace:
    return SubnetSpace(name, [Axis.uniform("w", ["all"], tuple(widths))], _one_size)


def _one_size(values: Mapping[str, Any]) -> dict[str, int]:
    return {"w": values["w"][0]}


def one_width(
    network: nn.Module, parts: Mapping[str, Any], widths: Iterable[int] = (4, 8), name: str = "own"
) -> Supernet:
    """Return the supernet of a network, in evaluation mode, whose modules are parts of `PARTS` or others."""
    elastic = {path: PARTS[part] if isinstance(part, str) else part for path, part in parts.items()}
    return insert_(network.eval(), width_space(widths, name), elastic)


def plain_engine(supernet: Supernet, specs: Sequence[SubnetSpec], example: Any) -> Engine:
    """Return an engine whose subnets run as views, with BatchNorm statistics of their own or without."""
    return Engine(supernet, specs, example=example, memory_budget_mb=0, allow_uncalibrated=True, check=False)


BATCHES = [torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def pretrained(seed: int = 0) -> nn.Module:
    """Return a small network with BatchNorm statistics of its own."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    nn.init.normal_(network[1].running_mean)
    nn.init.uniform_(network[1].running_var, 0.5, 2)
    return network.eval()


def supernet_of(network: nn.Module) -> Supernet:
    return one_width(network, {"0": "out", "1": "norm", "3": "in"})


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Call each function in a thread of its own, and return what they return; their errors are raised."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(function) for function in functions]]
