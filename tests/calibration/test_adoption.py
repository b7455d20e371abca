"""The largest subnet of a pretrained network keeps the statistics that the network came with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from pretrained_network import BATCHES, pretrained, supernet_of
from torch import nn

from subnetact import Supernet, calibrate
from subnetact.errors import StaleWeights


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
    assert (report.subnets, report.batches) == (1, len(BATCHES))
    assert "the largest subnet keeps the statistics that the network came with" in str(report)
    assert supernet.statistics.calibrated(space.largest())
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
    assert trained.statistics.original, "a narrow subnet moves copies of them"
    trained(BATCHES[0], subnet=trained.space.largest()).sum().backward()
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


def unseen(supernet: Supernet) -> None:
    for parameter in supernet.parameters():
        parameter.data.mul_(3)
    supernet.refresh()


def in_place(supernet: Supernet) -> None:
    with torch.no_grad():
        supernet.network[3].weight.mul_(3)


def loaded(supernet: Supernet) -> None:
    supernet.load_state_dict({name: 3 * tensor for name, tensor in supernet.state_dict().items()})


def replaced(supernet: Supernet) -> None:
    supernet.network[3].weight = nn.Parameter(3 * supernet.network[3].weight.detach())


@pytest.mark.parametrize("door", [unseen, in_place, loaded, replaced])
def test_changed_weights_get_statistics_of_their_own(door: Callable[[Supernet], None]) -> None:
    supernet = supernet_of(pretrained())
    largest = supernet.space.largest()
    assert supernet.statistics.original
    door(supernet)
    assert not supernet.statistics.original
    assert not calibrate(supernet, [largest], BATCHES, progress=False).adopted
    x = torch.cat(BATCHES)
    y = torch.nn.functional.conv2d(x, supernet.network[0].weight, supernet.network[0].bias)
    mean, var = supernet.statistics(largest)["1"]
    torch.testing.assert_close(mean, y.mean((0, 2, 3)), rtol=1e-3, atol=1e-4)
    variances = [part.var((0, 2, 3), unbiased=False) for part in y.chunk(3)]
    torch.testing.assert_close(var, torch.stack(variances).mean(0), rtol=1e-3, atol=1e-4)


def test_weights_in_another_place_are_still_the_original_ones() -> None:
    supernet = supernet_of(pretrained())
    storages = {t.untyped_storage()._cdata: t.untyped_storage().clone() for t in supernet.tensors()}
    supernet.exchange_storage(storages)
    supernet.to("cpu")
    assert supernet.statistics.original
    supernet.double()
    assert supernet.statistics.original
    assert copy.deepcopy(supernet).statistics.original


def test_statistics_that_training_changes_meanwhile_are_not_adopted() -> None:
    supernet = supernet_of(pretrained())
    specs = [supernet.space.smallest(), supernet.space.largest()]

    def batches() -> Iterator[torch.Tensor]:
        yield BATCHES[0]
        supernet.train()
        supernet(BATCHES[1])
        supernet.eval()
        yield BATCHES[2]

    with pytest.raises(StaleWeights, match="by training"):
        calibrate(supernet, specs, batches(), progress=False)
    assert len(supernet.norms) == 0
    assert not calibrate(supernet, specs, batches(), progress=False).adopted  # It changes no weights.


def test_the_largest_subnet_follows_the_statistics_that_are_loaded() -> None:
    supernet, other = supernet_of(pretrained()), pretrained(seed=1)
    supernet.adopt_statistics()
    supernet.load_state_dict(other.state_dict())
    x = torch.cat(BATCHES)
    y = supernet(x, subnet=supernet.space.largest())
    torch.testing.assert_close(y, other(x), rtol=0, atol=5e-5)


def test_training_is_noticed_where_torch_counts_nothing() -> None:
    network = pretrained()
    network[1].num_batches_tracked = None
    supernet = supernet_of(network)
    assert supernet.statistics.original
    supernet.train()
    supernet(BATCHES[0])
    assert not supernet.eval().statistics.original
