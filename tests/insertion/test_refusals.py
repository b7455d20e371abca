"""What nothing speaks against is elastic, and a refusal says in the user's words what to change.

An accepted model is compared with a copy of the original model in which unused weights are zero.
"""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from written_networks import Written

import subnetact
from subnetact.errors import InsertError

X, SEQUENCE, SIGNAL = torch.randn(3, 8), torch.randn(2, 6, 8), torch.randn(3, 4, 4)
Returned = namedtuple("Returned", "scores features")


class Plain(nn.Module):
    """Two linear layers, of which subclasses and functions change the forward."""

    def __init__(self, forward: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.n, self.dim, self.counts, self.between = 0, 16, {"n": 0}, forward

    def forward(self, x: Tensor) -> Any:
        return self.between(self, x)

    def plain(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Signal(Plain):
    """Two convolutions, between which a function changes what flows."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(between)
        self.a, self.b = nn.Conv1d(4, 16, 1), nn.Conv1d(16, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.between(self, self.a(x).relu()))


def attending(**options: Any) -> Callable[[], nn.Module]:
    """Return a maker of an attention of torch between linear layers."""
    forward = lambda m, x: m.o(m.attention(m.q(x), m.k(x), m.v(x), need_weights=False)[0])  # noqa: E731
    layers = {"q": (8, 32), "k": (8, options.get("kdim", 32)), "v": (8, 32), "o": (32, 5)}
    attention = partial(nn.MultiheadAttention, 32, 4, batch_first=True, **options)
    return lambda: Written(forward, **layers, attention=attention)


class GraphAttention(nn.Module):
    """Heads that no name and no number tells of, as in a graph attention network."""

    def __init__(self, shape: tuple[int, ...] = (-1, 8)) -> None:
        super().__init__()
        self.w, self.o, self.shape = nn.Linear(8, 32), nn.Linear(32, 5), shape
        self.source, self.target = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.w(x).unflatten(-1, self.shape)
        source, target = (h * self.source).sum(-1), (h * self.target).sum(-1)
        weights = F.leaky_relu(source[:, :, None] + target[:, None]).softmax(2)
        return self.o(torch.einsum("bijh,bjhd->bihd", weights, h).flatten(2).relu())


class PerGroup(Plain):
    """A scale for every four channels, which is a parameter of the model itself."""

    def __init__(self, order: tuple[int, ...] = (1, 2)) -> None:
        super().__init__()
        self.w, self.order = nn.Parameter(torch.randn(4)), order

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu().unflatten(1, (-1, 4))
        h = h * self.w[:, None] if self.order == (1, 2) else h * self.w
        return self.b(h.flatten(1))


def parameters(head: Any) -> nn.Module:
    """Return a model whose weights are its own parameters."""
    forward = lambda m, x: m.head((x @ m.u).relu() @ m.v)  # noqa: E731
    own = {"u": nn.Parameter(torch.randn(8, 16)), "v": nn.Parameter(torch.randn(16, 4))}
    return Written(forward, **own, head=head)


def finding(m: Any, x: Tensor) -> list[dict[str, Tensor]]:
    """Return, as a detector does, what has a score above a threshold."""
    y = m.b(m.a(x).relu())
    y = y[y[:, 0] > 1e6]
    return [{"boxes": y[:, 1:], "scores": y[:, 0]}]


def diagonal(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    output: Tensor = m.b(h) + torch.einsum("ii->i", h.t() @ h).sum()
    return output


def weighted(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two sums over pairs of channels; a softmax mixes a channel with the other one of its pair."""
    pairs = m.a(x).unflatten(-1, (-1, 2))
    return m.w(pairs).sum(1), (pairs.softmax(-1) * pairs).sum(1)


class Buffered(Plain):
    """A model that moves a buffer to the device of its input, as CTRL of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.shift = self.shift.to(device=x.device, dtype=x.dtype)
        return self.plain(x + self.shift)


def counting(step: Callable[[Plain], None]) -> Callable[[], Plain]:
    """Return a maker of a model that does a step before it answers."""

    def forward(self: Plain, x: Tensor) -> Tensor:
        step(self)
        return self.plain(x)

    return lambda: Plain(forward)


def add(self: Plain) -> None:
    self.n += 1


def subtract(self: Plain) -> None:
    self.n = self.n - 1


def add_inside(self: Plain) -> None:
    self.dim += 1
    self.b.seen = getattr(self.b, "seen", 0.0) + 0.5


def written(index: Any, value: Any) -> Callable[[], Signal]:
    """Return a maker of a model that writes over entries between its layers."""

    def between(_: Any, h: Tensor) -> Tensor:
        h[index] = value
        return h

    return lambda: Signal(between)


FIRST = {"a.weight": 0, "a.bias": 0, "b.weight": 1}
STREAM = dict.fromkeys(("q", "k", "v", "attention.out_proj"), 0)
STREAM = {f"{name}.{part}": axis for name, axis in STREAM.items() for part in ("weight", "bias")}
ACCEPTED: dict[str, tuple[Callable[[], nn.Module], Tensor, str, Mapping[str, int]]] = {
    "a counter": (counting(add), X, "a.ffn", FIRST),
    "a count down": (counting(subtract), X, "a.ffn", FIRST),
    "counters of a layer": (counting(add_inside), X, "a.ffn", FIRST),
    "a buffer that is assigned": (Buffered, X, "a.ffn", FIRST),
    "a position": (written((slice(None), slice(None), 0), 0.0), SIGNAL, "a.width", FIRST),
    "positions": (written((..., slice(1, 3)), 0.5), SIGNAL, "a.width", FIRST),
    "appended keys": (attending(add_bias_kv=True), SEQUENCE, "q.width", STREAM | {"o.weight": 1}),
    "appended zeros": (attending(add_zero_attn=True), SEQUENCE, "q.width", STREAM | {"o.weight": 1}),
    "heads with appended keys": (
        attending(add_bias_kv=True, add_zero_attn=True),
        SEQUENCE,
        "attention.heads",
        {"attention.out_proj.weight": 1},
    ),
    "a diagonal": (lambda: Written(diagonal, a=(8, 16), b=(16, 4)), X, "a.ffn", FIRST),
    "what mixes alone and not together": (
        lambda: Written(weighted, bias=False, a=(8, 16), w=(2, 5)),
        X,
        "a.",
        {"a.weight": 0},
    ),
    "heads without a number": (GraphAttention, SEQUENCE, "w", {"o.weight": 1}),
    "a scale of several channels": (PerGroup, X, "a", {"b.weight": 1}),
    "a scale of every fourth channel": (lambda: PerGroup((2, 1)), X, "a", {"b.weight": 1}),
}
"""What is accepted: the model, an example, the start of the name of a group, and parameters -> the axis of
which half is not used if half of the group is dropped."""


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_nothing_speaks_against_is_elastic(case: str) -> None:
    factory, x, start, axes = ACCEPTED[case]
    torch.manual_seed(0)
    model = factory().eval()
    zeroed, whole = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for name, axis in axes.items():
            parameter = zeroed.get_parameter(name)
            parameter.narrow(axis, parameter.shape[axis] // 2, parameter.shape[axis] // 2).zero_()
    description = subnetact.describe(model, x)
    name = next(name for name in description.groups if name.startswith(start))
    for other in {*description.groups} - {name}:
        description = description.without(other, "not tried here")
    supernet = subnetact.insert_(model, description, example=x)
    half = supernet.space.smallest()
    torch.testing.assert_close(supernet(x, subnet=half), zeroed(x), rtol=5e-5, atol=5e-5)
    torch.testing.assert_close(supernet.extract(half)(x), zeroed(x), rtol=5e-5, atol=5e-5)
    supernet.check(x)
    with suppress(InsertError):  # Heads that share a parameter with others keep their order.
        subnetact.reorder_(supernet, example=x)
    largest = supernet(x, subnet=supernet.space.largest())
    torch.testing.assert_close(largest, whole(x), rtol=5e-5, atol=5e-5)


def test_a_view_counts_for_itself() -> None:
    supernet = subnetact.insert_(counting(add)().eval(), example=X)
    before, view = supernet.network.n, supernet.subnet(supernet.space.smallest())
    for _ in range(3):
        view(X)
    assert (view.n, supernet.network.n) == (before + 3, before)


def reading(read: Callable[[Plain, Tensor], Any]) -> Callable[[], Plain]:
    """Return a maker of a model that counts and then reads what it has counted."""

    def forward(self: Plain, x: Tensor) -> Any:
        self.n += 1
        return read(self, self.plain(x))

    return lambda: Plain(forward)


def swallowed(self: Plain, y: Tensor) -> Tensor:
    try:
        late = self.n > 99
    except Exception:
        late = False
    return 2 * y if late else y


def handed_on(self: Plain, y: Tensor) -> Tensor:
    self.b.step = self.n + 1
    return 2 * y if self.b.step == 99 else y


READS: dict[str, Callable[[Plain, Tensor], Any]] = {
    "compared": lambda self, y: y if self.n < 99 else 2 * y,
    "equal": lambda self, y: 2 * y if self.n == 99 else y,
    "even": lambda self, y: 2 * y if self.n // 99 else y,
    "true": lambda self, y: y if self.n else 2 * y,
    "an index": lambda self, y: y * [1.0, 2.0][self.n > 99],
    "a key": lambda self, y: y * {99: 2.0}.get(self.n, 1.0),
    "a text": lambda self, y: 2 * y if f"{self.n}" == "99" else y,
    "in a sum": lambda self, y: y + self.n,
    "in a product": lambda self, y: y + 0.0 * self.n,
    "a tensor": lambda self, y: y + 0 * torch.tensor(self.n),
    "of a class": lambda self, y: 2 * y if isinstance(self.n, int) and self.n > 99 else y,
    "returned": lambda self, y: (y, self.n),
    "in try": swallowed,
    "handed on": handed_on,
}


@pytest.mark.parametrize("read", READS)
def test_a_counter_that_is_read_is_refused(read: str) -> None:
    with pytest.raises(InsertError, match="its forward changes attributes of the model, such as a counter"):
        subnetact.insert_(reading(READS[read])().eval(), example=X)


def hooked() -> nn.Module:
    model = counting(add)()
    model.a.register_forward_hook(lambda *_: None)
    return model


def nested(between: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(Signal(between), nn.ReLU(), nn.Conv1d(4, 3, 1))


def literal(_: Any, h: Tensor) -> Tensor:
    return h.view(-1, 16, 4)


def divided(self: Any, h: Tensor) -> Tensor:
    return h.reshape(len(h), self.dim, -1) / self.dim


def returning(*parts: str) -> Callable[[], Plain]:
    def forward(self: Plain, x: Tensor) -> Any:
        h = self.a(x).relu()
        both = Returned(self.b(h), h)
        return both if not parts else {part: getattr(both, part) for part in parts}

    return lambda: Plain(forward)


CHANNELS = (slice(None), slice(0, 4))
REFUSED: dict[str, tuple[Callable[[], nn.Module], Tensor, str, tuple[str, ...]]] = {
    "channels": (written(CHANNELS, 0.5), SIGNAL, "a", ("writes over some", "x[...] = ...", "(Signal)")),
    "features": (returning(), X, "a", ("outputs of the model, tensor 2 of those returned; leave it out",)),
    "features first": (returning("features", "scores"), X, "a", ("tensor 1 of those returned; leave it",)),
    "one output": (lambda: Plain(Plain.plain), X, "b", ("outputs of the model, tensor 1 of those returned",)),
    "a literal size": (lambda: Signal(literal), SIGNAL, "a.width", ("Signal: shape", "by a number", "or -1")),
    "inside": (lambda: nested(literal), SIGNAL, "0.a.width", ("0 (Signal): shape", "own size or -1")),
    "literal heads": (lambda: GraphAttention((4, 8)), SEQUENCE, "w", ("GraphAttention: ", "own size or -1")),
    "a literal expand": (
        lambda: Signal(lambda self, h: h + torch.ones(1).expand(len(h), 16, 4)),
        SIGNAL,
        "a.width",
        ("Signal: The size of tensor", "own size or -1"),
    ),
    "an attribute in a formula": (lambda: Signal(divided), SIGNAL, "a.width", ("by dim, use", "size or -1")),
    "kdim": (attending(kdim=16), SEQUENCE, "attention.heads", ("project to embed_dim before",)),
}
"""What is refused: the model, an example, the start of the name that is refused, and words of the reason."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_what_to_change(case: str) -> None:
    factory, x, start, words = REFUSED[case]
    torch.manual_seed(0)
    model = factory().eval()
    try:
        refused = dict(subnetact.describe(model, x).refused)
        reason = next(f"{name}: {why}" for name, why in refused.items() if name.startswith(start))
    except InsertError as error:
        reason = str(error)
    assert all(word in reason for word in words), reason
    assert "assigned" not in reason


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            lambda: parameters(nn.Identity()),
            "the parameters u, v belong to no known layer: use nn.Linear, or describe",
        ),
        (lambda: parameters((4, 3)), "head: its outputs .*; the parameters u, v belong to no known layer"),
        (
            lambda: Written(finding, a=(8, 16), b=(16, 5)),
            "Written returns empty outputs, .* give an example in which it finds something",
        ),
        (hooked, r"Plain.a has hooks, .* remove them first, .* and register them after insert_"),
    ],
)
def test_a_refused_model_hears_what_to_change(factory: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InsertError, match=message):
        subnetact.insert_(factory().eval(), example=X)


def test_reordering_leaves_what_no_input_shows() -> None:
    model = Plain(lambda m, x: m.b(m.a(x).relu()) + 0 * m.d(m.c(x).relu())).eval()
    model.c, model.d = nn.Linear(8, 12).eval(), nn.Linear(12, 4).eval()
    description = subnetact.describe(model, X, proof=False)
    supernet = subnetact.insert_(model, description.space, description.elastic)
    report = str(subnetact.reorder_(supernet, example=X))
    assert "a.out: 16 units" in report
    assert "c.out: left as it was, because the example does not show" in report


def test_a_norm_that_is_called_by_keyword_is_no_obstacle() -> None:
    model = Plain(lambda m, x: m.b(m.norm(input=m.a(x)).relu())).eval()
    model.norm = nn.BatchNorm1d(16).eval()
    supernet = subnetact.insert_(model, example=X)
    assert supernet.check(X).compared
