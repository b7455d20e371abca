"""Faults that are seeded in descriptions and in slicing rules: the proof of `insert_` finds all of them.

Every row of the two tables says in words what is wrong. That it is wrong does not depend on the library's
proof: without it, a subnet does not run, or differs from the model in which everything unused is zero
(`seeded_models.py`). What leaves every subnet as it is, such as exchanging segments that are treated alike,
is no fault and not in the tables.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from seeded_models import MODELS, described, reference, seeded_model
from torch import Tensor

import subnetact
from subnetact.errors import SubnetActError
from subnetact.insertion.description import Description, Member
from subnetact.operators import Operator

pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UncalibratedSubnetWarning")

DIFFERENT = 1e-2
"""From which difference on, as a share of the largest number, a subnet computes something else."""
RANDOM_SUBNETS = 12

Edit = Callable[[Description], Description]
Members = Iterable[tuple[str, Member]]


def described_as(description: Description, members: Members) -> Description:
    """Return a description with other members, each with the name of its group."""
    pairs = list(members)
    groups = [
        replace(group, members=tuple(member for name, member in pairs if name == group.name))
        for group in description.groups.values()
    ]
    return Description(description.name, groups, description.stages.values())


def edited(part: str, start: int | None, edit: Callable[[str, Member], Members]) -> Edit:
    """Edit the members of a part, `module.part`; only the segment that begins at `start` if that is given."""

    def edit_description(description: Description) -> Description:
        pairs = [(group.name, member) for group in description.groups.values() for member in group.members]
        meant = [
            f"{member.module}.{member.part}".lstrip(".") == part and start in (None, member.start)
            for _, member in pairs
        ]
        assert any(meant), f"the description has no {part}"
        found = (edit(*pair) if means else [pair] for pair, means in zip(pairs, meant, strict=True))
        return described_as(description, (pair for members in found for pair in members))

    return edit_description


def forgotten(part: str, start: int | None = None) -> Edit:
    return edited(part, start, lambda group, member: [])


def changed(part: str, at: int | None = None, /, **changes: Any) -> Edit:
    return edited(part, at, lambda group, member: [(group, replace(member, **changes))])


def moved(part: str, to: str) -> Edit:
    return edited(part, None, lambda group, member: [(to, member)])


def joined(part: str) -> Edit:
    """Let one segment follow the size as often as all segments of a part together."""

    def edit(description: Description) -> Description:
        group, segments = next(
            (group, found)
            for group in description.groups.values()
            if (found := [m for m in group.members if f"{m.module}.{m.part}" == part])
        )
        whole = replace(segments[0], multiple=sum(m.multiple for m in segments), start=None, total=None)
        rest = forgotten(part)(description)
        pairs = [(g.name, member) for g in rest.groups.values() for member in g.members]
        return described_as(description, [*pairs, (group.name, whole)])

    return edit


def left(group: str, *parts: str) -> Edit:
    """Leave some members in a group, and forget the others."""

    def edit(description: Description) -> Description:
        pairs = [(own.name, member) for own in description.groups.values() for member in own.members]
        names = [f"{member.module}.{member.part}".lstrip(".") for _, member in pairs]
        assert {*parts} <= {*names}
        kept = (p for p, name in zip(pairs, names, strict=True) if p[0] != group or name in parts)
        return described_as(description, kept)

    return edit


def exchanged(*parts: str) -> Edit:
    """Exchange the segments of the left and of the right convolution in some parts."""
    starts = {0: 11, 11: 0}

    def exchange(group: str, member: Member) -> Members:
        return [(group, replace(member, start=starts[member.start or 0]))]

    return all_of(*(edited(part, None, exchange) for part in parts))


def turned(module: str) -> Edit:
    """Exchange the inputs and the outputs of a square layer."""
    between = (changed(f"{module}.in_", part="in"), changed(f"{module}.out", part="in_"))
    return all_of(*between, changed(f"{module}.in", part="out"))


def all_of(*edits: Edit) -> Edit:
    def edit(description: Description) -> Description:
        for one in edits:
            description = one(description)
        return description

    return edit


def skipping(stage: str, block: str) -> Edit:
    """Let a stage skip one more block, before all others."""

    def edit(description: Description) -> Description:
        found = description.stages[stage]
        longer = replace(found, blocks=(*found.blocks, block), sizes={**found.sizes, 1.0: found.full + 1})
        return Description(description.name, description.groups.values(), [longer])

    return edit


def in_parts_of_groups(description: Description) -> Description:
    """Let all sizes be two channels smaller, so that they are not whole groups of four."""
    groups = [
        replace(g, unit=1, sizes={c: n if n == g.full else n - 2 for c, n in g.sizes.items()})
        for g in description.groups.values()
    ]
    return Description(description.name, groups)


IN_DESCRIPTIONS: dict[str, dict[str, Edit]] = {
    "perceptron": {
        "a reader is forgotten": forgotten("2.in_"),
        "the reader follows the next layer, of as many neurons": moved("2.in_", "2.ffn"),
        "inputs and outputs of a square layer are exchanged": turned("2"),
    },
    "residual": {
        "a BatchNorm of the stream is forgotten": forgotten("2.bn2.channels"),
        "the last convolution of a branch is forgotten in the stream": forgotten("2.conv2.out"),
        "the head reads the whole stream": forgotten("5.in_"),
        "the two BatchNorms of a block, of as many channels, are exchanged": all_of(
            changed("2.bn1.channels", module="2.bn"),
            changed("2.bn2.channels", module="2.bn1"),
            changed("2.bn.channels", module="2.bn2"),
        ),
    },
    "stack": {
        "a convolution follows the width of the block before": moved("1.1.conv2.in_", "1.0.conv1.width"),
        "a stage skips a layer with more outputs than inputs": skipping("1.depth", "1.3"),
    },
    "fused attention": {
        "queries, keys and values are one segment": joined("attention.qkv.out"),
        "the values are forgotten": forgotten("attention.qkv.out", 32),
        "the number of heads stays, and each is narrower": forgotten("attention.num_heads"),
        "the projection of the heads is forgotten": forgotten("attention.proj.in_"),
    },
    "grouped queries": {
        "queries lose heads, and keys and values do not": left(
            "attention.heads", "attention.q.out", "attention.o.in_", "attention.num_heads"
        ),
        "queries have the multiple of keys": changed("attention.q.out", multiple=4),
    },
    "gated": {
        "gate and value are one segment": joined("up.out"),
        "the value is forgotten": forgotten("up.out", 16),
    },
    "grouped": {
        "a depthwise convolution is forgotten": forgotten("3.out"),
        "parts of the groups of a convolution are kept": in_parts_of_groups,
    },
    "normalised": {
        "a LayerNorm is forgotten": forgotten("norm1.features"),
        "an RMSNorm follows the neurons, which are as many": moved("norm2.features", "up.ffn"),
        "a stream of one feature is broadcast to the branch, which is forgotten with its readers": left(
            "stem.stream", "stem.out", "norm1.features", "up.in_"
        ),
        "one feature of the branch is broadcast to the whole stream": left("stem.stream", "down.out"),
    },
    "group normed": {
        "a GroupNorm is forgotten": forgotten("1.features"),
        "parts of the groups of a norm are kept": in_parts_of_groups,
    },
    "tied": {
        "the head is forgotten, whose weight is that of the embedding": forgotten("head.in_"),
        "the embedding is forgotten": forgotten("embedding.out"),
    },
    "concatenation": {
        "the segment of a convolution is in the place of the input, and the input behind it": all_of(
            changed("last.in_", 11, start=8), changed("bn.channels", 11, start=8)
        ),
        "a segment begins a channel early": changed("last.in_", 11, start=10),
        "the segments are exchanged everywhere": exchanged("last.in_", "bn.channels"),
        "a segment of the BatchNorm is forgotten": forgotten("bn.channels", 11),
    },
    "encoder": {
        "the token is forgotten": forgotten("token.2"),
        "the inputs of the attention are forgotten": forgotten("attention.in_"),
    },
    "sequence": {
        "the scale of every channel is forgotten": forgotten("scale.0"),
        "value and gate of a convolution are one segment": joined("second.out"),
        "a convolution reads as many channels as it computes": moved("second.in_", "second.width"),
    },
}
"""The model, what is wrong, and how its description is edited."""

LAST = 1000


def window(full: Tensor, like: Tensor, axis: int, begin: int) -> Tensor:
    """Return the first entries of every axis of a tensor, but of one those from `begin`, or the last ones."""
    for i, size in enumerate(like.shape):
        full = full.narrow(i, min(begin, full.shape[i] - size) if i == axis else 0, size)
    return full


def shifted(begin: int, *names: str, axis: int = 0) -> Callable[..., Any]:
    """Let parameters have other entries of an axis than the first ones."""

    def wrong(operator: Operator, found: dict[str, Tensor], sizes: Any, given: dict[str, Tensor]) -> Any:
        moved = {n: window(given[n], t, axis, begin) for n, t in found.items() if n in names}
        return {**found, **moved}

    return wrong


def narrowed(change: Callable[[Tensor, Tensor], Any], name: str = "weight") -> Callable[..., Any]:
    """Change a narrowed parameter, given what the right rule returns and the full one."""

    def wrong(operator: Operator, found: dict[str, Tensor], sizes: Any, given: dict[str, Tensor]) -> Any:
        if name not in found or found[name].shape == given[name].shape:
            return found
        return {**found, name: change(found[name], given[name])}

    return wrong


def without_bias(operator: Operator, found: dict[str, Any], sizes: Any, given: dict[str, Tensor]) -> Any:
    return {**found, "bias": None} if found["weight"].shape != given["weight"].shape else found


def stays(attribute: str) -> Callable[..., Any]:
    """Let an attribute stay as it is in the full module."""
    return lambda operator, found, *_: {**found, attribute: getattr(operator.template, attribute)}


def part_of_every_group(weight: Tensor, full: Tensor) -> Tensor:
    return full.unflatten(0, (4, -1))[:, : len(weight) // 4].flatten(0, 1)


def last_statistics(operator: Any, found: tuple[Tensor, Tensor], row: Any) -> tuple[Tensor, ...]:
    buffers = operator._buffers["running_mean"], operator._buffers["running_var"]
    return tuple(full[len(full) - len(part) :] for full, part in zip(buffers, found, strict=True))


def exchanged_statistics(operator: Any, found: tuple[Tensor, Tensor], row: Any) -> tuple[Tensor, ...]:
    return found[::-1] if len(found[0]) < operator.full("channels") else found


def first_channels(operator: Any, found: Tensor, row: Any, full: Tensor) -> Tensor:
    return full[: len(found)]


def off_by_one_at(rows: int, columns: int | None = None) -> Callable[..., Any]:
    """Let rows be off by one at one size only, or at one size of rows and of columns."""

    def change(weight: Tensor, full: Tensor) -> Tensor:
        wrong = len(weight) == rows and columns in (None, weight.shape[1])
        return window(full, weight, 0, 1) if wrong else weight

    return narrowed(change)


IN_RULES: dict[str, dict[str, tuple[Any, ...]]] = {
    "perceptron": {
        "rows are off by one": ("0", shifted(1, "weight", "bias")),
        "columns are off by one": ("2", shifted(1, "weight", axis=1)),
        "the bias is whole": ("0", narrowed(lambda b, full: full, "bias")),
        "the bias is forgotten": ("4", without_bias),
        "weights grow by what is left out of their inputs": (
            "2",
            narrowed(lambda weight, full: weight * (full.shape[1] / weight.shape[1])),
        ),
        "rows are off by one at the size in the middle": ("0", off_by_one_at(12)),
        "rows are off by one if a layer has 8 outputs and 12 inputs": ("2", off_by_one_at(8, 12)),
    },
    "group normed": {"the number of groups stays": ("1", stays("num_groups"), "attributes")},
    "residual": {
        "the last filters are kept": ("2.conv1", shifted(LAST, "weight")),
        "scales of a BatchNorm are off by one": ("1", shifted(1, "weight")),
        "statistics are those of the last channels": ("2.bn1", last_statistics, "shared_statistics"),
        "mean and variance are exchanged": ("2.bn2", exchanged_statistics, "shared_statistics"),
    },
    "concatenation": {"statistics of segments are the first": ("bn", first_channels, "gather")},
    "fused attention": {
        "the first rows are kept in place of those of every segment": (
            "attention.qkv",
            narrowed(lambda weight, full: full[: len(weight)]),
        ),
        "the number of heads stays": ("attention", stays("num_heads"), "attributes"),
    },
    "grouped": {
        "a part of every group is kept in place of whole groups": ("5", narrowed(part_of_every_group)),
        "the number of groups stays": ("5", stays("groups"), "attributes"),
    },
    "tied": {"columns of an embedding are off by one": ("embedding", shifted(1, "weight", axis=1))},
    "encoder": {
        "the number of heads stays": ("attention", stays("num_heads"), "attributes"),
        "the token is off by one": ("", shifted(1, "token", axis=2)),
    },
    "normalised": {
        "the scale of a LayerNorm is off by one": ("norm1", shifted(1, "weight")),
        "the shift of a LayerNorm is forgotten": ("norm1", without_bias),
    },
}
"""The model, what is wrong, in which module, what its rule returns, and the method if it is not `sliced`."""


def seed(monkeypatch: pytest.MonkeyPatch, name: str, path: str, wrong: Any, method: str = "sliced") -> None:
    """Let a method of the operator at a path of a model return something wrong, and no other operator's."""
    members = (member for group in described(name).groups.values() for member in group.members)
    (operator,) = {member.operator for member in members if member.module == path}
    right = getattr(operator, method)

    def seeded(self: Any, *args: Any) -> Any:
        found = right(self, *args)
        return wrong(self, found, *args) if self.path == path else found

    monkeypatch.setattr(operator, method, seeded)


