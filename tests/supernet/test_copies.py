"""What is copied, extracted, pickled or compiled is right, or refused with a way out."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from elastic_networks import one_width
from torch import Tensor, nn

import subnetact
from subnetact.errors import StaleWeights
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
X = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(1))


class Tied(nn.Module):
    """A language model in small: the embedding and the head have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(9, 8)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.body(self.embed(x))


def tied(elastic: bool) -> Supernet:
    return one_width(Tied(), {"embed": "out", "head": "out", "body": "both"} if elastic else {})


@pytest.mark.parametrize("elastic", [False, True])
def test_extract_keeps_ties_of_equal_slices(elastic: bool) -> None:
    supernet, x = tied(elastic), torch.randn(2, 9)
    for spec in (supernet.space.smallest(), supernet.space.largest()):
        network = supernet.extract(spec)
        assert network.head.weight is network.embed.weight
        assert network.head.bias is not network.embed.bias
        torch.testing.assert_close(network(x), supernet(x, subnet=spec), rtol=0, atol=0)
        own = {p.untyped_storage().data_ptr() for p in network.parameters()}
        assert not own & {p.untyped_storage().data_ptr() for p in supernet.parameters()}
        network(x).sum().backward()
        assert network.head.weight.grad is not None
    apart = one_width(Tied(), {"embed": "out"})
    network = apart.extract(apart.space.smallest())
    assert (network.embed.weight.shape, network.head.weight.shape) == ((4, 9), (8, 9))
    apart.network.embed.weight.data.zero_()
    assert network.head.weight.abs().sum() > 0


def test_an_engine_leaves_the_training_mode_as_it_is(digits: Supernet) -> None:
    digits.train()
    spec = digits.space.smallest()
    engine = subnetact.Engine(digits, [spec], example=X[:1], allow_uncalibrated=True, memory_budget_mb=16)
    assert digits.training
    assert digits.network.bn.training
    before = {name: buffer.clone() for name, buffer in digits.named_buffers()}
    expected = digits.extract(spec)(X)
    torch.testing.assert_close(engine(X, 0), expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(buffer, before[name]) for name, buffer in digits.named_buffers())
    digits(X, subnet=spec).sum().backward()
    assert digits.network.stem.weight.grad.abs().sum() > 0


class Door:
    """An attribute that does something in the middle of a copy or a pickle."""

    opened: Callable[[], None] = staticmethod(lambda: None)

    def __reduce__(self) -> tuple[Any, ...]:
        Door.opened()
        return Door, ()


def test_a_copy_is_of_one_moment_and_so_is_a_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    supernet = tied(False)
    supernet.network.body.door = Door()
    before, others = supernet.fingerprint(), {name: t + 1 for name, t in supernet.state_dict().items()}

    def load() -> None:
        lock = supernet.generation.lock
        if lock.acquire(blocking=False):
            supernet.load_state_dict(others)
            lock.release()

    def opened() -> None:
        thread = threading.Thread(target=load)
        thread.start(), thread.join()

    monkeypatch.setattr(Door, "opened", staticmethod(opened))
    assert copy.deepcopy(supernet).fingerprint() == before
    with pytest.raises(StaleWeights, match="between two steps of the training"):
        pickle.dumps(supernet)
    assert pickle.loads(pickle.dumps(supernet.network.embed.weight)).equal(others["embed.weight"])


@pytest.mark.parametrize("take", [copy.deepcopy, lambda s: s.extract(s.space.smallest())])
def test_what_is_taken_in_inference_mode_can_be_trained(take: Callable[[Supernet], nn.Module]) -> None:
    with torch.inference_mode():
        taken = take(tied(True))
    taken.train()(torch.randn(2, 9)).sum().backward()
    assert all(p.grad is not None for p in taken.parameters())


def test_a_supernet_is_pickled_if_its_functions_can_be_found_again() -> None:
    supernet, x = tied(True), torch.randn(2, 9)
    loaded = pickle.loads(pickle.dumps(supernet))
    for spec in supernet.space.enumerate():
        torch.testing.assert_close(loaded(x, subnet=spec), supernet(x, subnet=spec), rtol=0, atol=0)
    loaded.network.body = nn.Identity()
    assert not torch.equal(loaded(x), supernet(x))
    axis = subnetact.Axis.uniform("width", ["all"], (4, 8))
    space = subnetact.SubnetSpace("tied", [axis], lambda values: {"width": values["width"][0]})
    local = subnetact.insert_(Tied(), space, {}).eval()
    with pytest.raises((AttributeError, pickle.PicklingError), match="<lambda>"):
        pickle.dumps(local)
    torch.testing.assert_close(copy.deepcopy(local)(x), local(x), rtol=0, atol=0)
