"""Supernets of every family, small enough to be tested or exported in seconds, and inputs for them.

The tests and `benchmarks/export.py` use these.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ofa_adapters import load
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.supernet.supernet import Supernet

__all__ = [
    *("GOLDEN", "golden_fingerprint", "golden_state", "small_constructor", "small_inputs", "small_supernet"),
    "without_skipped",
]

GOLDEN = Path(__file__).parent / "golden"
"""Weights, inputs and outputs of upstream's networks, one folder per family."""

_STAGE = {"k": [3, 5], "t": [2, 3], "c": [8, 16, 24], "d": [1, 2], "act_func": "swish", "se": True}

WITHOUT_GOLDEN: dict[str, dict[str, Any]] = {
    "attentivenas": {
        "n_classes": 5,
        "supernet_cfg": {
            "use_v3_head": True,
            "resolutions": [32, 48],
            "first_conv": {"c": [8, 16], "s": 2, "act_func": "swish"},
            **{f"mb{i}": {**_STAGE, "s": 2 if i % 2 else 1} for i in range(1, 8)},
            "last_conv": {"c": [24, 32], "act_func": "swish"},
        },
    },
    "slimmable_resnet50": {"num_classes": 5, "width_mult_list": [0.0625, 0.125]},
    "us_mobilenet_v2": {
        "num_classes": 5,
        "width_mult_list": [0.5, 0.75, 1.0],
        "width_mult_range": [0.25, 0.5],
    },
    "hydravit": {
        "img_size": 32,
        "patch_size": 8,
        "num_classes": 5,
        "embed_dim": 192,
        "num_heads": 3,
        "depth": 2,
        "heads": [1, 2, 3],
    },
}
"""Constructor arguments of the families that have no golden files."""


def small_constructor(family: str) -> dict[str, Any]:
    if family in WITHOUT_GOLDEN:
        return WITHOUT_GOLDEN[family]
    facts: dict[str, Any] = json.loads((GOLDEN / family / "cases.json").read_text())
    return dict(facts["constructor"])


def golden_state(family: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / family / "state_dict.safetensors")


@cache
def golden_fingerprint(family: str) -> str:
    return small_supernet(family).fingerprint()


def small_supernet(family: str) -> Supernet:
    """Return a small supernet: with its golden weights, or with random ones that are always the same."""
    constructor = small_constructor(family)
    if family not in WITHOUT_GOLDEN:
        return load(family, golden_state(family), **constructor)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        supernet = load(family, **constructor)
        for weight in supernet.parameters():
            if weight.dim() > 1:  # the default initialisation leaves deep networks without a signal
                nn.init.kaiming_normal_(weight)
    return supernet


def small_inputs(family: str, n: int = 2) -> dict[str, Tensor]:
    """Return a batch of `n` inputs by name, always the same."""
    generator = torch.Generator().manual_seed(0)
    if family == "dynabert":
        tokens = torch.randint(1, 90, (n, 9), generator=generator)
        lengths = torch.tensor([9, 5]).repeat(n)[:n, None]
        return {"input_ids": tokens, "attention_mask": (torch.arange(9) < lengths).long()}
    size = 32 if family in ("autoformer", "hydravit") else 64
    return {"x": torch.randn(n, 3, size, size, generator=generator)}


def without_skipped(network: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict of a subnet under the names that it has in upstream's shorter network."""
    state = network.state_dict()
    for path, stack in network.named_modules():
        if isinstance(stack, nn.Sequential) and "0" in stack._modules:
            kept = [name for name, layer in stack.named_children() if not isinstance(layer, SkippedLayer)]
            for new, old in enumerate(kept):
                inside = f"{path}.{old}."
                own = [name for name in state if name.startswith(inside)]
                state.update({f"{path}.{new}.{n.removeprefix(inside)}": state.pop(n) for n in own})
    return state
