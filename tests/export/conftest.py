"""One small supernet of every family, shared by the export tests, and inputs for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ofa_adapters import load
from subnetact.spec import SubnetSpec
from subnetact.supernet import Supernet

GOLDEN = Path(__file__).parents[1] / "golden"
_SMALL: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "small_families.json").read_text()
)
"""Constructor arguments of the families without golden files."""


@pytest.fixture(scope="session")
def family() -> Callable[[str], Supernet]:
    """The golden supernet of a family, or a small one with random weights; tests do not change it."""

    @cache
    def make(name: str) -> Supernet:
        torch.manual_seed(0)
        if name in _SMALL:
            supernet = load(name, **_SMALL[name])
            for weight in supernet.parameters():
                if weight.dim() > 1:  # the default initialisation leaves deep networks without a signal
                    nn.init.kaiming_normal_(weight)
            return supernet
        facts = json.loads((GOLDEN / name / "cases.json").read_text())
        return load(name, load_file(GOLDEN / name / "state_dict.safetensors"), **facts["constructor"])

    return make


@pytest.fixture(scope="session")
def inputs_of() -> Callable[..., dict[str, torch.Tensor]]:
    """A batch of a family's inputs, by name."""

    def make(name: str, n: int = 2) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        if name == "dynabert":
            tokens = torch.randint(1, 90, (n, 9), generator=generator)
            mask = (torch.arange(9) < torch.tensor([[9], [5]])[:n]).long()
            return {"input_ids": tokens, "attention_mask": mask}
        size = 32 if name == "autoformer" else 64
        return {"x": torch.randn(n, 3, size, size, generator=generator)}

    return make


@pytest.fixture(scope="session")
def some_specs() -> Callable[[Supernet, int], list[SubnetSpec]]:
    """The smallest, the largest and random subnets, distinct; fewer where the space is small."""

    def draw(supernet: Supernet, count: int) -> list[SubnetSpec]:
        space = supernet.space
        specs = dict.fromkeys([space.smallest(), space.largest()])
        for seed in range(4 * count):
            if len(specs) < count:
                specs.setdefault(space.sample(seed))
        return list(specs)

    return draw
