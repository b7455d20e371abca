"""The largest subnet of a pretrained network keeps the statistics that the network came with."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from subnetact import Axis, SubnetSpace, Supernet, calibrate, insert_
from subnetact.operators import SubnetNorm, WeightSlice

BATCHES = [torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def pretrained() -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    nn.init.normal_(network[1].running_mean)
    nn.init.uniform_(network[1].running_var, 0.5, 2)
    return network.eval()


def supernet_of(network: nn.Module) -> Supernet:
    space = SubnetSpace("s", [Axis.uniform("c", ["it"], [4, 8])], lambda v: {"c": v["c"][0]})
    elastic = {
        "0": WeightSlice.on(out="c"),
        "1": SubnetNorm.on(channels="c"),
        "3": WeightSlice.on(in_="c"),
    }
    return insert_(network, space, elastic)


@pytest.mark.parametrize("adopt", [None, True])
def test_the_largest_subnet_is_the_original_after_calibration(adopt: bool | None) -> None:
    original = pretrained()
    supernet = supernet_of(copy.deepcopy(original))
    space = supernet.space
    report = calibrate(supernet, [space.smallest(), space.largest()], BATCHES, progress=False, adopt=adopt)
    x = BATCHES[0]
    assert torch.equal(supernet(x, subnet=space.largest()), original(x))
    assert torch.equal(supernet.extract(space.largest())(x), original(x))
    assert report.adopted == (space.largest(),)
    assert list(report.batches) == [space.smallest()]
    assert "the largest subnet keeps the statistics that the network came with" in str(report)
    assert supernet.calibrated(space.largest())
    assert calibrate(supernet, [space.largest()], [], progress=False).adopted


def test_statistics_that_are_not_the_networks_own_are_calibrated() -> None:
    def adopted(supernet: Supernet, **options: bool) -> bool:
        largest = supernet.space.largest()
        report = calibrate(supernet, [largest], BATCHES, progress=False, **options)
        return report.adopted == (largest,)

    assert not adopted(supernet_of(pretrained()), adopt=False)
    fresh = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    assert not adopted(supernet_of(fresh.eval()))
    trained = supernet_of(pretrained())
    trained.train()
    trained(BATCHES[0], subnet=trained.space.smallest()).sum().backward()
    assert not adopted(trained.eval())
    loaded = supernet_of(pretrained())
    loaded.load_state_dict({name: t * 1.5 for name, t in loaded.state_dict().items()})
    assert not adopted(loaded)
    of_a_family = supernet_of(pretrained())
    of_a_family.origin = {"name": "digits", "constructor": {}}
    assert not adopted(of_a_family)
    assert adopted(supernet_of(pretrained()).to(torch.float64).to(torch.float32))


def test_adopted_statistics_are_a_row_of_their_own() -> None:
    supernet = supernet_of(pretrained())
    supernet.adopt_statistics()
    largest = supernet.space.largest()
    before = supernet(BATCHES[0], subnet=largest)
    supernet.network.get_submodule("1").running_mean.add_(1)
    assert torch.equal(supernet(BATCHES[0], subnet=largest), before)
    supernet.adopt_statistics(supernet.space.smallest())
    assert len(supernet.norms) == 2
