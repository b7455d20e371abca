"""subnet_cover: few subnets, in which every choice and every pair of choices of two slots that meet occur."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn
from written_networks import Written

import subnetact
from subnetact.insertion.description import Description
from subnetact.spec import SubnetSpec
from subnetact.supernet.subnet_cover import subnet_cover
from subnetact.supernet.supernet import Supernet


def transformer() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(8, 32), encoder, nn.Linear(32, 5)), torch.randn(2, 7, 8)


def flat() -> tuple[nn.Module, Any]:
    widths = [8, 16, 24, 32, 24, 16, 5]
    layers = [nn.Sequential(nn.Linear(n, m), nn.ReLU()) for n, m in pairwise(widths)]
    return nn.Sequential(*layers), torch.randn(3, 8)


def lists() -> tuple[nn.Module, Any]:
    """Return layers in a list, in one forward, so that all of them meet."""
    layers = nn.ModuleList(nn.Linear(n, m) for n, m in ((8, 16), (16, 24), (24, 32), (32, 16)))
    compute = lambda m, x: m.head(reduce(lambda y, layer: layer(y).relu(), m.layers, x))  # noqa: E731
    return Written(compute, layers=layers, head=(16, 5)), torch.randn(3, 8)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "transformer": transformer,
    "flat": flat,
    "lists": lists,
}
CHOICES: list[Any] = [(0.5, 1.0), (0.25, 0.5, 0.75, 1.0)]


def chosen(supernet: Supernet, spec: SubnetSpec) -> dict[str, Any]:
    """Return the choice of every slot of a subnet."""
    return {
        slot.name: choice
        for axis in supernet.space.axes
        for slot, choice in zip(axis.slots, spec[axis.name], strict=True)
    }


def around(supernet: Supernet, path: str) -> str:
    """Return the module whose forward calls a module, which lists only hold."""
    outer = path.rpartition(".")[0]
    while outer and isinstance(supernet.network.get_submodule(outer), nn.ModuleList):
        outer = outer.rpartition(".")[0]
    return outer


def meeting(description: Description, supernet: Supernet) -> Iterator[tuple[str, str]]:
    """Yield pairs of groups of which one layer has sizes, or whose layers one forward calls.

    They are read from the members of the description, and not from operators.
    """
    layers = {name: {m.module for m in group.members} for name, group in description.groups.items()}
    callers = {name: {around(supernet, path) for path in paths} for name, paths in layers.items()}
    for one, other in combinations(layers, 2):
        if layers[one] & layers[other] or callers[one] & callers[other]:
            yield one, other


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_choice_and_every_pair_that_meets_occurs(name: str, choices: Any) -> None:
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    description = subnetact.describe(model.eval(), x, choices=choices)
    supernet = subnetact.insert_(model, description, example=x)
    specs = subnet_cover(supernet.network, supernet.space)
    assert specs[0] == supernet.space.smallest()
    assert len(set(specs)) == len(specs)
    rows = [chosen(supernet, spec) for spec in specs]
    sizes = {slot.name: slot.choices for axis in supernet.space.axes for slot in axis.slots}
    for slot, own in sizes.items():
        assert {row[slot] for row in rows} == set(own), slot
    pairs = list(meeting(description, supernet))
    assert pairs
    for one, other in pairs:
        expected = {(a, b) for a in sizes[one] for b in sizes[other]}
        assert {(row[one], row[other]) for row in rows} == expected, (one, other)
