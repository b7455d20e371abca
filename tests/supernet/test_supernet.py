"""Views compute what extracted networks compute, share the storage, and run in many threads at once."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.utils.parametrize
from small_spaces import space_of
from torch import nn

import subnetact
from subnetact.digits import DigitsNet, new_digits_supernet
from subnetact.errors import CheckpointError, ForeignSpec, SpecError, UncalibratedSubnetWarning
from subnetact.supernet.supernet import Supernet

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
X = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def specs_of(supernet: Supernet, count: int = 12, seed: int = 0) -> list[subnetact.SubnetSpec]:
    return supernet.space.sample(seed, count + 2)


def test_view_equals_extracted_equals_actuated_and_shares_the_storage(digits: Supernet) -> None:
    outputs = []
    pointers = {p.untyped_storage().data_ptr() for p in digits.state_dict().values()}
    for spec in specs_of(digits):
        view, extracted = digits.subnet(spec), digits.extract(spec)
        viewed = view(X)
        torch.testing.assert_close(viewed, extracted(X), rtol=0, atol=0)
        torch.testing.assert_close(viewed, digits(X, subnet=spec), rtol=0, atol=0)
        digits.actuate(spec)
        assert digits.active == spec
        torch.testing.assert_close(viewed, digits(X), rtol=0, atol=0)
        outputs.append(viewed)
        own = [*view.parameters(), *view.buffers()]
        assert own
        assert all(t.untyped_storage().data_ptr() in pointers for t in own)
        assert all(t.untyped_storage().data_ptr() not in pointers for t in extracted.parameters())
        assert all(p.is_contiguous() and p.requires_grad for p in extracted.parameters())
    assert all((a - b).abs().max() > 1e-3 for i, a in enumerate(outputs) for b in outputs[:i])


def test_the_largest_subnet_is_the_plain_network(digits: Supernet) -> None:
    plain = DigitsNet().eval()
    assert list(digits.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(digits.state_dict())
    torch.testing.assert_close(digits(X), plain(X), rtol=0, atol=0)


def test_equal_sizes_share_tensors_and_modules_stay_private(digits: Supernet) -> None:
    space = digits.space
    one = space.spec(depth=[1, 1, 1], expand=[0.5, 0.25, 0.5], width=0.5)
    other = space.spec(depth=[1, 2, 1], expand=[0.5, 0.5, 0.25], width=0.5)
    a, b = digits.subnet(one), digits.subnet(other)
    assert a.stages[0][0].conv1.weight is b.stages[0][0].conv1.weight
    assert a.stages[0][0].conv1 is not b.stages[0][0].conv1
    expected = b(X)
    seen = []
    handle = a.stages[0][0].conv1.register_forward_hook(lambda m, args, out: seen.append(m) or 2 * out)
    torch.testing.assert_close(b(X), expected, rtol=0, atol=0)
    assert not seen
    changed = a(X)
    assert seen == [a.stages[0][0].conv1]
    handle.remove()
    assert not torch.equal(a(X), changed)
    a.stages[0][0].conv1.weight = nn.Parameter(torch.zeros_like(a.stages[0][0].conv1.weight))
    torch.testing.assert_close(b(X), expected, rtol=0, atol=0)


def test_a_view_has_nothing_to_train_not_even_what_is_not_elastic() -> None:
    space = space_of(width=[2, 4])
    network = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)).eval()
    supernet = subnetact.insert_(network, space, {"1": subnetact.WeightSlice.on(out="width")})
    small, large = supernet.subnet(space.smallest()), supernet.subnet(space.largest())
    x = torch.randn(2, 3)
    assert not any(p.requires_grad for p in small.parameters())
    assert not small(x).requires_grad
    assert small[0].weight is large[0].weight
    with torch.no_grad():
        supernet.network[0].weight.mul_(2)
    assert torch.equal(small[0].weight, supernet.network[0].weight)
    supernet.network[0].weight = nn.Parameter(torch.zeros(5, 3))
    supernet.refresh()
    assert not supernet.subnet(space.smallest())[0].weight.any()
    assert all(p.requires_grad for p in supernet.parameters())
    supernet.train()
    supernet(x, subnet=space.smallest()).sum().backward()
    assert supernet.network[0].weight.grad is not None


class Marked(nn.Parameter):
    """A subclass of Parameter."""


def test_parameters_of_another_class_and_with_attributes_are_kept() -> None:
    space = space_of(width=[2, 4])
    network = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)).eval()
    network[0].weight = Marked(network[0].weight.data)
    network[0].bias.scale = 2.0
    supernet = subnetact.insert_(network, space, {"1": subnetact.WeightSlice.on(out="width")})
    view = supernet.subnet(space.smallest())
    assert view[0].weight is network[0].weight
    assert view[0].bias.scale == 2.0
    supernet.requires_grad_(False)
    supernet.refresh()
    frozen = supernet.subnet(space.smallest())
    supernet.requires_grad_(True)
    assert not frozen[0].bias.requires_grad


def test_wrong_weights_load_nothing(digits: Supernet) -> None:
    before = digits.fingerprint()
    state = {k: torch.zeros_like(v) for k, v in digits.state_dict().items()}
    state["bn.weight"] = torch.zeros(3)
    state["bnn.bias"] = state.pop("bn.bias")
    with pytest.raises(CheckpointError, match=r"bn\.bias is missing; bnn\.bias is extra; bn\.weight \(3,\)"):
        digits.load_state_dict(state)
    assert digits.fingerprint() == before


def test_foreign_and_malformed_specs_change_nothing(digits: Supernet) -> None:
    other = space_of("other", a=[1])
    active = digits.active
    for call in (digits.subnet, digits.actuate, digits.extract, lambda s: digits(X, subnet=s)):
        with pytest.raises(ForeignSpec):
            call(other.largest())
        with pytest.raises(SpecError):
            call("largest")
        with pytest.raises(SpecError):
            call({"depth": 1})
    assert digits.active == active


def test_one_warning_for_shared_statistics_points_to_the_line_of_the_user() -> None:
    x = torch.zeros(1, 1, 16, 16)
    for act in (
        lambda supernet, spec: supernet(x, subnet=spec),
        lambda supernet, spec: supernet.subnet(spec),
        lambda supernet, spec: subnetact.Engine(supernet, [spec], example=x[:1], allow_uncalibrated=True),
    ):
        supernet = new_digits_supernet().eval()
        with pytest.warns(UncalibratedSubnetWarning, match=r"subnetact\.calibrate") as warned:
            act(supernet, supernet.space.smallest())
        assert [warning.filename for warning in warned] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            act(supernet, supernet.space.largest())


def test_cached_views_are_bounded(digits: Supernet) -> None:
    digits.cached_views = 3
    specs = specs_of(digits, 10)
    views = [weakref.ref(digits.subnet(spec)) for spec in specs]
    gc.collect()
    assert [view() is not None for view in views] == [False] * (len(specs) - 3) + [True] * 3
    assert [digits.subnet(spec) for spec in specs[-3:]] == [view() for view in views[-3:]]
    assert digits.subnet(specs[0]) is digits.subnet(specs[0])
