"""Names, attributes and hooks of a supernet work, or say what to write instead."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_spaces import space_of
from torch import Tensor, nn
from written_networks import Written

from subnetact import Supernet, insert_
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
    elastic = {"layers": LayerSelect.on(**{"2": "keep"}), "first": WeightSlice.on(out="c")}
    elastic |= {f"layers.{i}": WeightSlice.on(in_="c", out="c") for i in range(3)}
    elastic["last"] = WeightSlice.on(in_="c")
    return insert_((network or Network()).eval(), space_of(c=[4, 8], keep=[0, 1]), elastic)


@pytest.mark.parametrize(
    "prefix", ["module.", "network.", "_orig_mod.", "module.network.", "module._orig_mod."]
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_prefix_that_all_names_have_is_dropped(prefix: str, strict: bool) -> None:
    supernet, source = supernet_of(), Network().state_dict()
    supernet.load_state_dict({prefix + name: tensor for name, tensor in source.items()}, strict)
    for name, tensor in supernet.state_dict().items():
        assert torch.equal(tensor, source[name])
    mixed = {("module." if name.startswith("layers") else "") + name: t for name, t in source.items()}
    before = supernet.fingerprint()
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight is missing.*module\.layers.* is extra"):
        supernet.load_state_dict(mixed)
    assert supernet.fingerprint() == before


def named() -> nn.Module:
    """Return submodules of the names that a supernet has itself, and a tie."""
    compute = lambda m, x: m.card(m.norms(m.space(m.module(x))))  # noqa: E731
    network: Any = Written(compute, **dict.fromkeys(("module", "space", "norms", "card"), (4, 4)))
    network.card.weight = network.norms.weight
    return network.eval()  # type: ignore[no-any-return]


def test_submodules_may_have_any_name_and_tied_tensors_either() -> None:
    x, space = torch.randn(2, 4), space_of(c=[2, 4])
    elastic = {"module": WeightSlice.on(out="c"), "space": WeightSlice.on(in_="c")}
    for absent in ("norms.weight", "card.weight", None):
        network, state = named(), named().state_dict()
        supernet = insert_(network, space, elastic)
        supernet.card = Card({"small": space.smallest()})
        supernet.load_state_dict({name: t for name, t in state.items() if name != absent})
        assert torch.equal(supernet.network.card.weight, state["card.weight"])
        assert supernet.space is space
        assert torch.equal(copy.deepcopy(supernet)(x), network(x))
        supernet.load_state_dict(dict(supernet.named_parameters()))
        with pytest.raises(CheckpointError, match=r"card\.bias is missing"):
            supernet.load_state_dict({name: t for name, t in state.items() if name != "card.bias"})


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

    space = space_of("s", lambda v: {**v, "t": 4}, c=[4, 8])
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
