"""Spaces and specifications: canonical form, keys, JSON, samples, counting, errors."""

from __future__ import annotations

import json
import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnetact.errors import ForeignSpec, IllegalChoice, SpecError
from subnetact.space import (
    Axis,
    Slot,
    SubnetSpace,
    UsedWhen,
    make_divisible,
)
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
    assert SPACE.parse(SPACE.format(spec)) == spec
    assert SPACE.check(spec) == spec
    copied = pickle.loads(pickle.dumps(spec))
    assert copied == spec
    assert hash(copied) == hash(spec)


@given(st.integers(0, 10_000))
def test_samples_are_legal_and_repeatable(seed: int) -> None:
    assert SPACE.sample(seed) == SPACE.sample(random.Random(seed))
    for spec in (SPACE.sample(np.random.default_rng(seed)), SPACE.sample(seed)):
        assert SPACE.check(spec) == spec


def test_samples_reach_every_subnet() -> None:
    rng = random.Random(0)
    assert {SPACE.sample(rng) for _ in range(20_000)} == set(SPACE.enumerate())


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_several_samples_are_distinct_and_begin_with_both_ends(seed: int, n: int) -> None:
    found = SPACE.sample(seed, n)
    assert len(found) == len(set(found)) == min(n, SPACE.size())
    assert found[:2] == [SPACE.smallest(), SPACE.largest()][:n]
    assert [SPACE.check(spec) for spec in found] == found
    assert found == SPACE.sample(random.Random(seed), n)


def test_all_samples_of_a_space_are_all_its_subnets() -> None:
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


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"depth": 4, "expand": 2, "width": 1.0}, ["depth[0]", "stage1", "4", "1, 2, 3"]),
        (
            {"depth": [1, 2], "expand": [2, 0, 0, 2, 3, 2], "width": 1.0},
            ["expand[4]", "stage2.1", "3", "2, 4"],
        ),
        ({"depth": 1, "expand": 2, "width": 0.7}, ["width[0]", "0.7", "0.5, 1.0"]),
        ({"depth": True, "expand": 2, "width": 1.0}, ["depth[0]", "True"]),
        ({"depth": float("nan"), "expand": 2, "width": 1.0}, ["depth[0]", "nan"]),
        ({"depth": None, "expand": 2, "width": 1.0}, ["depth[0]", "None"]),
    ],
)
def test_an_illegal_value_names_slot_value_and_choices(config: dict, words: list[str]) -> None:
    with pytest.raises(IllegalChoice) as error:
        SPACE.parse(config)
    assert all(word in str(error.value) for word in words)


def test_wrong_axes_and_slot_counts_are_named() -> None:
    with pytest.raises(SpecError, match=r"unknown axis 'depht'.*missing axis 'depth'"):
        SPACE.spec(depht=1, expand=2, width=1.0)
    for wrong in ([1, 2], {1: 2}):
        with pytest.raises(SpecError, match="expected a mapping"):
            SPACE.parse(wrong)
    assert SPACE.spec(depth=np.array([1, 1]), expand=np.array(2), width=1.0) == SPACE.spec(
        depth=1, expand=2, width=1
    )
    with pytest.raises(SpecError, match="rng is"):
        SPACE.sample(None)
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(SpecError, match="at least 1"):
            SPACE.sample(0, wrong)


def test_the_order_of_axes_in_a_file_does_not_matter() -> None:
    spec = SPACE.largest()
    text = json.dumps({"values": dict(reversed(spec.to_json()["values"].items())), "space": SPACE.id})
    assert SubnetSpec.from_json(json.loads(text)) == spec


def test_a_spec_of_another_space_is_refused() -> None:
    foreign = stacked(widths=(0.25, 1.0)).largest()
    with pytest.raises(ForeignSpec, match="parse the configuration with this supernet's own space"):
        SPACE.resolve(foreign)
    assert SPACE.check(stacked().largest()) == SPACE.largest()


def test_a_malformed_spec_is_refused() -> None:
    with pytest.raises(SpecError, match=r"make one with space\.parse"):
        SPACE.check({"depth": 1})
    for bad in (
        {},
        {"space": "s", "values": [1]},
        {"space": "s", "values": {"d": [[1]]}},
        {"space": 1, "values": {}},
    ):
        with pytest.raises(SpecError):
            SubnetSpec.from_json(bad)
    with pytest.raises(IllegalChoice):
        SPACE.check(SubnetSpec(SPACE.id, (("depth", (9, 9)), ("expand", (2,) * 6), ("width", (1.0,)))))
    with pytest.raises(SpecError, match="no axis 'kernel'"):
        SPACE.largest()["kernel"]


def test_contradicting_axes_are_refused() -> None:
    with pytest.raises(SpecError, match="not unconditional"):
        SubnetSpace("s", [Axis("a", (Slot("x", (1, 2), UsedWhen("b", 0, (1,))),))], lambda v: {})
    with pytest.raises(SpecError, match="distinct"):
        SubnetSpace("s", [Axis.uniform("a", ["x"], [1, 1])], lambda v: {})
    with pytest.raises(SpecError, match="same name"):
        SubnetSpace("s", [Axis.uniform("a", ["x"], [1]), Axis.uniform("a", ["y"], [1])], lambda v: {})


