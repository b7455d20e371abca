"""A small network with BatchNorm statistics of its own, and its supernet."""

from __future__ import annotations

import torch
from elastic_networks import one_width
from torch import nn

from subnetact import Supernet

BATCHES = [torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def pretrained(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    nn.init.normal_(network[1].running_mean)
    nn.init.uniform_(network[1].running_var, 0.5, 2)
    return network.eval()


def supernet_of(network: nn.Module) -> Supernet:
    return one_width(network, {"0": "out", "1": "norm", "3": "in"})
