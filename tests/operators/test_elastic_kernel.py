"""Kernels that are computed with matrices follow the weights, carry gradients, and are copied by extract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_spaces import space_of
from torch import nn

from subnetact.insertion.insert import insert_
from subnetact.operators import ElasticKernel, KernelConv2d
from subnetact.supernet.supernet import Supernet

SIZES = (3, 5, 7)


def make(matrices: bool = True) -> Supernet:
    torch.manual_seed(0)
    conv = KernelConv2d(8, SIZES, stride=2, matrices=matrices)
    for parameter in conv.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    elastic = {"0": ElasticKernel.on(channels="width", kernel="kernel")}
    return insert_(nn.Sequential(conv), space_of(width=[4, 8], kernel=SIZES), elastic).eval()


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


@pytest.mark.parametrize("made", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["0.weight", "0.7to5_matrix", "0.5to3_matrix"])
def test_a_view_follows_weights_changed_in_place(name: str, made: Any) -> None:
    supernet = make()
    spec, x = supernet.space.spec(width=4, kernel=3), X[:, :4]
    extracted = supernet.extract(spec)
    with made():
        view = supernet.subnet(spec)
        before = view(x)
    with torch.no_grad():
        dict(supernet.network.named_parameters())[name].mul_(1.5)
    expected = F.conv2d(x, by_hand(supernet, 4, 3), stride=2, padding=1, groups=4)
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(view(x), expected)
    torch.testing.assert_close(supernet.extract(spec)(x), expected)
    torch.testing.assert_close(extracted(x), before)


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
