"""The one table of layers: derived classes, optional packages, what an entry says, and new entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from written_networks import seeded

import subnetact
from subnetact.operators.layer_traits import is_layer, runs_as, traits_of
from subnetact.operators.operation_traits import OPERATIONS, operation_of, spellings
from subnetact.supernet.elementwise import elementwise, writes


class Wider(nn.Conv2d):
    """A layer that is derived from one of the table."""


class Other(nn.Conv2d):
    """A layer with a convolution of its own."""

    def _conv_forward(self, *_: Tensor | None) -> Tensor:
        return torch.zeros(1)


def test_a_derived_class_has_the_traits_of_its_base_and_may_have_another_forward() -> None:
    assert traits_of(Wider) == traits_of(nn.Conv2d(1, 1, 1))
    assert traits_of(Other) == traits_of(Wider)
    assert [runs_as(cls(1, 1, 1)) for cls in (nn.Conv2d, Wider, Other)] == [True, True, False]
    assert runs_as(nn.BatchNorm1d(2), nn.BatchNorm2d)
    assert not runs_as(nn.SyncBatchNorm(2), nn.BatchNorm2d)
    assert [is_layer(m) for m in (Wider(1, 1, 1), nn.LSTM(1, 1), nn.Sequential())] == [True, True, False]
    assert not is_layer(Wider(1, 1, 1), derived=False)
    assert traits_of(nn.Module).kind == traits_of(nn.Sequential()).kind == "container"
    assert traits_of(type("Own", (nn.Module,), {})).kind == "unknown"


ACTIVATIONS = [names for names, traits in OPERATIONS.items() if traits.kind == "activation" and traits.new]


def node_of(call: Any, **settings: Any) -> fx.Node:
    graph = fx.Graph()
    op = "call_method" if isinstance(call, str) else "call_function"
    return graph.create_node(op, call, (graph.placeholder("x"),), settings)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_row_is_all_that_an_activation_needs(name: str) -> None:
    x, calls = torch.linspace(-9, 9, 41), spellings(name)
    traits = operation_of(getattr(F, name))
    expected = getattr(F, name)(x)
    assert torch.equal(traits.new(x), expected)
    over = x.clone()
    assert traits([over]).data_ptr() == over.data_ptr()
    assert torch.equal(over, expected)
    assert traits.new(torch.tensor([-1e30, 1e30])).isfinite().all() == traits.finite
    (layer,) = (call for call in calls if isinstance(call, type))
    assert torch.equal(layer()(x), expected)
    assert (traits_of(layer).finite, traits_of(layer).transparent) == (traits.finite, traits.transparent)
    for call in calls - {layer}:
        node = node_of(call)
        assert elementwise(node, {}) is traits
        assert writes(node, {}) == getattr(call, "__name__", str(call)).endswith("_")
    graph = fx.Graph()
    for inplace in (False, True):
        module = layer() if name == "gelu" else layer(inplace=inplace)
        node = graph.call_module("act", (graph.placeholder("x"),))
        assert elementwise(node, {"act": module}) is traits
        assert writes(node, {"act": module}) == getattr(module, "inplace", False)


def test_settings_hooks_and_derived_layers_make_another_operation() -> None:
    tanh = elementwise(node_of(F.gelu, approximate="tanh"), {})
    assert tanh is not None
    assert tanh is operation_of(nn.GELU, "tanh") is not operation_of(nn.GELU)
    x = torch.randn(9)
    assert torch.equal(tanh([x.clone()]), F.gelu(x, approximate="tanh"))
    assert elementwise(node_of(F.leaky_relu), {}) is None
    hooked, bound, derived = nn.ReLU(), nn.ReLU(), type("Own", (nn.ReLU,), {})()
    hooked.register_forward_hook(lambda *_: None)
    bound.forward = lambda x: x + 1  # type: ignore[method-assign]
    graph = fx.Graph()
    node = graph.call_module("act", (graph.placeholder("x"),))
    assert [elementwise(node, {"act": act}) for act in (hooked, bound, derived)] == [None] * 3


def bind_forward(layer: Any) -> None:
    """Do as tools do that wrap the forward of one layer."""
    former = layer.forward
    layer.forward = lambda x: former(x).clamp(max=0.25)


def make_nan(layer: Any) -> None:
    """Let a hook make NaN of zeros, which the output for an image of zeros consists of."""
    nn.init.zeros_(layer.bias)
    layer.register_forward_hook(lambda _, args, output: output * output / output)


@pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")
@pytest.mark.parametrize("change", [bind_forward, make_nan])
def test_programs_run_what_tools_have_put_into_a_layer(change: Any) -> None:
    layers = {"first": nn.Conv2d(3, 8, 3, padding=1), "last": nn.Conv2d(8, 8, 3, padding=1)}
    network = seeded(lambda m, x: F.relu(m.last(F.relu(m.first(x)))), **layers)
    change(network.first)
    x = torch.randn(2, 3, 8, 8)
    axis = subnetact.Axis.uniform("width", ["all"], [8])
    space = subnetact.SubnetSpace("changed", [axis], lambda v: {"width": v["width"][0]})
    x[1] = 0
    expected = network(x)
    supernet = subnetact.insert_(network, space, {})
    engine = subnetact.Engine(supernet, [space.largest()], example=x[:1], memory_budget_mb=64)
    assert engine.pin(0)
    torch.testing.assert_close(engine(x, 0), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