def test_aliases_mean_their_choice() -> None:
    space = SubnetSpace("s", [Axis("a", (Slot("x", (0, 2), aliases={1: 0}),))], lambda v: {"x": v["a"][0]})
    assert space.spec(a=1) == space.spec(a=0) != space.spec(a=2)


@pytest.mark.parametrize(
    ("value", "expected"), [(3, 8), (12, 16), (8.8, 8), (11.9, 16), (64 * 0.65, 40), (89.6, 88)]
)
def test_make_divisible_never_loses_a_tenth(value: float, expected: int) -> None:
    assert make_divisible(value) == expected
    assert make_divisible(value) >= 0.9 * value or make_divisible(value) == 8


def test_make_divisible_with_a_minimum_of_one() -> None:
    assert make_divisible(2.8, minimum=1) == 9


@given(values())
def test_readable_keys_are_read_back(v: dict) -> None:
    spec = SPACE.spec(**v)
    assert SPACE.parse(spec.key) == spec


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


@pytest.mark.parametrize("key", ["depth=9", "width=0.5", "x=1 y", "depth=0,0 expand=-,- width=0.50"])
def test_keys_of_no_subnet_are_refused(key: str) -> None:
    with pytest.raises(SpecError):
        SPACE.parse(key)


def test_axes_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(SpecError, match=r"keep: slots is the string 'stage1'; give a list"):
        Axis.uniform("keep", "stage1", [0, 1])
    with pytest.raises(SpecError, match="choices is the string"):
        Axis.uniform("kind", ["stage1"], "ab")
    with pytest.raises(
        SpecError, match=r"keep\[0\] \(stage1\): False is a truth value; use the choices 0 and 1"
    ):
        SubnetSpace("own", [Axis.uniform("keep", ["stage1"], [False, True])], lambda _: {"keep": 1})
    for alike in (["1", 1], ["x", "x,y"], ["x", "x y"], ["x\t", "y\n"]):
        with pytest.raises(SpecError, match=r"kind\[0\] \(a\): choices must be told apart by their text"):
            SubnetSpace("own", [Axis.uniform("kind", ["a"], alike)], lambda _: {"kind": 1})


def test_a_wrong_number_of_values_names_the_slots() -> None:
    with pytest.raises(SpecError, match=r"width needs one value for each slot \(all\), got 2 values"):
        SPACE.spec(depth=1, expand=2, width=[0.5, 1.0])
    with pytest.raises(
        SpecError, match=r"depth needs one value for each slot \(stage1, stage2\), got 3 values"
    ):
        SPACE.spec(depth=[1, 1, 1], expand=2, width=0.5)


NONSENSE = [np.zeros(3), 3, None, [], {"space": "s", "values": {"a": [10**5000]}}]
NONSENSE += [{"space": 10**5000, "values": 1}]


@pytest.mark.parametrize("data", NONSENSE, ids=lambda _: "")
def test_a_specification_from_nonsense_is_a_spec_error(data: Any) -> None:
    with pytest.raises(SpecError):
        SubnetSpec.from_json(data)


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), 10**5000, float("inf"), float("nan")], ids=lambda _: ""
)
def test_numbers_beyond_floats_are_no_choices(value: Any) -> None:
    space = SubnetSpace("s", [Axis.uniform("a", ["x"], [1, 2])], lambda v: {"a": int(v["a"][0])})
    with pytest.raises(IllegalChoice, match="is not a choice"):
        space.spec(a=[value])


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


def test_the_id_covers_choices_that_few_subnets_use() -> None:
    def space(middle: int) -> SubnetSpace:
        gates = Axis.uniform("kind", ["first"], range(500))
        rare = Slot("rare", (1, 2, 3), UsedWhen("kind", 0, (250,)))
        axes = [gates, Axis("width", (rare,)), Axis.uniform("free", ["a"], [0, 1])]
        sizes = {None: 1, 1: 1, 2: middle, 3: 9}
        return SubnetSpace("s", axes, lambda v: {"rare": sizes[v["width"][0]], "kind": v["kind"][0]})

    assert space(2).size() > 1000
    assert space(2).id == space(2).id != space(3).id


def test_the_id_depends_on_the_names_of_the_dimensions() -> None:
    axes = [Axis.uniform("width", ["all"], [1, 2])]
    one, other = (SubnetSpace("s", axes, lambda v, n=name: {n: v["width"][0]}) for name in ("a", "b"))
    assert one.id != other.id


def test_ids_are_the_same_on_every_machine() -> None:
    assert with_rule(lambda i, v, _: v, 2).id == "ruled-28ca552aa6d2"
    assert with_rule(lambda i, v, _: v, 40).id == "ruled-7234a7aa3363"


def test_the_axis_of_precisions_is_reserved() -> None:
    with pytest.raises(SpecError, match=r"'precision' is the one that supernet.enable_precision adds"):
        SubnetSpace("net", [Axis.uniform("precision", ["all"], [1, 2])], lambda v: {"w": v["precision"][0]})


def test_sizes_of_every_hashed_subnet_are_whole() -> None:
    with pytest.raises(SpecError, match="whole number"):
        with_rule(lambda i, v, _: v + (0.5 if v == 2 else 0))
    with pytest.raises(SpecError, match="other dimensions"):
        SubnetSpace("s", [Axis.uniform("w", ["a"], [1, 2])], lambda v: {f"w{v['w'][0]}": 1})
