"""What the proof at insertion refuses, as it counts only comparisons that could have failed, and what not.

Nothing here may be accepted and wrong. The reference of `seeded_models` slices nothing: it is the model from
before `insert_`, in which the weights that the description says are not used are zero.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from seeded_models import reference
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from written_networks import Written, seeded

import subnetact
from subnetact.comparison import tensors_in
from subnetact.errors import InsertError, UnprovedInputWarning
from subnetact.supernet.supernet import Supernet

VECTORS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
STATES = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
LINES = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(3))
IDS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(5))
UNUSED_AT_ZERO = "unused weights at zero"


def difference(output: Any, expected: Any) -> float:
    """Return the largest difference of two outputs, as a share of what is computed in each tensor."""
    pairs = list(zip(tensors_in(output), tensors_in(expected), strict=True))
    assert all(one.shape == other.shape for one, other in pairs)
    return max(map(_difference, *zip(*pairs, strict=True)))


def _difference(output: Tensor, expected: Tensor) -> float:
    if not (expected.is_floating_point() or expected.is_complex()):
        return float((output != expected).float().mean()) / 100  # 1 % of them may differ
    computed = ~((output == expected) & (expected.abs() > 1e3))
    assert bool((output.isfinite() | (output == expected)).all())
    if not bool(computed.any()):
        return 0.0
    apart = (output - expected)[computed].abs().max()
    return float(apart / expected[computed].abs().max().clamp(min=1e-12))


def assert_right(model: nn.Module, supernet: Supernet, *inputs: Any) -> None:
    """Compare subnets with the model from before, whose unused weights are zero."""
    assert supernet.description is not None
    space = supernet.space
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprovedInputWarning)
        for spec in {space.smallest(), space.largest(), *space.sample(0, min(6, space.size()))}:
            plain = reference(model, supernet.description, spec)
            for x in inputs:
                batch = x if isinstance(x, tuple) else (x,)
                assert difference(supernet(*batch, subnet=spec), plain(*batch)) < 2e-4, spec


def inserted(model: nn.Module, example: Any, *inputs: Any, **options: Any) -> tuple[set[str], dict[str, str]]:
    """Insert a model; return what is elastic, which is right on all inputs, and what is refused and why."""
    before = copy.deepcopy(model)
    try:
        supernet = subnetact.insert_(model, example=example, **options)
    except InsertError as error:
        return set(), {"": str(error)}
    assert_right(before, supernet, *inputs)
    assert supernet.description is not None
    return set(supernet.description.slots), dict(supernet.description.refused)


def shortcut(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    y = m.b(h).relu()
    return m.head(m.c(y + h if y.shape == h.shape else y).relu())


def counted_sizes(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    y, z = m.b(h).relu(), m.c(h).relu()
    scale = 2.0 if y.shape[-1] + z.shape[-1] < 60 else 1.0
    return m.head(torch.cat([y, z], -1)) * scale


MIDDLE = {"a": (8, 32), "b": (32, 48), "c": (48, 16), "head": (16, 5)}
SIDES = {"a": (8, 32), "b": (32, 48), "c": (32, 48), "head": (96, 5)}


@pytest.mark.parametrize(
    ("compute", "parts", "choices", "culprits", "innocent"),
    [
        (shortcut, MIDDLE, {"a": [24, 32], "b": [24, 48], "c": [8, 16]}, "ab", "c"),
        (shortcut, MIDDLE, {"a": [8, 24, 32], "b": [24, 40, 48], "c": [8, 12, 16]}, "ab", "c"),
        (counted_sizes, SIDES, {"b": [24, 48], "c": [24, 48], "a": [8, 32]}, "bc", "a"),
    ],
    ids=["linear", "choice in the middle", "sum of sizes"],
)
def test_two_groups_that_are_wrong_only_together_are_refused_by_name_and_a_third_one_is_not(
    compute: Any, parts: Any, choices: dict[str, list[int]], culprits: str, innocent: str
) -> None:
    patterns = {f"{name}.*": sizes for name, sizes in choices.items()}
    elastic, refused = inserted(seeded(compute, **parts), VECTORS, VECTORS, choices=patterns)
    wrong = {name: why for name, why in refused.items() if UNUSED_AT_ZERO in why}
    assert {name.split(".")[0] for name in wrong} == set(culprits)
    assert all(f"together with {' and '.join(list(wrong)[:-1])}" in why for why in wrong.values())
    assert [name.split(".")[0] for name in elastic] == [innocent]


def test_a_group_that_takes_a_shortcut_only_if_its_neighbour_is_whole_is_refused_alone() -> None:
    model = seeded(shortcut, a=(8, 32), b=(32, 64), c=(64, 16), head=(16, 5))
    elastic, refused = inserted(model, VECTORS, VECTORS)
    assert UNUSED_AT_ZERO in refused["b.ffn"]
    assert elastic == {"a.ffn", "c.ffn"}


@pytest.mark.parametrize(
    ("share", "attributes"),
    [(0.6, {"tokens": 16, "dim": 16}), (0.3, {"tokens": 16, "dim": 16}), (0.6, {"tokens": 16, "dim": 16.0})],
)
def test_a_number_that_fits_only_both_ends_is_refused(share: float, attributes: dict[str, float]) -> None:
    lines = torch.randn(2, 16, 8)
    model = seeded(
        lambda m, x: m.head(m.b(m.a(x).relu().reshape(-1, int(m.tokens), int(m.dim))).relu()).mean(),
        **{"a": (8, 16), "b": (16, 16), "head": (16, 5)},
        **attributes,
    )
    elastic, _ = inserted(model, lines, lines, lines[:1], choices=(0.01, 0.3, share, 1.0))
    assert "a.width" not in elastic
    assert "a.ffn" not in elastic


def turned(y: Tensor) -> Tensor:
    return y.neg().neg()


@pytest.mark.parametrize("function", [torch.clone, turned])
@pytest.mark.parametrize(
    ("share_of_a", "least", "culprits"), [(0, 28, {"b.ffn"}), (1, 60, {"a.ffn", "b.ffn"}), (1, 40, "both")]
)
def test_a_forward_that_branches_on_sizes_is_refused_although_the_numbers_agree(
    share_of_a: int, least: int, culprits: Any, function: Callable[[Tensor], Tensor]
) -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        y = m.b(h).relu()
        return m.head(m.c(function(y) if y.shape[-1] + share_of_a * h.shape[-1] < least else y).relu())

    model = seeded(compute, a=(8, 32), b=(32, 32), c=(32, 16), head=(16, 5))
    elastic, refused = inserted(model, VECTORS, VECTORS)
    branching = {name: why for name, why in refused.items() if "branches on sizes, the model itself" in why}
    assert set(branching) == ({"a.ffn", "b.ffn"} if culprits == "both" else culprits)
    assert all(("together with" in why) == (culprits == "both") for why in branching.values())
    assert elastic == {"a.ffn", "b.ffn", "c.ffn"} - set(branching)


def test_a_forward_that_calls_the_same_functions_whatever_the_size_is_elastic() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        return m.head(m.b(h.view(len(h), -1, 4).flatten(1) if h.shape[-1] % 4 == 0 else h).relu())

    elastic, _ = inserted(seeded(compute, a=(8, 32), b=(32, 32), head=(32, 5)), VECTORS, VECTORS, VECTORS[:1])
    assert elastic == {"a.ffn", "b.ffn"}


def pointer(m: Any, x: Tensor, masked: Tensor) -> Tensor:
    h = m.e(x).relu()
    q, k = m.q(h.mean(1)), m.k(h)
    return (torch.einsum("bc,btc->bt", q, k) / q.shape[-1] ** 0.5).masked_fill(masked, m.least)


@pytest.mark.parametrize("least", [-1e9, float(torch.finfo(torch.float32).min), 1e6, -math.inf])
def test_a_large_number_in_an_output_hides_nothing(least: float) -> None:
    def model() -> nn.Module:
        return seeded(pointer, e=(8, 32), q=(32, 32), k=(32, 32), least=least)

    masked = torch.zeros(2, 7, dtype=torch.bool)
    some = masked.clone()
    some[0, :2] = some[1, :1] = True
    without = inserted(model(), (LINES, masked), (LINES, masked))
    with_it = inserted(model(), (LINES, some), (LINES, some), (LINES, masked))
    assert with_it[0] == without[0]
    assert set(with_it[1]) == set(without[1])
    assert any(UNUSED_AT_ZERO in why for why in with_it[1].values())


@dataclass
class Scores:
    scores: Tensor


class Plain:
    def __init__(self, scores: Tensor) -> None:
        self.inner = {"scores": [scores]}


class Slotted:
    __slots__ = ("scores",)

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores


OBJECTS: dict[str, Callable[[Tensor], Any]] = {
    "Normal": lambda t: Normal(t, 0.1, validate_args=False),
    "Categorical": lambda t: Categorical(logits=t, validate_args=False),
    "dataclass": Scores,
    "object": Plain,
    "slots": Slotted,
    "numpy": lambda t: t.detach().numpy(),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_tensor_in_an_object_is_an_output_stays_whole_and_is_compared(kind: str) -> None:
    def compute(m: Any, x: Tensor) -> Any:
        h = m.b(m.a(x).tanh()).relu()
        return m.value(h), OBJECTS[kind](m.mu(h / h.shape[-1]))

    model = seeded(compute, a=(8, 32), b=(32, 32), mu=(32, 6), value=(32, 1))
    elastic, refused = inserted(model, VECTORS, VECTORS, VECTORS[:2])
    assert elastic == {"a.ffn"}
    assert UNUSED_AT_ZERO in refused["b.ffn"]
    assert any(name.startswith("mu") for name in refused)


@pytest.mark.parametrize(
    ("wrapped", "word"),
    [
        (lambda t: (row for row in t), "generator"),
        (lambda t: iter([t]), "list_iterator"),
        (lambda t: lambda: t, "function"),
        (lambda t: partial(torch.add, t), "partial"),
        (lambda t: {"scores": map(torch.relu, [t])}, "map"),
    ],
    ids=["generator", "iterator", "function", "partial", "map"],
)
def test_an_output_in_which_tensors_cannot_be_followed_is_refused_with_words(wrapped: Any, word: str) -> None:
    model = seeded(lambda m, x: (m.b(m.a(x).relu()), wrapped(m.a(x))), a=(8, 32), b=(32, 6))
    with pytest.raises(InsertError, match=f"returns a {word}, in which tensors cannot be followed"):
        subnetact.insert_(model, example=VECTORS)


def divided(finish: Callable[..., Any], bias: bool = True, scale: float = -1.0) -> nn.Module:
    """Return a network whose hidden features are divided by their number, so that `b` must be refused."""

    def compute(m: Any, x: Tensor) -> Any:
        h = m.a(x).relu()
        y = m.b(h).relu()
        return finish(m, h, y * y.shape[-1] ** scale)

    return seeded(compute, bias, a=(8, 32), b=(32, 32), c=(32, 6), d=(32, 16))


@pytest.mark.parametrize(
    ("finish", "scale"),
    [
        (lambda m, h, y: (h.sum(-1) * 0, torch.fft.fft(m.d(y))), -1.0),
        (lambda m, h, y: (m.c(h), torch.complex(m.d(y), m.d(y))), -1.0),
        (lambda m, h, y: (m.c(h), torch.view_as_complex(m.d(y).unflatten(-1, (8, 2)))), -1.0),
        (lambda m, h, y: (m.c(h), (m.d(y) + 1).argmax(-1)), 1.0),
        (lambda m, h, y: (m.c(h), (m.d(y) + 1).topk(3).indices), 1.0),
        (lambda m, h, y: (m.c(h), m.d(y) > 1), 1.0),
        (lambda m, h, y: (m.c(h), (m.d(y) * 10).round().to(torch.int32)), 1.0),
    ],
    ids=["fft", "complex", "view as complex", "argmax", "topk", "bool", "int32"],
)
def test_complex_and_whole_numbers_beside_a_real_output_are_compared(finish: Any, scale: float) -> None:
    elastic, refused = inserted(divided(finish, scale=scale), STATES, STATES)
    assert not any(name.startswith("b.") for name in elastic)
    assert "b.ffn" in refused or "b.ffn" in refused[""]


FAR = 1e4 * STATES


@pytest.mark.parametrize(
    ("model", "example", "inputs"),
    [
        (partial(divided, lambda m, h, y: m.c(y), bias=False), torch.zeros(4, 8), (STATES,)),
        (partial(divided, lambda m, h, y: m.c(y).relu(), bias=False), torch.zeros(1, 8), (STATES,)),
        (partial(divided, lambda m, h, y: (m.c(y) > 50).float()), STATES[:4], (FAR,)),
        (partial(divided, lambda m, h, y: (m.c(y) + 30).sign(), scale=1.0), STATES[:4], (FAR,)),
        (partial(divided, lambda m, h, y: (m.c(y) + 40).sigmoid(), scale=1.0), STATES[:4], (FAR,)),
        (partial(divided, lambda m, h, y: F.hardtanh(m.c(y) + 20)), STATES[:4], (FAR,)),
        (partial(divided, lambda m, h, y: m.c(y).clamp(40, 50)), STATES, (FAR,)),
    ],
    ids=["zeros", "zeros, rectified", "threshold", "sign", "sigmoid", "clamped", "clamped above"],
)
def test_what_an_example_does_not_show_is_refused(model: Any, example: Tensor, inputs: Any) -> None:
    elastic, _ = inserted(model(), example, example, *inputs)
    assert "b.ffn" not in elastic


def attend(m: Any, x: Tensor) -> Tensor:
    q, k, v = (f(x).unflatten(-1, (m.num_heads, 8)).transpose(1, 2) for f in (m.q, m.k, m.v))
    scores = q @ k.mT / (m.num_heads * 8 if m.form == "all width" else 8) ** 0.5
    if m.form == "ALiBi":
        slopes = 2.0 ** (-8.0 * torch.arange(1, m.num_heads + 1) / m.num_heads)
        places = torch.arange(x.shape[1])
        scores = scores - slopes[:, None, None] * (places[:, None] - places).abs()
    if m.form == "tempered":
        scores = scores * m.num_heads
    return m.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def attention(form: str, words: bool = False, bias: bool = True) -> nn.Module:
    """Return an attention with four heads between two layers, whose scores may depend on their number."""
    torch.manual_seed(0)
    inner = Written(attend, bias, num_heads=4, form=form, **dict.fromkeys("qkvo", (32, 32)))
    first = nn.Embedding(40, 32) if words else nn.Linear(32, 32, bias=bias)
    model = nn.Sequential(first, inner, nn.Linear(32, 12)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and name != "0.weight":
                weight.mul_(2)
    return model


POOR: dict[str, Tensor] = {
    "zeros": torch.zeros(1, 8, 32),
    "ones": torch.ones(1, 8, 32),
    "one token": torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(6)),
    "equal tokens": torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(7)).expand(2, 6, 32),
    "equal ids": torch.ones(1, 9, dtype=torch.long),
}


def rich(kind: str) -> Tensor:
    return IDS if kind == "equal ids" else torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("form", ["right", "all width", "ALiBi", "tempered"])
@pytest.mark.parametrize("kind", POOR)
def test_heads_are_refused_with_every_example_if_scores_depend_on_their_number(kind: str, form: str) -> None:
    model = attention(form, words=kind == "equal ids", bias=kind != "ones" or form == "right")
    elastic, _ = inserted(model, POOR[kind], rich(kind))
    assert any(name.endswith("heads") for name in elastic) == (form == "right")


@pytest.mark.parametrize("example", [torch.zeros(1, 8), torch.ones(1, 8), VECTORS[:1]])
@pytest.mark.parametrize("bias", [False, True])
def test_a_right_network_stays_elastic_with_a_poor_example(example: Tensor, bias: bool) -> None:
    model = seeded(lambda m, x: m.c(m.b(m.a(x).relu()).relu()), bias, a=(8, 32), b=(32, 32), c=(32, 6))
    elastic, _ = inserted(model, example, STATES)
    assert elastic == {"a.ffn", "b.ffn"}


def long_lines(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    return m.b(h / h.shape[-1] if x.shape[1] > 10 else h)


def masked_lines(m: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    h = m.a(x).relu()
    if mask is not None:
        h = h * mask[..., None] / h.shape[-1]
    return m.b(h)


def of_one(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    return m.b(h if len(x) > 1 else h / h.shape[-1])


LINEAR = {"a": (8, 32), "b": (32, 6)}
MASK = torch.tensor([[1.0] * 5 + [0.0] * 2, [1.0] * 7])
OTHER_PATHS: dict[str, tuple[Any, dict[str, Any], Any, Any]] = {
    "longer lines": (long_lines, LINEAR, LINES, torch.randn(2, 12, 8)),
    "padded": (masked_lines, LINEAR, LINES, (LINES, MASK)),
    "one input": (of_one, LINEAR, LINES, LINES[:1]),
}


@pytest.mark.parametrize("name", OTHER_PATHS)
def test_a_group_is_refused_if_only_a_later_example_shows_what_is_wrong(name: str) -> None:
    compute, parts, first, second = OTHER_PATHS[name]
    alone = subnetact.describe(seeded(compute, **parts), first)
    assert len(alone.groups) == 1
    with pytest.raises(InsertError, match=f"{next(iter(alone.groups))}.*{UNUSED_AT_ZERO}"):
        subnetact.insert_(seeded(compute, **parts), example=[first, second])
    with pytest.raises(InsertError, match=UNUSED_AT_ZERO):
        subnetact.insert_(seeded(compute, **parts), example=[first, first, second])
    with pytest.raises(InsertError, match=UNUSED_AT_ZERO):
        subnetact.insert_(seeded(compute, **parts), alone, example=[first, second])


def right_lines(m: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    h = m.b(m.a(x).relu()).relu()
    return m.c(h if mask is None else h * mask[..., None])


def lines_model() -> nn.Module:
    return seeded(right_lines, a=(8, 32), b=(32, 32), c=(32, 6))


def test_a_right_model_is_elastic_with_a_short_a_long_and_a_padded_example() -> None:
    examples = [LINES[:, :2], torch.randn(2, 30, 8), (LINES, MASK)]
    elastic, _ = inserted(lines_model(), examples, *examples)
    assert elastic == {"a.ffn", "b.ffn"}


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        yield messages


def of_inputs(messages: list[warnings.WarningMessage]) -> int:
    return sum(issubclass(message.category, UnprovedInputWarning) for message in messages)


@pytest.mark.parametrize(
    ("model", "example", "other"),
    [
        (lines_model, LINES, (LINES[0],)),
        (lines_model, LINES[0], (LINES,)),
        (lines_model, LINES, (LINES, MASK)),
        (lines_model, (LINES, MASK), (LINES,)),
        (partial(seeded, lambda m, x: m.b(turned(m.a(x)) if len(x) > 1 else m.a(x)), **LINEAR), LINES, "one"),
        (partial(seeded, lambda m, x: m.b(turned(m.a(x)) if len(x) > 1 else m.a(x)), **LINEAR), "one", LINES),
    ],
    ids=["fewer axes", "more axes", "a mask", "no mask", "one input", "several inputs"],
)
def test_a_view_warns_once_at_a_form_that_no_example_had(
    model: Any, example: Any, other: Any, warned: list[warnings.WarningMessage]
) -> None:
    first, second = (LINES[:1] if isinstance(x, str) else x for x in (example, other))
    supernet = subnetact.insert_(model(), example=first)
    one, two = (x if isinstance(x, tuple) else (x,) for x in (first, second))
    smallest, largest = supernet.space.smallest(), supernet.space.largest()
    supernet(*one, subnet=smallest)
    assert of_inputs(warned) == 0
    supernet(*two, subnet=smallest)
    assert of_inputs(warned) == 1
    supernet(*two, subnet=smallest)
    supernet(*two, subnet=largest)
    assert of_inputs(warned) == 1


@pytest.mark.parametrize("example", [LINES, LINES[:1]])
def test_a_view_does_not_warn_at_what_is_proved(
    example: Tensor, warned: list[warnings.WarningMessage]
) -> None:
    supernet = subnetact.insert_(lines_model(), example=example)
    view = supernet.subnet(supernet.space.smallest())
    for batch, length in itertools.product((1, 2, 5), (1, 4, 20)):
        view(torch.randn(batch, length, 8))
    torch.jit.trace(view, (LINES[0],), check_trace=False)
    torch.compile(view, backend="eager")(LINES[0])
    supernet.check((LINES, MASK))
    supernet(LINES, MASK, subnet=supernet.space.smallest())
    assert of_inputs(warned) == 0
    supernet(LINES[0], subnet=supernet.space.smallest())
    assert of_inputs(warned) == 1


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.in_features


class Equalised(nn.Linear):
    """The equalised learning rate of StyleGAN, computed in the forward."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight / math.sqrt(self.weight.shape[1]), self.bias)


