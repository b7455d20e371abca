"""Fixtures for the tests of all families: golden outputs, and one loaded supernet per family."""

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
from small_families import GOLDEN, golden_state, small_inputs, small_supernet

from ofa_adapters import load, upstream_state_dict
from subnetact.supernet.supernet import Supernet


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
        return golden_state(self.family)

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


@pytest.fixture(scope="session")
def small() -> Callable[[str], Supernet]:
    """A small supernet; tests do not change it."""
    return cache(small_supernet)


@pytest.fixture(scope="session")
def inputs_of() -> Callable[..., tuple[torch.Tensor, ...]]:
    """The first input of a small supernet, the only one that each of them needs."""
    return lambda family, n=2: tuple(small_inputs(family, n).values())[:1]


@pytest.fixture(scope="session")
def written_back() -> Callable[..., dict[str, torch.Tensor]]:
    """Checks that a loaded checkpoint, trained on, is written under its own names, and loads again."""

    def check(family: str, state: dict[str, torch.Tensor], reserve: str = "-", **constructor: Any) -> Any:
        supernet = load(family, state, **constructor)
        written = {name: tensor.clone() for name, tensor in upstream_state_dict(supernet).items()}
        assert set(written) == set(state)
        same = {name: tensor.equal(state[name].to(tensor.dtype)) for name, tensor in written.items()}
        assert all(same[name] or reserve in name for name in same)
        with torch.no_grad():
            for weight in supernet.parameters():
                weight.mul_(1.5)
        again = load(family, upstream_state_dict(supernet), **constructor)
        assert again.fingerprint() == supernet.fingerprint()
        assert not again.state_dict()[next(iter(again.state_dict()))].equal(next(iter(state.values())))
        return written

    return check
