"""Networks as people write them: axes mean what they say, and subnets equal networks pruned by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import subnetact
from subnetact.errors import InsertError
from subnetact.insertion import Description

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Written(nn.Module):
    """A network whose forward is a function of it and its input."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


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


class Low(nn.Module):
    """A linear layer with an adapter of low rank beside it."""

    def __init__(self, inputs: int, outputs: int, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.base, self.between = nn.Linear(inputs, outputs), between
        self.down, self.up = nn.Linear(inputs, 4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.between(self.down(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(16), first, last

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.first(self.norm(x)).relu())  # type: ignore[no-any-return]


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


class Mixed(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))  # type: ignore[no-any-return]


def plain(_: Any, x: Tensor) -> Tensor:
    return x


def disturbed(model: nn.Module) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, str]]] = {
    "chunk": (lambda: swapped(lambda _, h: h.chunk(2, 1)), IMAGE, {"a.width": "width"}),
    "split": (lambda: swapped(lambda self, h: h.split(self.d, 1), d=4), IMAGE, {"a.width": "width"}),
    "sizes": (lambda: swapped(lambda self, h: h.split([self.d] * 2, 1), d=4), IMAGE, {"a.width": "width"}),
    "pixel shuffle": (
        lambda: Written(
            lambda self, x: self.b(F.pixel_shuffle(self.a(x), 2)), a=nn.Conv2d(3, 16, 1), b=nn.Conv2d(4, 5, 1)
        ),
        IMAGE,
        {"a.width": "width"},
    ),
    "adapter": (
        lambda: stack(lambda: Block(Low(16, 32, lambda h: h), nn.Linear(32, 16))),
        X,
        {"1.0.first.base.ffn": "ffn", "1.0.first.down.width": "width", "0.stream": "stream"},
    ),
    "adapter with an activation": (
        lambda: stack(lambda: Block(Low(16, 32, torch.relu), nn.Linear(32, 16))),
        X,
        {"1.0.first.base.ffn": "ffn", "1.0.first.down.width": "width"},
    ),
    "narrow": (lambda: stack(lambda: Block(nn.Linear(16, 8), nn.Linear(8, 16))), X, {"1.0.first.ffn": "ffn"}),
    "split heads": (
        lambda: stack(lambda: Mixed(Attention(lambda *_: -1))),
        X,
        {"1.0.attention.heads": "heads"},
    ),
}
"""A network, an example, and slots with their axes."""


@pytest.mark.parametrize("case", NETWORKS)
def test_axes_of_a_network_mean_what_they_say(case: str) -> None:
    factory, x, axes = NETWORKS[case]
    model = disturbed(factory())
    expected = model(x)
    supernet = subnetact.insert_(model, example=x)
    assert axes.items() <= {name: slot.axis for name, slot in supernet.description.slots.items()}.items()
    torch.testing.assert_close(supernet(x, subnet=supernet.space.largest()), expected)
    assert not supernet.check(x).not_compared


@pytest.mark.parametrize("case", ["chunk", "split", "sizes"])
def test_pieces_that_are_swapped_are_narrowed_alike(case: str) -> None:
    factory, x, _ = NETWORKS[case]
    supernet = subnetact.insert_(disturbed(factory()), example=x, choices=[0.5, 1.0])
    pruned = disturbed(factory())
    halves(pruned)
    small = supernet.space.smallest()
    for subnet in (supernet.subnet(small), supernet.extract(small)):
        torch.testing.assert_close(subnet(x), pruned(x))


class Twice(nn.Module):
    """Three layers in a list, and some of them under second names, which the forward uses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(12, 4)])
        self.kind = kind
        if kind == "first":
            self.first = self.layers[0]
        if kind == "all":
            a, b, c = self.layers
            self.all = nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), c)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "all":
            return self.all(x)  # type: ignore[no-any-return]
        first = self.first if self.kind == "first" else self.layers[0]
        return self.layers[2](self.layers[1](first(x).relu()).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["first", "all"])
def test_a_module_under_two_names_is_one(kind: str) -> None:
    once, twice = (
        subnetact.insert_(disturbed(Twice(kind)), example=X, axes=("ffn",), choices=[0.5, 1.0])
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
    model = stack(lambda: Block(nn.Linear(16, 32), nn.Linear(32, 16)))
    blocks: Any = model[1]
    again: Any = nn.Module()
    again.first = blocks[0]
    held = Written(
        lambda self, x: self.model(x), model=model, again=again if first else nn.Sequential(*blocks)
    )
    description = subnetact.describe(disturbed(held), X)
    stages = [block for stage in description.stages.values() for block in stage.blocks]
    assert stages == (["model.1.1"] if first else [])
    assert "two names" in description.refused["model.1.0.depth"]
    assert {group.axis for group in description.groups.values()} == {"ffn", "stream"}


REFUSED: dict[str, tuple[Callable[[], nn.Module], Tensor, str, tuple[str, ...]]] = {
    "split by a number": (
        lambda: swapped(lambda _, h: h.split([2, 6], 1)),
        IMAGE,
        "a",
        ("keep their order",),
    ),
    "shuffle": (
        lambda: Written(
            lambda self, x: self.b(self.a(x).view(2, 2, 4, 6, 6).transpose(1, 2).reshape(2, 8, 6, 6)),
            a=nn.Conv2d(3, 8, 1),
            b=nn.Conv2d(8, 5, 1),
        ),
        IMAGE,
        "a.width",
        ("shapes tensors by a number, use the tensor's own size or -1",),
    ),
    "heads of the whole width": (
        lambda: stack(lambda: Mixed(Attention(lambda self, x: x.shape[2] // self.n_head))),
        X,
        "1.0.attention.heads",
        ("1.0.attention (Attention)", "shapes tensors by n_embd, n_head, use the tensor's own size or -1"),
    ),
    "five axes": (
        lambda: stack(
            lambda: Mixed(
                Written(
                    lambda self, x: self.b(self.a(x).view(2, 5, 3, 2, 8).unbind(2)[1].flatten(2)),
                    a=nn.Linear(16, 48),
                    b=nn.Linear(16, 16),
                )
            )
        ),
        X,
        "1.0.attention.a.width",
        ("shapes tensors by a number, use the tensor's own size or -1",),
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


def test_a_model_of_peft_is_refused_with_the_way_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    home = ModuleType("peft.tuners.lora.layer")
    monkeypatch.setattr(Low, "__module__", home.__name__)
    model = stack(lambda: Block(Low(16, 32, lambda h: h), nn.Linear(32, 16))).eval()
    with pytest.raises(InsertError, match=r"Sequential\.1\.0\.first is of PEFT: .*merge_and_unload.*extract"):
        subnetact.insert_(model, example=X)


def test_alike_layers_and_reasons_are_one_line() -> None:
    model = nn.Sequential(
        nn.Linear(8, 16),
        nn.Sequential(*(Block(nn.Linear(16, 32), nn.Linear(32, 16)) for _ in range(12))),
        nn.Linear(16, 3),
    )
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
    named = {f"a.{i}": f"a.{i} is odd" for i in range(2)}
    alike = {"a.0": "it is 3", "a.1": "it is 3", "b": "it is 3", "c": "it is 4"}
    for refused, printed in (
        (named, ["a.{0..1}: a.{0..1} is odd"]),
        (alike, ["a.{0..1}, b: it is 3", "c: it is 4"]),
    ):
        assert Description("model", refused=refused).refusals() == printed
