"""Families calibrated many subnets at a time: equal to one at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from reference_statistics import reference_statistics
from small_families import small_constructor

import subnetact
from ofa_adapters import load
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
FAMILIES = ("ofa_resnet50", "ofa_mbv3", "attentivenas", "slimmable_resnet50", "us_mobilenet_v2")


def neighbours(supernet: Supernet, count: int) -> list[SubnetSpec]:
    """Random subnets, each followed by one that differs from it in a single slot."""
    rng, found = random.Random(0), list[SubnetSpec]()
    space = supernet.space
    for _ in range(count):
        spec = other = space.sample(rng)
        while other == spec:
            values = {axis: list(slots) for axis, slots in spec.values}
            axis = rng.choice(space.axes)
            position = rng.randrange(len(axis.slots))
            values[axis.name][position] = rng.choice(axis.slots[position].choices)
            other = space.spec(**completed(supernet, values))
        found += [spec, other]
    return found


def completed(supernet: Supernet, values: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Give slots that were skipped a value; a canonical specification drops what is still skipped."""
    return {
        axis.name: [
            slot.choices[0] if value is None else value
            for slot, value in zip(axis.slots, values[axis.name], strict=True)
        ]
        for axis in supernet.space.axes
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_many_at_a_time_equal_one_at_a_time(family: str) -> None:
    torch.manual_seed(0)
    supernet = load(family, None, **small_constructor(family)).double()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(n, 3, 32, 32, generator=generator, dtype=torch.float64) for n in (3, 2)]
    if family in ("slimmable_resnet50", "us_mobilenet_v2"):
        specs = list(supernet.space.enumerate())
    else:
        specs = neighbours(supernet, 2)
    subnetact.calibrate(supernet, specs, batches, False)
    for spec in specs:
        found, expected = supernet.norms.get(spec).pairs(), reference_statistics(supernet, spec, batches)
        assert set(found) == set(expected)
        for path, pair in expected.items():
            for a, b in zip(found[path], pair, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
