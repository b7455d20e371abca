"""What is changed in the network of a supernet is followed at every door, or refused with the way out."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subnetact
from subnetact.errors import InsertError
from subnetact.supernet.supernet import Supernet
from subnetact.training import distill_, sandwich_step

pytestmark = [
    pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning"),
    pytest.mark.filterwarnings("ignore::subnetact.errors.UnprovedInputWarning"),
]
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 2, 0])
OPTIONS: dict[str, Any] = {"example": X[:1], "allow_uncalibrated": True}


def close(output: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=5e-5)


class Classifier(nn.Module):
    """Convolutions, the last of which has an elastic width, and a head that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.block = nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU())
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        return self.fc((x + self.block(x)).mean((2, 3)))


def classifier() -> tuple[Supernet, nn.Module]:
    """Return a supernet of which views are kept, and an ordinary copy of its network."""
    torch.manual_seed(0)
    network = Classifier().eval()
    plain = copy.deepcopy(network)
    supernet = subnetact.insert_(network, example=X, axes=("stream",))
    for spec in (supernet.space.smallest(), supernet.space.largest()):
        supernet.subnet(spec)
    return supernet, plain


def reference(plain: Any, x: Tensor) -> Tensor:
    """Return what an ordinary classifier computes of which only the first half of the stream is used."""
    half = copy.deepcopy(plain)
    with torch.no_grad():
        half.norm.weight[8:], half.norm.bias[8:] = 0.0, 0.0
        half.block[0].weight[8:], half.block[0].bias[8:] = 0.0, 0.0
    output: Tensor = half(x)
    return output


def new_head() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(16, 3)


def changed(network: Any) -> nn.Module:
    network.fc = new_head()
    return network  # type: ignore[no-any-return]


def test_a_new_head_is_elastic_at_every_door(tmp_path: Path) -> None:
    supernet, plain = classifier()
    network: Any = supernet.network
    network.fc = new_head()
    expected, small = reference(changed(plain), X), supernet.space.smallest()
    supernet.check(X)
    supernet.save_pretrained(tmp_path)
    opened: Any = subnetact.from_pretrained(tmp_path, subnet="smallest", model=changed(Classifier().eval()))
    for run in (
        *(supernet.subnet(small), supernet.extract(small), opened),
        *(partial(supernet, subnet=small), partial(copy.deepcopy(supernet), subnet=small)),
        partial(subnetact.Engine(supernet, [small], **OPTIONS), subnet=0),
    ):
        close(run(X), expected)
    close(supernet(X, subnet=supernet.space.largest()), plain(X))
    supernet.train()
    assert len(sandwich_step(supernet, X, LABELS, rng=random.Random(0))) > 1
    supernet.eval()
    distill_(supernet, [(X, LABELS)] * 4, held_out=[(X, LABELS)], steps=1)
    subnetact.calibrate(supernet, [small], [X])
    assert type(supernet.remove().fc) is nn.Linear


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("fc", nn.Sequential(nn.Dropout(), nn.Linear(16, 3))),
        ("fc", nn.Linear(8, 3)),
        ("fc", nn.Bilinear(16, 16, 3)),
        ("block", nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU())),
    ],
)
def test_what_cannot_be_sliced_in_the_same_way_is_refused(name: str, module: nn.Module) -> None:
    supernet, plain = classifier()
    with pytest.raises(InsertError, match=rf"^{name}.* is an elastic .*supernet\.remove\(\)"):
        setattr(supernet.network, name, module)
    close(supernet(X, subnet=supernet.space.smallest()), reference(plain, X))
    ordinary = supernet.remove()
    setattr(ordinary, name, module.eval())
    assert type(getattr(ordinary, name)) is type(module)


def by_closure(network: Any) -> Any:
    original = network.forward
    return MethodType(lambda self, x: 2 * original(x), network)


def by_global_name(network: Any) -> Any:
    names: dict[str, Any] = {"original": network.forward}
    exec("def forward(self, x): return 2 * original(x)", names)
    return MethodType(names["forward"], network)


def by_partial(network: Any) -> Any:
    return partial(lambda x, forward: 2 * forward(x), forward=network.forward)


@pytest.mark.parametrize("bound", [by_closure, by_global_name, by_partial])
def test_a_forward_that_a_tool_binds_is_that_of_every_subnet(bound: Callable[[Any], Any]) -> None:
    supernet, plain = classifier()
    for network in (supernet.network, plain):
        network.forward = bound(network)
    supernet.refresh()
    small = supernet.space.smallest()
    for run in (supernet.subnet(small), supernet.extract(small)):
        close(run(X), 2 * reference(classifier()[1], X))
    close(supernet(X), plain(X))
    extract = supernet.extract(small)
    with torch.no_grad():
        for parameter in supernet.parameters():
            parameter.zero_()
    close(extract(X), 2 * reference(classifier()[1], X))