class Standardised(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(input, weight / (weight.std(1, keepdim=True) + 1e-5), self.bias)


def with_second(layer: type[nn.Linear]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), layer(32, 24), nn.ReLU(), nn.Linear(24, 5)).eval()


def twin(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose second layer is an ordinary one, which the graph shows to be elastic."""
    plain: Any = copy.deepcopy(model)
    plain[2].__class__ = nn.Linear
    return plain  # type: ignore[no-any-return]


@pytest.mark.parametrize("layer", [Scaled, Equalised])
def test_a_layer_that_scales_by_its_size_keeps_all_inputs(layer: type[nn.Linear]) -> None:
    model = with_second(layer)
    with pytest.raises(InsertError, match=rf"0\..*{UNUSED_AT_ZERO}"):
        subnetact.insert_(model, subnetact.describe(twin(model), VECTORS), example=VECTORS)
    elastic, refused = inserted(model, VECTORS, VECTORS)
    assert elastic
    assert all(name.startswith("2.") for name in elastic)
    assert any(name.startswith("0.") and UNUSED_AT_ZERO in why for name, why in refused.items())


def test_a_layer_that_normalises_its_weights_may_have_fewer_inputs() -> None:
    model = with_second(Standardised)
    supernet = subnetact.insert_(model, subnetact.describe(twin(model), VECTORS), example=VECTORS)
    spec = supernet.space.smallest()
    view: Any = supernet.subnet(spec)
    assert len(view[0].weight) < 32
    fewer = Standardised(*view[2].weight.shape[1::-1])
    fewer.load_state_dict({"weight": view[2].weight, "bias": view[2].bias})
    pruned = nn.Sequential(view[0], view[1], fewer, *list(view)[3:])
    with torch.no_grad():
        assert difference(supernet(VECTORS, subnet=spec), pruned(VECTORS)) < 1e-5
