"""What is copied, extracted, pickled or compiled is right, or refused with a way out."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subnetact
from subnetact.errors import EngineError, StaleWeights, ViewError
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


def sizes(values: subnetact.space.AxisValues) -> dict[str, int]:
    return {"width": int(values["width"][0] or 0)}


def tied(elastic: bool) -> Supernet:
    axis = subnetact.Axis.uniform("width", ["all"], (4, 8))
    described = {
        "embed": subnetact.WeightSlice.on(out="width"),
        "head": subnetact.WeightSlice.on(out="width"),
        "body": subnetact.WeightSlice.on(out="width", in_="width"),
    }
    space = subnetact.SubnetSpace("tied", [axis], sizes)
    return subnetact.insert_(Tied(), space, described if elastic else {}).eval()


@pytest.mark.parametrize("elastic", [False, True])
def test_extract_keeps_ties(elastic: bool) -> None:
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


def test_different_slices_of_one_weight_are_not_tied() -> None:
    axis = subnetact.Axis.uniform("width", ["all"], (4, 8))
    supernet = subnetact.insert_(
        Tied(), subnetact.SubnetSpace("tied", [axis], sizes), {"embed": subnetact.WeightSlice.on(out="width")}
    )
    network = supernet.extract(supernet.space.smallest())
    assert network.embed.weight.shape == (4, 9)
    assert network.head.weight.shape == (8, 9)
    supernet.network.embed.weight.data.zero_()
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


def test_views_and_engines_are_not_pickled(digits: Supernet) -> None:
    view = digits.subnet(digits.space.smallest())
    engine = subnetact.Engine(digits, [digits.space.smallest()], allow_uncalibrated=True)
    for module in (view, view.stem):
        with pytest.raises(ViewError, match=r"supernet\.extract\(spec\)"):
            pickle.dumps(module)
    with pytest.raises(ViewError, match="cannot be pickled"):
        torch.save(view, io.BytesIO())
    with pytest.raises(ViewError, match=r"copy\.deepcopy\(supernet\)"):
        copy.copy(digits)
    for take in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(EngineError, match=r"Engine\.load"):
            take(engine)
    copied = copy.deepcopy(view)
    torch.testing.assert_close(copied(X), view(X), rtol=0, atol=0)
    assert copied.stem.weight.data_ptr() != view.stem.weight.data_ptr()
    assert copy.copy(view).stem is view.stem


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


def test_a_copy_of_a_supernet_that_has_passed_its_check_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    supernet, x, checked = tied(True), torch.randn(2, 9), list[Supernet]()
    supernet.check_once(x)
    monkeypatch.setattr(Supernet, "check", lambda self, x, thorough: checked.append(self))
    copied = copy.deepcopy(supernet)
    copied.check_once(x)
    assert checked == []
    copied.refresh()
    others = [copied, copy.deepcopy(copied), pickle.loads(pickle.dumps(supernet))]
    for other in others:
        other.check_once(x)
    assert len(checked) == len(others)


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
    local = subnetact.insert_(
        Tied(), subnetact.SubnetSpace("tied", [axis], lambda values: sizes(values)), {}
    ).eval()
    with pytest.raises((AttributeError, pickle.PicklingError), match="<lambda>"):
        pickle.dumps(local)
    torch.testing.assert_close(copy.deepcopy(local)(x), local(x), rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
def test_a_supernet_compiles_in_both_modes(digits: Supernet, training: bool) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    digits.train(training)
    compiled, twin = torch.compile(digits, backend="eager"), copy.deepcopy(digits)
    specs = [digits.space.smallest(), digits.space.spec(depth=1, expand=0.5, width=0.5)]
    for _ in range(2):
        for spec in specs:
            output, expected = compiled(X, subnet=spec), twin(X, subnet=spec)
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
            if training:
                output.sum().backward(), expected.sum().backward()
    assert counters["stats"]["unique_graphs"] == len(specs)
    assert counters["stats"]["calls_captured"] > 20 * len(specs)
    for parameter, other in zip(digits.parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-4)
