"""Supernets of every family, small enough to be exported in seconds: the golden ones, or random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ofa_adapters import load
from subnetact.supernet import Supernet

__all__ = ["small_family"]

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
WITHOUT_GOLDEN: dict[str, dict[str, Any]] = json.loads((GOLDEN.with_name("small_families.json")).read_text())
"""Constructor arguments of the families without golden files."""


def small_family(family: str) -> tuple[Supernet, dict[str, Tensor]]:
    """A supernet, and a batch of its inputs by name."""
    if family in WITHOUT_GOLDEN:
        torch.manual_seed(0)
        supernet = load(family, **WITHOUT_GOLDEN[family]).eval()
        for weight in supernet.parameters():
            if weight.dim() > 1:  # the default initialisation leaves deep networks without a signal
                nn.init.kaiming_normal_(weight)
        return supernet, {"x": torch.randn(2, 3, 64, 64)}
    facts = json.loads((GOLDEN / family / "cases.json").read_text())
    io = load_file(GOLDEN / family / "io.safetensors")
    supernet = load(family, load_file(GOLDEN / family / "state_dict.safetensors"), **facts["constructor"])
    names = facts.get("inputs")
    return supernet, {name: io[name] for name in names} if names else {"x": io["input"]}
