"""What the tests of all families share: their goldens, and one loaded supernet each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ofa_adapters import load
from subnetact.supernet import Supernet

GOLDEN = Path(__file__).parent.parent / "golden"
SMALL: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "small_families.json").read_text())
"""Constructor arguments of the families without golden files."""


@dataclass(frozen=True)
class Golden:
    """One family's upstream outputs."""

    family: str
    folder: Path
    facts: dict[str, Any]
    io: dict[str, torch.Tensor]

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        names = self.facts.get("inputs")
        return {name: self.io[name] for name in names} if names else {"x": self.io["input"]}

    @property
    def cases(self) -> list[dict[str, Any]]:
        return self.facts["cases"]

    def state(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "state_dict.safetensors")

    def load(self) -> Supernet:
        return load(self.family, self.state(), **self.facts["constructor"])

    def batches(self) -> list[torch.Tensor]:
        return [self.io[name].float() for name in sorted(self.io) if name.startswith("calib.")]


@cache
def read_golden(family: str) -> Golden:
    folder = GOLDEN / family
    facts = json.loads((folder / "cases.json").read_text())
    return Golden(family, folder, facts, load_file(folder / "io.safetensors"))


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    return read_golden


@pytest.fixture(scope="session")
def supernet_of() -> Callable[[str], Supernet]:
    """The golden supernet of a family; tests do not change it."""
    return cache(lambda family: read_golden(family).load())


def _constructor_of(family: str) -> dict[str, Any]:
    return read_golden(family).facts["constructor"] if family not in SMALL else SMALL[family]


@pytest.fixture(scope="session")
def constructor_of() -> Callable[[str], dict[str, Any]]:
    """Constructor arguments of a small network."""
    return _constructor_of


@pytest.fixture(scope="session")
def small() -> Callable[[str], Supernet]:
    """A small supernet with random weights; tests do not change it."""

    @cache
    def make(family: str) -> Supernet:
        torch.manual_seed(0)
        return load(family, None, **_constructor_of(family))

    return make


@pytest.fixture(scope="session")
def inputs_of() -> Callable[..., tuple[torch.Tensor, ...]]:
    """Inputs of a small supernet."""

    def make(family: str, n: int = 2) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        if family == "dynabert":
            return (torch.randint(1, 90, (n, 9), generator=generator),)
        size = 32 if family == "autoformer" else 64
        return (torch.randn(n, 3, size, size, generator=generator),)

    return make


@pytest.fixture(scope="session")
def golden_state() -> Callable[[str], dict[str, torch.Tensor]]:
    """Weights under upstream's names."""
    return lambda family: read_golden(family).state()


@pytest.fixture(scope="session")
def small_fingerprint() -> Callable[[str], str]:
    """The fingerprint of a golden supernet."""
    return cache(lambda family: read_golden(family).load().fingerprint())