def named(table: dict[str, dict[str, Any]]) -> list[Any]:
    """Return the rows of a table as parameters with names: the model, and what is wrong."""
    return [
        pytest.param(name, fault, id=f"{name}: {what}")
        for name, faults in table.items()
        for what, fault in faults.items()
    ]


def is_wrong(name: str, description: Description) -> bool:
    """Tell whether some subnet does not run, or differs from the reference, if nothing is proved."""
    (model, x), right = seeded_model(name), described(name)
    try:
        supernet = subnetact.insert_(copy.deepcopy(model), description.space, description.elastic).eval()
    except SubnetActError:
        return True
    for spec in (supernet.space.smallest(), *supernet.space.sample(0, RANDOM_SUBNETS)):
        expected = reference(model, right, spec)(x)
        try:
            found = supernet(x, subnet=spec)
        except (RuntimeError, SubnetActError):
            return True
        if found.shape != expected.shape:
            return True
        if not bool((found - expected).abs().max() <= DIFFERENT * expected.abs().max()):
            return True
    return False


def is_refused(name: str, description: Callable[[], Description]) -> None:
    model, x = seeded_model(name)
    expected = model(x)
    with pytest.raises(SubnetActError):
        subnetact.insert_(model, description(), example=x)
    assert torch.equal(model(x), expected), "a model that is refused is not changed"


