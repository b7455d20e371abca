"""Supernets of every family, small enough to be exported in seconds: the golden ones, or random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ofa_adapters import load
from subnetact.supernet import Supernet

__all__ = ["small_family"]

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
_STAGE = {"k": [3, 5], "t": [2, 3], "c": [8, 16, 24], "d": [1, 2], "act_func": "swish", "se": True}
WITHOUT_GOLDEN: dict[str, dict[str, Any]] = {
    "attentivenas": {
        "n_classes": 5,
        "supernet_cfg": {
            "use_v3_head": True,
            "resolutions": [32, 48],
            "first_conv": {"c": [8, 16], "s": 2, "act_func": "swish"},
            **{f"mb{i}": {**_STAGE, "s": 1 + i % 2} for i in range(1, 8)},
            "last_conv": {"c": [24, 32], "act_func": "swish"},
        },
    },
    "slimmable_resnet50": {"num_classes": 5, "width_mult_list": [0.0625, 0.125]},
    "us_mobilenet_v2": {
        "num_classes": 5,
        "width_mult_list": [0.5, 0.75, 1.0],
        "width_mult_range": [0.25, 0.5],
    },
}


def small_family(family: str) -> tuple[Supernet, dict[str, Tensor]]:
    """A supernet, and a batch of its inputs by name."""
    if family in WITHOUT_GOLDEN:
        torch.manual_seed(0)
        return load(family, **WITHOUT_GOLDEN[family]).eval(), {"x": torch.randn(2, 3, 64, 64)}
    facts = json.loads((GOLDEN / family / "cases.json").read_text())
    io = load_file(GOLDEN / family / "io.safetensors")
    supernet = load(family, load_file(GOLDEN / family / "state_dict.safetensors"), **facts["constructor"])
    names = facts.get("inputs")
    return supernet, {name: io[name] for name in names} if names else {"x": io["input"]}
