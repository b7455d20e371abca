"""Operators that a user writes: the documented example works, and packed copies follow the weights."""

from __future__ import annotations

import copy
import inspect
import textwrap

import pytest
import torch
from torch import Tensor, nn

import subnetact
from subnetact.operators import LayerTraits, base, register_layer
from subnetact.operators.base import Operator
from subnetact.supernet.supernet import Supernet

X = torch.randn(2, 6, 5, 5, generator=torch.Generator().manual_seed(1))


def space_of(widths: tuple[int, ...]) -> subnetact.SubnetSpace:
    axis = subnetact.Axis.uniform("width", ["all"], widths)
    return subnetact.SubnetSpace("own", [axis], lambda values: {"width": values["width"][0]})


class Pair(nn.Module):
    """A network of one bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(3, 4, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x, y)


def test_the_documented_operator_works() -> None:
    page = inspect.getdoc(base) or ""
    code = page[page.index("    class BilinearSlice") : page.index("`BilinearSlice.on(")]
    found: dict = {
        "Operator": Operator,
        "nn": nn,
        "LayerTraits": LayerTraits,
        "register_layer": register_layer,
    }
    exec(textwrap.dedent(code), found)
    network, space = Pair().eval(), space_of((3, 8))
    x, y, layer = torch.randn(5, 3), torch.randn(5, 4), network.layer
    expected = layer(x, y)[:, :3]
    supernet = subnetact.insert_(network, space, {"layer": found["BilinearSlice"].on(out="width")})
    view = supernet.subnet(space.smallest())
    torch.testing.assert_close(view(x, y), expected)
    assert view.layer.out_features == 3
    assert view.layer.weight.untyped_storage().data_ptr() == layer.weight.untyped_storage().data_ptr()
    with pytest.raises(subnetact.errors.InsertError, match="it slices layers of the kind bilinear"):
        subnetact.insert_(nn.Sequential(nn.Linear(2, 2)), space, {"0": found["BilinearSlice"].on()})


class Interleaved(Operator):
    """Takes every second output of a 1x1 convolution first: the rule gathers rows, which copies them."""

    parts = ("out",)
    made = 0

    def full(self, part: str) -> int:
        return int(self.template.out_channels)

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
        type(self).made += 1
        rows = [*range(0, self.full("out"), 2), *range(1, self.full("out"), 2)][: sizes[0]]
        return {"weight": self.weight[rows], "bias": self.bias[: sizes[0]]}

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, int]:
        return {"out_channels": sizes[0]}


class Reading(nn.Module):
    """Reads the weight of its convolution itself, as attention layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 8, 1)
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + nn.functional.conv2d(x, self.conv.weight, self.conv.bias)


def interleaved(network: nn.Module, name: str) -> Supernet:
    torch.manual_seed(0)
    return subnetact.insert_(network, space_of((3, 8)), {name: Interleaved.on(out="width")}).eval()


def expected(supernet: Supernet) -> Tensor:
    state = {name.split(".")[-1]: tensor for name, tensor in supernet.state_dict().items()}
    return nn.functional.conv2d(X, state["weight"][[0, 2, 4]], state["bias"][:3])


def change(supernet: Supernet) -> None:
    with torch.no_grad():
        for parameter in supernet.parameters():
            parameter.mul_(1.5).add_(0.1)


def test_views_that_a_user_holds_follow_changes_in_place() -> None:
    supernet = interleaved(nn.Sequential(nn.Conv2d(6, 8, 1)), "0")
    spec = supernet.space.smallest()
    held, cached = supernet.private_view(spec)[0], supernet.subnet(spec)
    copied = copy.deepcopy(held)
    before = expected(supernet)
    for _ in range(2):
        change(supernet)
        for run in (held, cached, supernet.extract(spec), lambda x: supernet(x, subnet=spec)):
            torch.testing.assert_close(run(X), expected(supernet), rtol=0, atol=1e-6)
    torch.testing.assert_close(copied(X), before, rtol=0, atol=1e-6)
    assert held[0].bias.untyped_storage().data_ptr() == supernet.network[0].bias.untyped_storage().data_ptr()


def test_weights_that_another_module_reads_follow_too() -> None:
    supernet = interleaved(Reading(), "conv")
    view = supernet.subnet(supernet.space.smallest())
    change(supernet)
    torch.testing.assert_close(view(X), 2 * expected(supernet), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"memory_budget_mb": 0}, {"memory_budget_mb": 4}, {"backend": "eager"}])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_engines_follow_in_every_mode(options: dict) -> None:
    supernet = interleaved(nn.Sequential(nn.Conv2d(6, 8, 1), nn.ReLU()), "0")
    engine = subnetact.Engine(supernet, [supernet.space.smallest()], example=X[:1], **options)
    assert bool(engine.pin(0)) == bool(options.get("memory_budget_mb"))
    engine.prepare([2])
    for _ in range(2):
        torch.testing.assert_close(engine(X, 0), expected(supernet).relu(), rtol=0, atol=1e-5)
        change(supernet)


def test_nothing_is_packed_again_while_the_weights_stay() -> None:
    supernet = interleaved(nn.Sequential(nn.Conv2d(6, 8, 1)), "0")
    view = supernet.subnet(supernet.space.smallest())
    view(X)
    made = Interleaved.made
    for _ in range(3):
        view(X), supernet.private_view(supernet.space.smallest())[0](X)
    assert Interleaved.made == made


def test_training_reaches_the_full_weights_through_a_copying_rule() -> None:
    supernet = interleaved(nn.Sequential(nn.Conv2d(6, 8, 1)), "0").train()
    supernet(X, subnet=supernet.space.smallest()).sum().backward()
    grad = supernet.network[0].weight.grad
    assert [bool(row.abs().sum() > 0) for row in grad] == [True, False] * 3 + [False, False]
