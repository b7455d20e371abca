"""One small supernet of every family, shared by the export tests, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from small_families import small_inputs, small_supernet

from subnetact.spec import SubnetSpec
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
