"""Networks as people write them: axes mean what they say, and subnets equal networks pruned by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from small_spaces import space_of
from torch import Tensor, nn
from torch.nn import functional as F
from written_networks import Written, disturbed, seeded

import subnetact
from subnetact.errors import InsertError
from subnetact.insertion import Description
from subnetact.insertion.recorder import recorded
from subnetact.operators import WeightSlice
from subnetact.operators.base import Operator

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
VECTORS = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
ODD = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))


def swapped(split: Callable[[Any, Tensor], Any], **numbers: int) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        first, second = split(self, self.a(x).relu())
        return self.b(torch.cat([second, first], 1))  # type: ignore[no-any-return]

    return Written(forward, a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(8, 5, 1), **numbers)


def halves(model: Any) -> None:
    """Prune the upper half of both pieces of a convolution, and what reads it, by hand."""
    kept = torch.tensor([0, 1, 4, 5])
    model.a.weight, model.a.bias = nn.Parameter(model.a.weight[kept]), nn.Parameter(model.a.bias[kept])
    model.b.weight = nn.Parameter(model.b.weight[:, kept])
    model.d = 2


def low(between: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a linear layer with an adapter of low rank beside it."""
    parts = {"base": (16, 32), "down": (16, 4), "up": (4, 32)}
    return Written(lambda self, x: self.base(x) + self.up(between(self.down(x))), **parts)


def block(first: Any = (16, 32), last: Any = (32, 16)) -> nn.Module:
    compute = lambda self, x: x + self.last(self.first(self.norm(x)).relu())  # noqa: E731
    return Written(compute, norm=nn.LayerNorm(16), first=first, last=last)


def mixed(attention: nn.Module) -> nn.Module:
    return Written(
        lambda self, x: x + self.attention(self.norm(x)), norm=nn.LayerNorm(16), attention=attention
    )


def stack(block: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Sequential(block(), block()), nn.Linear(16, 3))


class Attention(nn.Module):
    def __init__(self, width: Callable[[Any, Tensor], int]) -> None:
        super().__init__()
        self.qkv, self.out, self.n_head, self.n_embd = nn.Linear(16, 48), nn.Linear(16, 16), 4, 16
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.n_head, self.width(self, x))
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(x).split(self.n_embd, dim=2))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def shuffling(shuffle: Callable[[Tensor], Tensor], read: int) -> nn.Module:
    compute = lambda self, x: self.b(shuffle(self.a(x)))  # noqa: E731
    return Written(compute, a=nn.Conv2d(3, 16, 1), b=nn.Conv2d(read, 5, 1))


WIDTH = {"a.width": "width"}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, str]]] = {
    "chunk": (lambda: swapped(lambda _, h: h.chunk(2, 1)), IMAGE, WIDTH),
    "split": (lambda: swapped(lambda self, h: h.split(self.d, 1), d=4), IMAGE, WIDTH),
    "sizes": (lambda: swapped(lambda self, h: h.split([self.d] * 2, 1), d=4), IMAGE, WIDTH),
    "pixel shuffle": (lambda: shuffling(lambda h: F.pixel_shuffle(h, 2), 4), IMAGE, WIDTH),
    "adapter": (
        lambda: stack(lambda: block(low(lambda h: h))),
        X,
        {"1.0.first.base.ffn": "ffn", "1.0.first.down.width": "width", "0.stream": "stream"},
    ),
    "adapter with an activation": (
        lambda: stack(lambda: block(low(torch.relu))),
        X,
        {"1.0.first.base.ffn": "ffn", "1.0.first.down.width": "width"},
    ),
    "narrow": (lambda: stack(lambda: block((16, 8), (8, 16))), X, {"1.0.first.ffn": "ffn"}),
    "heads": (lambda: stack(lambda: mixed(Attention(lambda *_: -1))), X, {"1.0.attention.heads": "heads"}),
}
"""A network, an example, and slots with their axes."""


