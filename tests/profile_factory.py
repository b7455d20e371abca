"""What `python -m subnetact.profile --model` and others import in tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from subnetact.digits import new_digits_supernet
from subnetact.spec import SubnetSpec
from subnetact.supernet import Supernet


def supernet() -> Supernet:
    return new_digits_supernet().eval()


def no_supernet() -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


def accuracy(supernet: Supernet) -> Callable[[SubnetSpec], float]:
    largest = sum(supernet.space.resolve(supernet.space.largest()))
    return lambda spec: 90.0 * sum(supernet.space.resolve(spec)) / largest


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, 1, 16, 16, generator=generator) for _ in range(2)]
