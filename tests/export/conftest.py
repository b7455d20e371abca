"""Shared by the export tests: a small supernet of every family, inputs for it, and a .pt2 of the digits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from small_families import small_inputs, small_supernet

from subnetact import Engine, calibrate
from subnetact.digits import load_digits_supernet
from subnetact.export import to_pt2
from subnetact.supernet.supernet import Supernet


@pytest.fixture(scope="session")
def family() -> Callable[[str], Supernet]:
    """A small supernet of a family; tests do not change it."""
    return cache(small_supernet)


@pytest.fixture(scope="session")
def inputs_of() -> Callable[..., dict[str, torch.Tensor]]:
    """A batch of a family's inputs, by name."""
    return small_inputs


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Path]:
    """An engine of two subnets, and its .pt2."""
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs a C++ compiler: install g++")
    supernet = load_digits_supernet()
    specs = [supernet.space.smallest(), supernet.space.largest()]
    x = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    calibrate(supernet, specs, [x], progress=False)
    engine = Engine(supernet, specs, example=x[:1], accuracy=[60.0, None])
    path = tmp_path_factory.mktemp("pt2") / "model.pt2"
    return engine, to_pt2(engine, path, progress=False)