@pytest.mark.parametrize("name", MODELS)
def test_models_without_a_fault_are_accepted(name: str) -> None:
    (model, x), description = seeded_model(name), described(name)
    plain = copy.deepcopy(model)
    supernet = subnetact.insert_(model, description, example=x)
    smallest, largest = supernet.space.smallest(), supernet.space.largest()
    with torch.no_grad():
        for spec in (smallest, largest, *supernet.space.sample(0, RANDOM_SUBNETS)):
            expected = reference(plain, description, spec)(x)
            torch.testing.assert_close(supernet(x, subnet=spec), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(supernet(x, subnet=largest), plain(x), rtol=1e-5, atol=1e-5)
        gap = (supernet(x, subnet=smallest) - plain(x)).abs().max()
        assert gap > DIFFERENT * plain(x).abs().max(), "a subnet must not be the model"


@torch.no_grad()
@pytest.mark.parametrize(("name", "edit"), named(IN_DESCRIPTIONS))
def test_a_fault_in_a_description_is_refused(name: str, edit: Edit) -> None:
    try:
        wrong = is_wrong(name, edit(described(name)))
    except SubnetActError:
        wrong = True
    assert wrong, "this is no fault"
    is_refused(name, lambda: edit(described(name)))


@torch.no_grad()
@pytest.mark.parametrize(("name", "fault"), named(IN_RULES))
def test_a_fault_in_a_rule_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: tuple[Any, ...]
) -> None:
    right = described(name)
    seed(monkeypatch, name, *fault)
    assert is_wrong(name, right), "this is no fault"
    is_refused(name, lambda: right)
