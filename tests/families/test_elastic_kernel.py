"""Kernels that are computed with matrices follow the weights, carry gradients, and are copied by extract."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subnetact.errors import InsertError, SpecError
from subnetact.insertion.insert import insert_
from subnetact.operators import ElasticKernel, KernelConv2d, LayerSelect
from subnetact.space import Axis, AxisValues, SubnetSpace
from subnetact.supernet.supernet import Supernet

SIZES = (3, 5, 7)


def resolve(values: AxisValues) -> dict[str, int]:
    return {name: int(values[name][0] or 0) for name in ("width", "kernel")}


def make(matrices: bool = True, kernels: tuple[int, ...] = SIZES) -> Supernet:
    torch.manual_seed(0)
    conv = KernelConv2d(8, SIZES, stride=2, matrices=matrices)
    for parameter in conv.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    axes = [Axis.uniform("width", ["conv"], (4, 8)), Axis.uniform("kernel", ["conv"], kernels)]
    space = SubnetSpace("kernels", axes, resolve)
    elastic = {"0": ElasticKernel.on(channels="width", kernel="kernel")}
    return insert_(nn.Sequential(conv), space, elastic).eval()


def by_hand(supernet: Supernet, channels: int, size: int, matrices: bool = True) -> torch.Tensor:
    """The transform, step by step, from the state_dict alone."""
    state = supernet.state_dict()
    weight = state["0.weight"]
    for small, large in ((5, 7), (3, 5)):
        if size >= large:
            break
        weight = weight[:, :, 1:-1, 1:-1].reshape(8, -1)
        if matrices:
            weight = torch.stack([state[f"0.{large}to{small}_matrix"] @ row for row in weight])
        weight = weight.view(8, 1, small, small)
    return weight[:channels]


X = torch.randn(2, 8, 11, 11, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("matrices", [True, False])
@pytest.mark.parametrize("channels", [4, 8])
@pytest.mark.parametrize("size", SIZES)
def test_a_kernel_is_the_transformed_centre(matrices: bool, channels: int, size: int) -> None:
    supernet = make(matrices)
    spec = supernet.space.spec(width=channels, kernel=size)
    x = X[:, :channels]
    expected = F.conv2d(
        x, by_hand(supernet, channels, size, matrices), stride=2, padding=size // 2, groups=channels
    )
    extracted = supernet.extract(spec)
    torch.testing.assert_close(supernet.subnet(spec)(x), expected)
    torch.testing.assert_close(extracted(x), expected)
    assert type(extracted[0]) is nn.Conv2d
    assert extracted[0].kernel_size == (size, size)
    assert [name for name, _ in extracted.named_parameters()] == ["0.weight"]
    assert extracted[0].weight.shape == (channels, 1, size, size)
    assert repr(extracted[0]).startswith(f"Conv2d({channels}, {channels}, kernel_size=({size}, {size})")


@pytest.mark.parametrize("name", ["0.weight", "0.7to5_matrix", "0.5to3_matrix"])
def test_a_view_follows_weights_changed_in_place(name: str) -> None:
    supernet = make()
    spec = supernet.space.spec(width=4, kernel=3)
    view, other = supernet.subnet(spec), supernet.extract(spec)
    before = view(X[:, :4])
    with torch.no_grad():
        dict(supernet.network.named_parameters())[name].mul_(1.5)
    after = view(X[:, :4])
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, supernet.extract(spec)(X[:, :4]))
    torch.testing.assert_close(
        after, F.conv2d(X[:, :4], by_hand(supernet, 4, 3), stride=2, padding=1, groups=4)
    )
    torch.testing.assert_close(other(X[:, :4]), before)


def test_a_loaded_state_is_followed() -> None:
    supernet, other = make(), make()
    spec = supernet.space.spec(width=8, kernel=5)
    view = supernet.subnet(spec)
    before = view(X)
    state = {name: tensor * 0.5 for name, tensor in other.state_dict().items()}
    supernet.network.load_state_dict(state)
    expected = F.conv2d(X, by_hand(supernet, 8, 5), stride=2, padding=2, groups=8)
    torch.testing.assert_close(view(X), expected)
    torch.testing.assert_close(supernet(X, subnet=spec), expected)
    assert not torch.allclose(before, expected)


def test_training_steps_reach_the_weight_and_the_matrices() -> None:
    supernet = make()
    spec = supernet.space.spec(width=4, kernel=3)
    optimizer = torch.optim.SGD(supernet.parameters(), lr=0.05)
    supernet.subnet(spec)(X[:, :4])  # a cached kernel, which training must not use
    losses = []
    for _ in range(3):
        supernet.train()
        optimizer.zero_grad()
        loss = supernet(X[:, :4], subnet=spec).square().mean()
        loss.backward()
        gradients = {name: p.grad for name, p in supernet.network.named_parameters()}
        assert all(g is not None and g.abs().sum() > 0 for g in gradients.values())
        assert gradients["0.weight"][4:].abs().sum() == 0
        optimizer.step()
        supernet.eval()
        losses.append(supernet(X[:, :4], subnet=spec).square().mean().item())
        torch.testing.assert_close(supernet(X[:, :4], subnet=spec), supernet.extract(spec)(X[:, :4]))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_made_under_inference_mode_it_can_still_be_brought_up_to_date() -> None:
    supernet = make()
    spec = supernet.space.spec(width=8, kernel=3)
    with torch.inference_mode():
        view = supernet.subnet(spec)
        view(X)
    with torch.no_grad():
        supernet.network[0].get_parameter("weight").add_(1.0)
    torch.testing.assert_close(view(X), supernet.extract(spec)(X))


def test_copies_moves_and_pickles() -> None:
    supernet = make()
    spec = supernet.space.spec(width=4, kernel=3)
    expected = supernet.subnet(spec)(X[:, :4])
    for copied in (copy.deepcopy(supernet), pickle.loads(pickle.dumps(supernet))):
        torch.testing.assert_close(copied(X[:, :4], subnet=spec), expected)
        with torch.no_grad():
            copied.network[0].get_parameter("weight").zero_()
        assert copied(X[:, :4], subnet=spec).abs().sum() == 0
        torch.testing.assert_close(supernet(X[:, :4], subnet=spec), expected)
    view = supernet.subnet(spec)
    for copied_view in (copy.deepcopy(view), copy.deepcopy(supernet.extract(spec))):
        torch.testing.assert_close(copied_view(X[:, :4]), expected)
        assert copied_view[0].weight.data_ptr() != view[0].weight.data_ptr()
    double = supernet.double()
    torch.testing.assert_close(double(X[:, :4].double(), subnet=spec).float(), expected, atol=1e-5, rtol=1e-5)


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"odd and at least one, got \[3, 4\]"):
        KernelConv2d(8, [3, 4])
    supernet = make(kernels=(1, 3, 7))
    with pytest.raises(SpecError, match="0: kernel=1 is not legal; choose from 3, 5, 7"):
        supernet.subnet(supernet.space.smallest())
    axes = [Axis.uniform("width", ["conv"], (4, 8))]
    space = SubnetSpace("plain", axes, lambda v: {"width": int(v["width"][0] or 0), "keep": 1})
    with pytest.raises(InsertError, match="only KernelConv2d stands for several kernel sizes"):
        insert_(nn.Sequential(nn.Conv2d(8, 8, 3)), space, {"0": ElasticKernel.on(channels="width")})
    network = nn.Sequential(KernelConv2d(8, SIZES))
    with pytest.raises(InsertError, match="no part 'out'; choose from channels, kernel"):
        insert_(network, space, {"0": ElasticKernel.on(out="width")})
    assert LayerSelect.parts == ()
