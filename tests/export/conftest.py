"""One small supernet of every family, shared by the export tests, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from small_families import small_inputs, small_supernet

from subnetact.supernet.supernet import Supernet


@pytest.fixture(scope="session")
def family() -> Callable[[str], Supernet]:
    """A small supernet of a family; tests do not change it."""
    return cache(small_supernet)


@pytest.fixture(scope="session")
def inputs_of() -> Callable[..., dict[str, torch.Tensor]]:
    """A batch of a family's inputs, by name."""
    return small_inputs
