"""Names, attributes and hooks of a supernet work, or say what to write instead."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from subnetact import Axis, SubnetSpace, Supernet, insert_
from subnetact.errors import CheckpointError
from subnetact.operators import ElasticAttribute, LayerSelect, WeightSlice
from subnetact.supernet.card import Card


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


def test_all_names_are_those_of_the_network() -> None:
    source, plain, x = supernet_of(), Network(), torch.randn(2, 4)
    supernet = supernet_of()
    supernet.load_state_dict(dict(source.named_parameters()))
    assert torch.equal(supernet.network.last.weight, source.network.last.weight)
    names = [name for name, _ in plain.named_parameters()]
    assert names == list(supernet.state_dict()) == [name for name, _ in supernet.named_parameters()]
    assert [n for n, _ in plain.named_modules()] == [n for n, _ in supernet.named_modules()]
    for name in names:
        assert supernet.get_parameter(name) is supernet.network.get_parameter(name)
    plain.load_state_dict(get_model_state_dict(source))
    expected = torch.func.functional_call(plain.eval(), plain.state_dict(), (x,))
    torch.testing.assert_close(torch.func.functional_call(source, source.state_dict(), (x,)), expected)
    set_model_state_dict(supernet, {name: torch.zeros_like(t) for name, t in plain.state_dict().items()})
    assert not supernet(x).any()


def test_one_name_of_a_tied_tensor_suffices() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(self.narrow(x)))

    space = SubnetSpace("s", [Axis.uniform("c", ["it"], [2, 4])], lambda v: {"c": v["c"][0]})
    elastic = {"narrow": WeightSlice.on(out="c"), "first": WeightSlice.on(in_="c")}
    for absent in ("first.weight", "last.weight"):
        network = Tied()
        supernet, state = insert_(network.eval(), space, elastic), Tied().state_dict()
        supernet.load_state_dict({name: t for name, t in state.items() if name != absent})
        assert torch.equal(supernet.network.last.weight, state["last.weight"])
        with pytest.raises(CheckpointError, match=r"last\.bias is missing"):
            supernet.load_state_dict({name: t for name, t in state.items() if name != "last.bias"})


def test_a_network_may_have_submodules_of_the_names_of_a_supernet() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.space, self.norms, self.card = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.card(self.norms(self.space(x)))

    network, x = Named().eval(), torch.randn(2, 4)
    expected = network(x)
    space = SubnetSpace("s", [Axis.uniform("c", ["it"], [2, 4])], lambda v: {"c": v["c"][0]})
    supernet = insert_(network, space, {"space": WeightSlice.on(out="c"), "norms": WeightSlice.on(in_="c")})
    supernet.card = Card({"small": space.smallest()})
    assert supernet.space is space
    assert torch.equal(copy.deepcopy(supernet)(x), expected)


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


def test_settings_and_methods_are_read_through_and_subnets_have_their_own() -> None:
    supernet = supernet_of()
    assert supernet.config == {"hidden": 8}
    assert supernet.layers is supernet.network.layers
    assert supernet.generate(torch.zeros(1, 4)).shape == (1,)
    with pytest.raises(AttributeError, match="'Supernet' object has no attribute 'absent'"):
        _ = supernet.absent
    assert supernet.subnet(supernet.space.smallest()).generate(torch.zeros(1, 4)).shape == (1,)
    assert copy.deepcopy(supernet).config == supernet.config


def test_an_operator_reads_and_writes_through_to_its_template() -> None:
    class Tokens(Network):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.num_classes, self.head = nn.Parameter(torch.randn(4)), 2, self.last

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x + self.token))

        def reset(self, classes: int) -> None:
            self.num_classes, self.width = classes, 8 * classes

    space = SubnetSpace("s", [Axis.uniform("c", ["it"], [4, 8])], lambda v: {"c": v["c"][0], "t": 4})
    elastic = {"": ElasticAttribute.on(token="t"), "first": WeightSlice.on(out="c")}
    network = Tokens().eval()
    supernet = insert_(network, space, elastic | {"last": WeightSlice.on(in_="c")})
    assert supernet.num_classes == supernet.network.num_classes == 2
    assert supernet.network.first.in_features == 4
    supernet.network.reset(3)
    supernet.network.config = {"hidden": 9}
    assert (network.num_classes, network.width, network.config) == (3, 24, {"hidden": 9})
    assert supernet.subnet(space.smallest()).width == 24
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = supernet.network.absent
