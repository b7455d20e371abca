"""Spaces and specifications: canonical form, keys, JSON, samples, counting, errors."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subnetact.errors import ForeignSpec, IllegalChoice, SpecError
from subnetact.space import Axis, Slot, SubnetSpace, UsedWhen, make_divisible
from subnetact.spec import SubnetSpec


def stacked(name: str = "stacked", widths: tuple[float, ...] = (0.5, 1.0)) -> SubnetSpace:
    """A space of two stages with 1 to 3 blocks, an expand ratio per block, and one width."""
    depth = Axis.uniform("depth", ["stage1", "stage2"], [1, 2, 3])
    expand = []
    for stage in range(2):
        for position in range(3):
            keeping = tuple(d for d in (1, 2, 3) if d > position)
            when = UsedWhen("depth", stage, keeping) if position else None
            expand.append(Slot(f"stage{stage + 1}.{position}", (2, 4), when))
    axes = [depth, Axis("expand", tuple(expand)), Axis.uniform("width", ["all"], widths)]

    def sizes(values: dict[str, tuple[float, ...]]) -> dict[str, int]:
        width = int(8 * values["width"][0])
        mids = {f"mid{i}": width * (e or 0) for i, e in enumerate(values["expand"])}
        return {"width": width, **mids, **{f"depth{i}": d for i, d in enumerate(values["depth"])}}

    return SubnetSpace(name, axes, sizes)


SPACE = stacked()


@st.composite
def values(draw: st.DrawFn) -> dict[str, list[float]]:
    return {axis.name: [draw(st.sampled_from(slot.choices)) for slot in axis.slots] for axis in SPACE.axes}


@given(values(), values())
def test_specs_are_equal_exactly_where_their_used_slots_are(a: dict, b: dict) -> None:
    def used(v: dict) -> list[object]:
        kept = [v["expand"][3 * s + p] if p < v["depth"][s] else None for s in range(2) for p in range(3)]
        return [v["depth"], kept, v["width"]]

    one, other = SPACE.spec(**a), SPACE.spec(**b)
    assert (one == other) == (used(a) == used(b))
    assert (one.key == other.key) == (one == other)
    if one == other:
        assert hash(one) == hash(other)
        assert SPACE.resolve(one) == SPACE.resolve(other)


@given(values())
def test_every_form_of_a_spec_round_trips(v: dict) -> None:
    spec = SPACE.spec(**v)
    assert SubnetSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert SPACE.parse(SPACE.format(spec)) == SPACE.parse(spec.key) == SPACE.check(spec) == spec
    document = {"values": dict(reversed(spec.to_json()["values"].items())), "space": SPACE.id}
    assert SubnetSpec.from_json(document) == spec, "the order of axes in a file does not matter"
    copied = pickle.loads(pickle.dumps(spec))
    assert copied == spec
    assert hash(copied) == hash(spec)


@given(st.integers(0, 10_000))
def test_samples_are_legal_and_repeatable(seed: int) -> None:
    assert SPACE.sample(seed) == SPACE.sample(random.Random(seed))
    for spec in (SPACE.sample(np.random.default_rng(seed)), SPACE.sample(seed)):
        assert SPACE.check(spec) == spec


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_several_samples_are_distinct_and_begin_with_both_ends(seed: int, n: int) -> None:
    found = SPACE.sample(seed, n)
    assert len(found) == len(set(found)) == min(n, SPACE.size())
    assert found[:2] == [SPACE.smallest(), SPACE.largest()][:n]
    assert [SPACE.check(spec) for spec in found] == found
    assert found == SPACE.sample(random.Random(seed), n)


def test_samples_reach_every_subnet() -> None:
    rng = random.Random(0)
    assert {SPACE.sample(rng) for _ in range(20_000)} == set(SPACE.enumerate())
    assert set(SPACE.sample(0, SPACE.size())) == set(SPACE.sample(0, 10**9)) == set(SPACE.enumerate())


def test_size_counts_what_enumerate_yields() -> None:
    specs = list(SPACE.enumerate())
    assert len(specs) == len(set(specs)) == SPACE.size() == (2 + 4 + 8) ** 2 * 2
    assert specs[0] == SPACE.smallest()
    assert SPACE.largest() in specs
    assert [SPACE.check(spec) for spec in specs] == specs
    with pytest.raises(SpecError, match="sample instead"):
        next(SPACE.enumerate(limit=10))


def test_scalars_are_broadcast_and_skipped_slots_ignored() -> None:
    spec = SPACE.spec(depth=1, expand=[2, None, "nonsense", 4, None, None], width=np.float32(0.5))
    assert spec["expand"] == (2, None, None, 4, None, None)
    assert spec.key == "depth=1,1 expand=2,-,-,4,-,- width=0.5"
    arrays = {"depth": np.array([1, 1]), "expand": np.array(2), "width": 1.0}
    assert SPACE.spec(**arrays) == SPACE.spec(depth=1, expand=2, width=1)
    for size in (np.True_, np.int16(1), torch.tensor(1), np.array(1.0)):
        one = SubnetSpace("own", [Axis.uniform("w", ["all"], [1])], lambda _, s=size: {"width": s})
        assert one.resolve(one.largest()) == (1,)
    space = SubnetSpace("own", [Axis.uniform("w", ["all"], [0.25])], lambda v: {"width": 32 * v["w"][0]})
    assert space.resolve(space.largest()) == (8,)


def test_aliases_mean_their_choice() -> None:
    space = SubnetSpace("s", [Axis("a", (Slot("x", (0, 2), aliases={1: 0}),))], lambda v: {"x": v["a"][0]})
    assert space.spec(a=1) == space.spec(a=0) != space.spec(a=2)


@pytest.mark.parametrize(
    ("value", "expected"), [(3, 8), (12, 16), (8.8, 8), (11.9, 16), (64 * 0.65, 40), (89.6, 88)]
)
def test_make_divisible_never_loses_a_tenth(value: float, expected: int) -> None:
    assert make_divisible(value) == expected
    assert make_divisible(value) >= 0.9 * value or make_divisible(value) == 8
    assert make_divisible(2.8, minimum=1) == 9


def test_equal_values_are_printed_once_and_read_again() -> None:
    spec = SPACE.smallest()
    assert spec.key == "depth=1,1 expand=2,-,-,2,-,- width=0.5"
    assert str(spec) == f"{spec}" == "depth=1 expand=2,-,-,2,-,- width=0.5"
    assert all(SPACE.parse(str(spec)) == spec for spec in SPACE.enumerate())
    axes = [Axis.uniform("x", ["a", "b"], ["b", "a=b"]), Axis.uniform("y", ["c", "d"], [0, 0.5])]
    words = SubnetSpace("words", axes, lambda _: {})
    assert len({str(spec) for spec in words.enumerate()}) == words.size()
    assert all(words.parse(text) == spec for spec in words.enumerate() for text in (str(spec), spec.key))


def test_own_notation_may_look_like_a_key() -> None:
    def parse(text: str) -> dict[str, float]:
        return {"w": {"1/2": 0.5}[text.removeprefix("w=")]}

    space = SubnetSpace("own", [Axis.uniform("w", ["all"], [0.5, 1.0])], lambda _: {}, parse=parse)
    assert space.parse("w=1/2") == space.parse("w=0.5") == space.smallest()


def with_rule(sizes: Any, slots: int = 2, choices: tuple[int, ...] = (1, 2, 3)) -> SubnetSpace:
    """A space of widths, of which each slot is a dimension whose size `sizes(slot, value, values)` gives."""

    def resolve(values: dict[str, tuple[int, ...]]) -> dict[str, int]:
        widths = values["width"]
        return {f"w{i}": sizes(i, v, widths) for i, v in enumerate(widths)}

    return SubnetSpace("ruled", [Axis.uniform("width", [f"s{i}" for i in range(slots)], choices)], resolve)


@pytest.mark.parametrize("slots", [2, 6, 40], ids=["all", "all of the largest small space", "a sample"])
def test_the_id_tells_spaces_apart_that_differ_in_between(slots: int) -> None:
    def doubled(i: int, v: int, _: Any) -> int:
        return 2 * v

    for slot in range(slots):

        def other(i: int, v: int, _: Any, slot: int = slot) -> int:
            return 2 * v - (i == slot and v == 2)  # Both ends are the same.

        def together(i: int, v: int, values: Any, slot: int = slot) -> int:
            return 2 * v - (i == slot and v == 2 and values[slot - 1] == 2)

        ids = {with_rule(rule, slots).id for rule in (doubled, other, together)}
        assert len(ids) == 3
    assert with_rule(doubled, slots).id == with_rule(doubled, slots).id
    names = {SubnetSpace("s", [Axis.uniform("w", ["a"], [1])], lambda v, n=name: {n: 1}).id for name in "ab"}
    assert len(names) == 2, "it depends on the names of the dimensions"
    known = {2: "ruled-28ca552aa6d2", 40: "ruled-7234a7aa3363"}  # the same on every machine
    assert with_rule(lambda i, v, _: v, slots).id == known.get(slots, with_rule(lambda i, v, _: v, slots).id)


def test_the_id_covers_choices_that_few_subnets_use() -> None:
    def space(middle: int) -> SubnetSpace:
        gates = Axis.uniform("kind", ["first"], range(500))
        rare = Slot("rare", (1, 2, 3), UsedWhen("kind", 0, (250,)))
        axes = [gates, Axis("width", (rare,)), Axis.uniform("free", ["a"], [0, 1])]
        sizes = {None: 1, 1: 1, 2: middle, 3: 9}
        return SubnetSpace("s", axes, lambda v: {"rare": sizes[v["width"][0]], "kind": v["kind"][0]})

    assert space(2).size() > 1000
    assert space(2).id == space(2).id != space(3).id


FULL = {"depth": 1, "expand": 2, "width": 1.0}
CHOICE, OTHER_TEXT = "is not a choice; choose from 0.5, 1.0", "choices must be told apart by their text"


def axes(*slots: Slot, name: str = "a") -> Callable[[], SubnetSpace]:
    return lambda: SubnetSpace("s", [Axis(name, slots)], lambda v: {"w": v[name][0]})


def refusals() -> Iterator[tuple[type[SpecError], str, list[Callable[[], Any]]]]:
    """Yield the error, a part of what it says, and the calls that end in it."""
    expand, huge = [2, 0, 0, 2, 3, 2], (10**400, -(10**400), 10**5000, float("inf"), float("nan"))
    yield (
        IllegalChoice,
        "depth[0] (stage1): 4 is not a choice; choose from 1, 2, 3",
        [of({**FULL, "depth": 4})],
    )
    words = "expand[4] (stage2.1): 3 is not a choice; choose from 2, 4"
    yield IllegalChoice, words, [of({**FULL, "depth": [1, 2], "expand": expand})]
    yield IllegalChoice, "width[0] (all): 0.7 " + CHOICE, [of({**FULL, "width": 0.7})]
    yield IllegalChoice, "depth[0]", [of({**FULL, "depth": wrong}) for wrong in (True, float("nan"), None)]
    yield IllegalChoice, CHOICE, [of({**FULL, "width": wrong}) for wrong in (*huge, np.float64("inf"))]
    yield SpecError, "unknown axis 'depht'", [of({"depht": 1, "expand": 2, "width": 1.0})]
    yield SpecError, "missing axis 'depth'", [of({"depht": 1, "expand": 2, "width": 1.0})]
    yield SpecError, "expected a mapping", [of([1, 2]), of({1: 2})]
    words = "width needs one value for each slot (all), got 2 values"
    yield SpecError, words, [of({**FULL, "width": [0.5, 1.0]})]
    words = "depth needs one value for each slot (stage1, stage2), got 3 values"
    yield SpecError, words, [of({**FULL, "depth": [1, 1, 1]})]
    keys = ("depth=9", "width=0.5", "x=1 y", "depth=0,0 expand=-,- width=0.50")
    yield SpecError, "", [of(key) for key in keys]
    yield SpecError, "rng is", [lambda: SPACE.sample(None)]
    yield SpecError, "at least 1", [lambda n=n: SPACE.sample(0, n) for n in (0, -1, 2.5, True)]
    foreign = stacked(widths=(0.25, 1.0)).largest()
    words = "parse the configuration with this supernet's own space"
    yield ForeignSpec, words, [lambda: SPACE.resolve(foreign)]
    yield SpecError, "make one with space.parse", [lambda: SPACE.check({"depth": 1})]
    for depth in (9, *huge):
        spec = SubnetSpec(SPACE.id, (("depth", (depth, 9)), ("expand", (2,) * 6), ("width", (1.0,))))
        yield SpecError, "", [lambda spec=spec: SPACE.check(spec)]
    yield SpecError, "no axis 'kernel'", [lambda: SPACE.largest()["kernel"]]
    # what is no specification
    values = "0.5", [[1]], [True], [10**400], [10**5000], [float("nan")]
    documents = [{"space": "s", "values": {"w": value}} for value in values]
    documents += [{"space": name, "values": {"w": [1]}} for name in (None, 1, 10**5000)]
    documents += [np.zeros(3), torch.zeros(2), [1, 2], "spec", None, {}, 3, {"space": "s", "values": [1]}]
    yield SpecError, "specification", [lambda d=d: SubnetSpec.from_json(d) for d in documents]
    # what is no space
    yield SpecError, "not unconditional", [axes(Slot("x", (1, 2), UsedWhen("b", 0, (1,))))]
    yield SpecError, "distinct", [axes(Slot("x", (1, 1)))]
    one = Axis.uniform("a", ["x"], [1])
    yield SpecError, "same name", [lambda: SubnetSpace("s", [one, one], lambda v: {})]
    words = "keep: slots is the string 'stage1'; give a list"
    yield SpecError, words, [lambda: Axis.uniform("keep", "stage1", [0, 1])]
    yield SpecError, "choices is the string", [lambda: Axis.uniform("kind", ["stage1"], "ab")]
    words = "a[0] (stage1): False is a truth value; use the choices 0 and 1"
    yield SpecError, words, [axes(Slot("stage1", (False, True)))]
    alike = (("1", 1), ("x", "x,y"), ("x", "x y"), ("x\t", "y\n"))
    yield SpecError, f"a[0] (a): {OTHER_TEXT}", [axes(Slot("a", choices)) for choices in alike]
    words = "'precision' is the one that supernet.enable_precision adds"
    yield SpecError, words, [axes(Slot("all", (1, 2)), name="precision")]
    yield SpecError, "whole number", [lambda: with_rule(lambda i, v, _: v + (0.5 if v == 2 else 0))]
    two = [Axis.uniform("w", ["a"], [1, 2])]
    yield SpecError, "other dimensions", [lambda: SubnetSpace("s", two, lambda v: {f"w{v['w'][0]}": 1})]


def of(config: Any) -> Callable[[], SubnetSpec]:
    return lambda: SPACE.parse(config)


def test_what_is_no_space_choice_or_specification_is_refused_in_one_line() -> None:
    for error, words, calls in refusals():
        for call in calls:
            with pytest.raises(error) as caught:
                call()
            assert words in str(caught.value)
            assert len(str(caught.value)) < 400
            assert "\n" not in str(caught.value)
