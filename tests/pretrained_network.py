"""A small network with BatchNorm statistics of its own, and its supernet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from subnetact import Axis, SubnetSpace, Supernet, insert_
from subnetact.operators import SubnetNorm, WeightSlice

BATCHES = [torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def pretrained(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    nn.init.normal_(network[1].running_mean)
    nn.init.uniform_(network[1].running_var, 0.5, 2)
    return network.eval()


def first_choice(values: Any) -> dict[str, int]:
    return {"c": values["c"][0]}


def supernet_of(network: nn.Module) -> Supernet:
    space = SubnetSpace("s", [Axis.uniform("c", ["it"], [4, 8])], first_choice)
    elastic = {
        "0": WeightSlice.on(out="c"),
        "1": SubnetNorm.on(channels="c"),
        "3": WeightSlice.on(in_="c"),
    }
    return insert_(network, space, elastic)
