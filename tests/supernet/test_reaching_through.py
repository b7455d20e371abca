"""Names, attributes and hooks of a supernet work, or say what to write instead."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from subnetact import Axis, SubnetSpace, Supernet, insert_
from subnetact.errors import CheckpointError, SpecError, ViewError
from subnetact.operators import LayerSelect, WeightSlice


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"hidden": 8}
        self.first = nn.Linear(4, 8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.first(x)))

    def generate(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)


def supernet_of(network: nn.Module | None = None) -> Supernet:
    space = SubnetSpace(
        "s",
        [Axis.uniform("c", ["it"], [4, 8]), Axis.uniform("keep", ["it"], [0, 1])],
        lambda v: {"c": v["c"][0], "keep": v["keep"][0]},
    )
    elastic = {"layers": LayerSelect.on(**{"2": "keep"}), "first": WeightSlice.on(out="c")}
    elastic |= {f"layers.{i}": WeightSlice.on(in_="c", out="c") for i in range(3)}
    elastic["last"] = WeightSlice.on(in_="c")
    return insert_((network or Network()).eval(), space, elastic)


@pytest.mark.parametrize(
    "prefix", ["module.", "network.", "_orig_mod.", "module.network.", "module._orig_mod."]
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_prefix_that_all_names_have_is_dropped(prefix: str, strict: bool) -> None:
    supernet, source = supernet_of(), Network().state_dict()
    supernet.load_state_dict({prefix + name: tensor for name, tensor in source.items()}, strict)
    for name, tensor in supernet.state_dict().items():
        assert torch.equal(tensor, source[name])


def test_names_of_parameters_can_be_loaded() -> None:
    source = supernet_of()
    supernet = supernet_of()
    supernet.load_state_dict(dict(source.named_parameters()))
    assert torch.equal(supernet.network.last.weight, source.network.last.weight)
    assert [f"network.{name}" for name in supernet.state_dict()] == [
        n for n, _ in supernet.named_parameters()
    ]


def test_a_prefix_that_some_names_have_stays_and_nothing_is_loaded() -> None:
    supernet, source = supernet_of(), Network().state_dict()
    before = copy.deepcopy(supernet.state_dict())
    mixed = {("module." if name.startswith("layers") else "") + name: t for name, t in source.items()}
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight is missing.*module\.layers.* is extra"):
        supernet.load_state_dict(mixed)
    for name, tensor in supernet.state_dict().items():
        assert torch.equal(tensor, before[name])
    with pytest.raises(CheckpointError, match=r"first\.weight is missing"):
        supernet.load_state_dict({"other.weight": torch.zeros(1)})


def test_a_network_may_have_a_module_of_such_a_name() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    space = SubnetSpace("s", [Axis.uniform("c", ["it"], [2, 4])], lambda v: {"c": v["c"][0]})
    supernet = insert_(Wrapped().eval(), space, {"module": WeightSlice.on(out="c")})
    supernet.load_state_dict(supernet.state_dict())
    supernet.load_state_dict(dict(supernet.named_parameters()))


def test_layers_of_a_stack_are_reached_by_position() -> None:
    stack = supernet_of().network.layers
    assert len(stack) == 3
    assert [layer.path for layer in stack] == ["layers.0", "layers.1", "layers.2"]
    assert stack[-1] is stack["2"]
    assert [layer.path for layer in stack[:2]] == ["layers.0", "layers.1"]
    with pytest.raises(IndexError):
        stack[3]


def test_settings_are_read_through_and_methods_belong_to_subnets() -> None:
    supernet = supernet_of()
    assert supernet.config == {"hidden": 8}
    with pytest.raises(AttributeError, match=r"A subnet has its own, supernet\.subnet\(spec\)\.generate"):
        supernet.generate(torch.zeros(1, 4))
    with pytest.raises(AttributeError, match=r"the full one is supernet\.network\.layers"):
        _ = supernet.layers
    with pytest.raises(AttributeError, match="'Supernet' object has no attribute 'absent'"):
        _ = supernet.absent
    assert supernet.subnet(supernet.space.smallest()).generate(torch.zeros(1, 4)).shape == (1,)
    assert copy.deepcopy(supernet).config == supernet.config


def test_an_elastic_module_does_not_run_by_itself() -> None:
    supernet = supernet_of()
    for call in (supernet.network.first, supernet.network.layers[0], supernet.network):
        with pytest.raises(
            SpecError, match=r"an elastic module runs only as part of a subnet; call supernet\(x"
        ):
            call(torch.zeros(1, 4))


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_pre_hook",
        "register_forward_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_on_elastic_modules_are_refused_and_fire_on_views(register: str) -> None:
    supernet, seen = supernet_of(), []
    for path in ("first", "layers"):
        with pytest.raises(ViewError, match=rf"{path}: {register} .*get_submodule\('{path}'\)"):
            getattr(supernet.network.get_submodule(path), register)(lambda *a: None)
    view = supernet.subnet(supernet.space.smallest())
    view.get_submodule("first").register_forward_hook(lambda *a: seen.append(a))
    view(torch.zeros(1, 4))
    assert len(seen) == 1