@pytest.mark.parametrize("case", NETWORKS)
def test_axes_of_a_network_mean_what_they_say(case: str) -> None:
    factory, x, axes = NETWORKS[case]
    model = disturbed(factory())
    expected = model(x)
    supernet = subnetact.insert_(model, example=x, choices=[0.5, 1.0])
    assert axes.items() <= {name: slot.axis for name, slot in supernet.description.slots.items()}.items()
    torch.testing.assert_close(supernet(x, subnet=supernet.space.largest()), expected)
    assert not supernet.check(x).not_compared
    if case in ("chunk", "split", "sizes"):  # Pieces that are swapped are narrowed alike.
        pruned, small = disturbed(factory()), supernet.space.smallest()
        halves(pruned)
        for subnet in (supernet.subnet(small), supernet.extract(small)):
            torch.testing.assert_close(subnet(x), pruned(x))


def with_second_names(kind: str) -> nn.Module:
    """Return three layers in a list, and some of them under second names, which the forward uses."""
    layers = nn.ModuleList([a := nn.Linear(8, 16), b := nn.Linear(16, 12), c := nn.Linear(12, 4)])
    names = {"once": {}, "first": {"first": a}, "all": {"all": nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), c)}}

    def forward(m: Any, x: Tensor) -> Tensor:
        first = m.first if kind == "first" else m.layers[0]
        return m.all(x) if kind == "all" else m.layers[2](m.layers[1](first(x).relu()).relu())  # type: ignore[no-any-return]

    return Written(forward, layers=layers, **names[kind])


@pytest.mark.parametrize("kind", ["first", "all"])
def test_a_module_under_two_names_is_one(kind: str) -> None:
    once, twice = (
        subnetact.insert_(disturbed(with_second_names(kind)), example=X, axes=("ffn",), choices=[0.5, 1.0])
        for kind in ("once", kind)
    )
    assert list(once.description.groups) == ["layers.0.ffn", "layers.1.ffn"]
    assert once.description.groups == twice.description.groups
    for one, other in zip(once.space.enumerate(), twice.space.enumerate(), strict=True):
        torch.testing.assert_close(once(X, subnet=one), twice(X, subnet=other))
        torch.testing.assert_close(once(X, subnet=one), twice.extract(other)(X))


@pytest.mark.parametrize("first", [False, True])
def test_a_block_under_two_names_is_in_every_subnet(first: bool) -> None:
    """A subnet would skip it under one of them only."""
    model = stack(block)
    again: Any = Written(lambda: None, first=model[1][0]) if first else nn.Sequential(*model[1])
    held = Written(lambda self, x: self.model(x), model=model, again=again)
    description = subnetact.describe(disturbed(held), X)
    stages = [block for stage in description.stages.values() for block in stage.blocks]
    assert stages == (["model.1.1"] if first else [])
    assert "two names" in description.refused["model.1.0.depth"]
    assert {group.axis for group in description.groups.values()} == {"ffn", "stream"}


def test_a_recording_has_the_calls_of_the_model_alone() -> None:
    graph = recorded(nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval(), torch.randn(2, 4)).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_module", "call_module", "output"]


def test_alike_layers_and_reasons_are_one_line() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(*(block() for _ in range(12))), nn.Linear(16, 3))
    description = subnetact.describe(disturbed(model), X, proof=False)
    lines = str(description).splitlines()
    assert len(lines) == 5
    assert lines[3].split() == [
        *("1.{0..11}.first.ffn", "ffn", "16", "24", "32"),
        *("1.{0..11}.first.out,", "1.{0..11}.last.in_"),
    ]
    assert "1.{0..11}.norm.features" in lines[2]
    assert str(description.space.smallest()) == "depth=0.5 ffn=0.5 stream=0.5"
    assert len(description.groups) == 13
    alike = {"a.0": "it is 3", "a.1": "it is 3", "b": "it is 3", "c": "it is 4"}
    assert Description("model", refused=alike).refusals() == ["a.{0..1}, b: it is 3", "c: it is 4"]


