"""Networks that a test writes in a few lines: named parts, and a function that computes with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

__all__ = ["Written", "disturbed", "seeded"]


class Written(nn.Module):
    """Named parts and a function of the network and its inputs; a pair of sizes is a linear layer."""

    def __init__(self, compute: Callable[..., Any], /, bias: bool = True, **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            made = part() if isinstance(part, FunctionType | partial) else part
            setattr(self, name, nn.Linear(*made, bias=bias) if isinstance(made, tuple) else made)

    def forward(self, *inputs: Any) -> Any:
        return self.compute(self, *inputs)


def seeded(compute: Callable[..., Any], bias: bool = True, **parts: Any) -> nn.Module:
    """Return a network in evaluation mode that is the same in every call."""
    torch.manual_seed(0)
    return Written(compute, bias=bias, **parts).eval()


def disturbed(model: nn.Module) -> Any:
    """Fill all parameters with random numbers, the same in every call."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()