def looking(between: Callable[[Tensor], Tensor], first: int = 8, second: int = 6) -> nn.Module:
    """Return a network that looks at shapes, and has a layer for large images that does not run."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if x.shape[-1] % 2:
            x = F.pad(x, (0, 1, 0, 1))
        batch, channels = (y := between(self.first(x))).shape[:2]
        y = self.large(y) if x.shape[-1] > 20 else self.second(y.view(batch, channels, *y.shape[2:]))
        return self.head(y.relu().flatten(2).mean(2))  # type: ignore[no-any-return]

    layers = {"first": nn.Conv2d(3, first, 3), "second": nn.Conv2d(first, second, 3), "head": (second, 4)}
    return seeded(forward, **layers, large=nn.Conv2d(first, 6, 1))


def assigned(t: Tensor) -> Tensor:
    found = torch.zeros_like(t)
    found[:, :, 1:] = t[:, :, :-1]
    return found


@pytest.mark.parametrize(
    "between",
    [
        lambda t: torch.roll(t, 1, 2),
        lambda t: t.flip(-1),
        lambda t: t / (1 + t.var(3, keepdim=True)),
        lambda t: F.normalize(t, dim=1),
        lambda t: t / t.norm(dim=1, keepdim=True),
        lambda t: t / torch.linalg.vector_norm(t, dim=1, keepdim=True),
        assigned,
    ],
)
def test_a_forward_may_look_at_shapes(between: Callable[[Tensor], Tensor]) -> None:
    small = looking(between, 4, 3)
    supernet = subnetact.insert_(looking(between), example=ODD, choices=[0.5, 1.0])
    weights = supernet.state_dict()
    small.load_state_dict({n: weights[n][tuple(map(slice, t.shape))] for n, t in small.state_dict().items()})
    with torch.no_grad():
        found = supernet.subnet(supernet.space.smallest())(ODD)
        torch.testing.assert_close(found, small(ODD), rtol=0, atol=5e-5)
    assert "does not run on the example, so it stays whole" in supernet.description.refused["large"]


def test_columns_go_of_a_table_of_which_some_rows_are_never_read() -> None:
    rows = torch.tensor([[0, 1, 2], [1, 2, 4]])  # Some are read twice.
    table = nn.Parameter(torch.arange(48.0).view(6, 8) / 10)
    model = seeded(lambda m, x: m.last(m.first(x) + m.table[rows]), first=(5, 8), last=(8, 3), table=table)
    pruned: Any = copy.deepcopy(model)
    x = torch.randn(2, 3, 5)
    supernet = subnetact.insert_(model, example=x, choices=[0.5, 1.0])
    (group,) = supernet.description.groups.values()
    assert {(m.module, m.part) for m in group.members} == {("first", "out"), ("last", "in_"), ("", "table.1")}
    pruned.last.weight.data[:, 4:] = 0
    with torch.no_grad():
        found: Any = supernet.extract(supernet.space.smallest())
        torch.testing.assert_close(found(x), pruned(x))
    assert found.table.shape == (6, 4)


def test_a_grouped_layer_that_widens_loses_its_groups() -> None:
    def network(groups: int) -> nn.Module:
        parts: dict[str, Any] = {
            "first": nn.Conv2d(3, 2 * groups, 1),
            "wide": nn.Conv2d(2 * groups, 8 * groups, 3, groups=groups),
            "last": (8 * groups, 4),
        }
        return seeded(lambda m, x: m.last(m.wide(m.first(x)).relu().mean((2, 3))), **parts)

    x, small, model = torch.randn(2, 3, 6, 6), network(1), network(3)
    weights = model.state_dict()
    small.load_state_dict({n: weights[n][tuple(map(slice, t.shape))] for n, t in small.state_dict().items()})
    supernet = subnetact.insert_(model, example=x, choices=[1, 2, 3])
    with torch.no_grad():
        torch.testing.assert_close(supernet.subnet(supernet.space.smallest())(x), small(x))


MIXING: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "roll": ("shifts", lambda t: torch.roll(t, 1, 1)),
    "flip": ("reverses the order of", lambda t: t.flip(1)),
    "cumsum": ("moves or mixes", lambda t: t.cumsum(1)),
    "var": ("takes the variance over", lambda t: t / t.var(1, keepdim=True)),
    "linspace": ("spreads numbers over", lambda t: t * torch.linspace(0, 1, t.shape[1]).view(1, -1, 1, 1)),
}


@pytest.mark.parametrize("name", MIXING)
def test_functions_that_mix_channels_are_named_in_the_reason(name: str) -> None:
    what, between = MIXING[name]
    description = subnetact.describe(nn.Sequential(looking(between)).eval(), ODD, proof=False)
    assert description.refused["0.first"] == (
        f"the forward {what} its outputs, with {name} in 0 (Written): the first ones alone would give "
        "something else; it stays whole, unless the forward treats each output by itself"
    )
    assert list(description.groups) == ["0.second.width"]


@pytest.mark.parametrize("bias", [3.0, 0.0, -3.0])
@pytest.mark.parametrize("extreme", [torch.amax, torch.amin])
def test_extremes_are_refused_whatever_the_weights(extreme: Callable[..., Tensor], bias: float) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu())
        return self.c(y * extreme(y, 1, keepdim=True))  # type: ignore[no-any-return]

    model: Any = seeded(forward, a=(6, 16), b=(16, 16), c=(16, 4))
    with torch.no_grad():
        model.b.bias.add_(bias)
    description = subnetact.describe(model, VECTORS)
    assert list(description.groups) == ["a.ffn"]
    assert "takes the largest or the least of its outputs" in description.refused["b"]


def listening(m: Any, x: Tensor) -> Tensor:
    """Convolve before a recurrent layer, which is called as a module or as a function."""
    rows = m.second(m.first(x).relu()).relu().mean(2).transpose(1, 2)
    if not m.by_function:
        return m.head(m.recurrent(rows)[0][:, -1])  # type: ignore[no-any-return]
    state, weights = rows.new_zeros(1, len(rows), 5), list(m.recurrent.parameters())
    return m.head(torch.gru(rows, state, weights, True, 1, 0.0, False, False, True)[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "by_function"), [(nn.LSTM, False), (nn.GRU, False), (nn.GRU, True)])
def test_channels_that_a_recurrent_layer_reads_stay_whole(kind: type[nn.RNNBase], by_function: bool) -> None:
    layers = {"first": partial(nn.Conv2d, 3, 8, 3), "second": partial(nn.Conv2d, 8, 6, 3), "head": (5, 4)}
    recurrent = partial(kind, 6, 5, batch_first=True)
    network, full = (
        seeded(listening, **layers, recurrent=recurrent, by_function=by_function) for _ in range(2)
    )
    supernet = subnetact.insert_(network, example=ODD)
    half: Any = supernet.extract(supernet.space.smallest())
    torch.testing.assert_close(supernet(ODD), full(ODD), rtol=5e-5, atol=5e-5)
    assert half.first.out_channels < 8
    assert half.second.out_channels == 6
    assert any("second" in name for name in supernet.description.refused)
    with torch.no_grad():
        full.second.weight[:, half.first.out_channels :] = 0.0  # as if the dropped channels were not there
    torch.testing.assert_close(half(ODD), full(ODD), rtol=5e-5, atol=5e-5)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class BackwardInputs(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flip(-1), self.weight, self.bias)


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y - y.mean(-1, keepdim=True)


@pytest.mark.parametrize("first", [Linear(6, 16), nn.Sequential(nn.Linear(6, 16), nn.ReLU(), Linear(16, 16))])
def test_a_softmax_over_features_is_refused_beside_layers_with_a_forward_of_their_own(first: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(16, 16), nn.Softmax(1), nn.Linear(16, 4)).eval()
    supernet = subnetact.insert_(model, example=VECTORS)
    assert "(Softmax)" in supernet.description.refused["2"]
    assert supernet.description.groups
    assert not supernet.check(VECTORS).not_compared


@pytest.mark.parametrize("part", ["in_", "out"])
@pytest.mark.parametrize(("kind", "wrong"), [(Linear, ""), (BackwardInputs, "in_"), (Centred, "out")])
def test_a_layer_computes_what_it_does_with_zeros(kind: type[nn.Linear], wrong: str, part: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), kind(16, 16), nn.Tanh(), nn.Linear(16, 4)).eval()
    sides = {"in_": (("0", "out"), ("2", "in_")), "out": (("2", "out"), ("4", "in_"))}
    elastic = {name: WeightSlice.on(**{side: "width"}) for name, side in sides[part]}
    if part == wrong:
        with pytest.raises(InsertError, match="differs from the original network"):
            subnetact.insert_(model, space_of(width=[8, 16]), elastic, example=VECTORS)
    else:
        supernet = subnetact.insert_(model, space_of(width=[8, 16]), elastic)
        assert not supernet.check(VECTORS).not_compared


class Unknown(Operator):
    """An operator that says that its weights at zero do not stand for dropped ones."""

    parts = ("in_",)

    def zeroing_equals_dropping(self, part: str) -> bool:
        return False


def test_what_cannot_be_compared_is_refused_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with pytest.raises(InsertError, match=r"0\.ffn: a subnet cannot be compared .* zeros in 2 \(Unknown\)"):
        subnetact.insert_(model, elastic={"2": Unknown.on(in_="0.ffn")}, example=VECTORS)
    assert type(model[2]) is nn.Linear


def routed() -> nn.Module:
    compute = lambda m, x: m.head(m.branches[x.shape[-1] % 2](m.stem(x))).mean((2, 3))  # noqa: E731
    branches = nn.ModuleList(nn.Conv2d(8, 6, 3) for _ in range(2))
    return Written(compute, stem=nn.Conv2d(3, 8, 3), branches=branches, head=nn.Conv2d(6, 4, 1))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Tensor, str, tuple[str, ...]]] = {
    "split by a number": (
        lambda: swapped(lambda _, h: h.split([2, 6], 1)),
        IMAGE,
        "a",
        ("keep their order",),
    ),
    "shuffle": (
        lambda: shuffling(lambda h: h.view(2, 4, 4, 6, 6).transpose(1, 2).reshape(2, 16, 6, 6), 16),
        *(IMAGE, "a.width", ("shapes tensors by a number, use the tensor's own size or -1",)),
    ),
    "heads of the whole width": (
        lambda: stack(lambda: mixed(Attention(lambda self, x: x.shape[2] // self.n_head))),
        *(X, "1.0.attention.heads"),
        ("1.0.attention (Attention)", "shapes tensors by n_embd, n_head, use the tensor's own size or -1"),
    ),
    "an embedding that renormalises shared rows": (
        lambda: nn.Sequential(nn.Embedding(20, 16, max_norm=1.0), nn.Linear(16, 8), nn.Linear(8, 4)),
        *(torch.tensor([[0, 1]]), "0", ("with max_norm",)),
    ),
    "a layer beside one that does not run": (
        *(routed, ODD, "branches.1.width"),
        ("branches.0 may read the same, and does not run on the example",),
    ),
}
"""A network, an example, what is refused, and words of the reason."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_reason_names_the_layer_and_what_to_change(case: str) -> None:
    factory, x, name, words = REFUSED[case]
    try:
        reason = subnetact.describe(disturbed(factory()), x).refused[name]
    except InsertError as error:
        reason = str(error)
        assert f"{name}: " in reason
    assert all(word in reason for word in words), reason
