"""Description: what can be elastic in a model, in one form for everything that finds it.

A source, which is the analysis of a traced graph or a declaration of the model, says what it has found in
groups and stages:

- A `Group` is one independent size: the hidden channels of a block, the neurons of a feed-forward network,
  the heads of an attention. Its members are the parts of modules that follow the size, each a whole number
  of times: an attention with 64 features per head has members that follow its heads 64 times.
- A `Stage` is a run of blocks that a subnet may skip, in the order of their importance.

A `Description` makes the search space and the elastic description for `insert_` from them. Every group and
every stage is one slot of the space, in the axis of its kind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from subnetact import operators
from subnetact.errors import FileFormatError, InsertError
from subnetact.files.documents import DocumentFormat, parse_json
from subnetact.insertion.layer_vocabulary import LayerConfigReader, LayerConfigWriter, LayerVocabulary
from subnetact.operators import Elastic, LayerSelect, Operator
from subnetact.operators.segments import Segments
from subnetact.space import Axis, AxisValues, Slot, SubnetSpace
from subnetact.spec import Value

__all__ = ["AXES", "Description", "Group", "Member", "Stage", "sizes_of_choices"]

AXES = ("depth", "width", "stream", "ffn", "heads")
"""The kinds of elastic sizes, in the order of the axes of the space.

depth: the kept blocks of a stage. width: channels that one layer computes, inside a block for example.
stream: channels that several layers share because their outputs are added, as in a residual stream, or
concatenated, as in a dense block. ffn: the neurons between linear layers. heads: the heads of an attention.
"""

FORMAT = DocumentFormat(
    noun="a description of an elastic model",
    kind="subnetact.description",
    schema=1,
    next_step="write one with Description.to_json",
)


@dataclass(frozen=True)
class Member:
    """A part of a module that follows the size of a group.

    Attributes:
        module: the name of the module in the model.
        part: the part of the operator, `out` of a WeightSlice for example, or the name of an attribute.
        operator: the operator that replaces the module.
        multiple: how often the part follows the size: the rows per head for a group of heads.
        start: if the part consists of several segments, the position in the full part at which the segment
            of this group begins. It is as long as the full size of the group times `multiple`, and a subnet
            keeps the beginning of it. If None, the part consists of this group alone.
        total: the full size of a part that consists of several segments. If None, it ends with its last
            segment that belongs to a group.
    """

    module: str
    part: str
    operator: type[Operator]
    multiple: int = 1
    start: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class Group:
    """One independent size of a model, and everything that follows it.

    Attributes:
        name: the name of the slot and of the dimension, "layer1.0.conv1.width" for example.
        axis: the kind of size, one of `AXES` except "depth".
        full: the size in the model.
        members: the parts of modules that follow the size.
        unit: every size is a multiple of this number.
        sizes: choice of the slot -> size, from the smallest to the full one. A choice is a share of the full
            size (0.5 for example) or a size.
    """

    name: str
    axis: str
    full: int
    members: tuple[Member, ...]
    unit: int = 1
    sizes: Mapping[float, int] = field(default_factory=dict)

    def dimension(self, member: Member) -> str:
        """Return the name of the dimension that a member follows."""
        return self.name if member.multiple == 1 else f"{self.name}*{member.multiple}"

    def dimensions(self, size: int) -> dict[str, int]:
        """Return the sizes of all dimensions of this group, for one size of the group."""
        return {self.name: size} | {self.dimension(m): size * m.multiple for m in self.members}


@dataclass(frozen=True)
class Stage:
    """Blocks of which a subnet keeps some; a skipped block is the identity.

    Attributes:
        name: the name of the slot, "layer1.depth" for example.
        blocks: the names of the blocks, the most important first. A subnet with n blocks keeps the first n.
        sizes: choice of the slot -> number of kept blocks, from the smallest to all blocks.
        axis: always "depth".
    """

    name: str
    blocks: tuple[str, ...]
    sizes: Mapping[float, int] = field(default_factory=dict)
    axis: str = "depth"

    @property
    def full(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    @property
    def unit(self) -> int:
        """The number of blocks by which sizes differ, which is 1."""
        return 1

    def dimensions(self, size: int) -> dict[str, int]:
        """Return, for every block, 1 if a subnet with `size` blocks keeps it and 0 if not."""
        return {f"{block}.keep": int(i < size) for i, block in enumerate(self.blocks)}


def sizes_of_choices(
    full: int,
    choices: Sequence[float],
    unit: int = 1,
    smallest: int | None = None,
    divisor: int | None = None,
) -> dict[float, int]:
    """Turn choices into sizes.

    Args:
        full: the full size.
        choices: shares of the full size, or sizes, in any order. If all of them are integers, they are sizes
            and must be multiples of `unit`. Otherwise they are shares from 0.0 to 1.0, which are rounded to
            multiples of `unit`, to the smaller one in case of a tie. The full size is added if it is missing.
        unit: see `choices`.
        smallest: the smallest size; if None, `unit`.
        divisor: a multiple of `unit`; if None, `unit`.

    Returns:
        Choice -> size, in ascending order of size.

    Raises:
        InsertError: a choice is no share between 0 and 1 and no size between `smallest` and `full`.
    """
    least = unit if smallest is None else smallest
    given: Any = choices
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InsertError(f"{choices!r} are no choices; give a list of shares (0.5) or of sizes ({full})")
    choices = list(choices)
    for choice in choices:
        if isinstance(choice, bool) or not isinstance(choice, int | float):
            raise InsertError(f"{choice!r} is not a choice; choose shares (0.5) or sizes ({full})")
    found: dict[float, int]
    if choices and all(isinstance(choice, int) for choice in choices):
        found = {int(size): int(size) for size in (*choices, full)}
        wrong = [size for size in found if not least <= size <= full or (size % unit and size != full)]
        allowed = f"sizes from {least} to {full}" + (f" in steps of {unit}" if unit > 1 else "")
    else:
        shares = sorted({*map(float, choices), 1.0})
        wrong = [share for share in shares if not 0 <= share <= 1]
        allowed = "shares from 0.0 to 1.0"
        step = divisor or unit
        rounded = {} if wrong else {s: math.ceil(s * full / step - 0.5) * step for s in shares}
        found = {share: min(full, max(least, size)) for share, size in rounded.items()} | {1.0: full}
    if wrong:
        raise InsertError(f"{wrong[0]!r} is not a choice; choose {allowed}")
    return dict(sorted(found.items()))


class Description:
    """What can be elastic in a model: groups of sizes and stages of blocks, with their choices.

    `describe` makes descriptions. A description prints as a table, can be edited, and is an argument of
    `insert_`. All methods that edit return a new description.

    Args:
        name: the name of the space.
        groups: the independent sizes.
        stages: the skippable blocks.
        refused: name of what cannot be elastic -> the reason.
        overrides: name of a module -> a hand-written entry of the elastic description, which replaces the
            found one. If an entry is None, the module stays as it is.
        vocabulary: how transformers names the sizes of the layers. The space then reads and writes
            `per_layer_config`. If None, its notation is the values of its axes.

    Attributes:
        name: as given.
        groups: as given, by name.
        stages: as given, by name.
        refused: as given.
        overrides: as given.
        vocabulary: as given.

    Raises:
        InsertError: two groups or stages have the same name, or a part of a module follows two groups.

    Example:
        >>> description = subnetact.describe(model, example=x)
        >>> print(description)
        >>> description = description.without("layer4.*").with_choices("conv1.width", [0.5, 1.0])
        >>> supernet = subnetact.insert_(model, description, example=x)
    """

    def __init__(
        self,
        name: str,
        groups: Iterable[Group] = (),
        stages: Iterable[Stage] = (),
        refused: Mapping[str, str] | None = None,
        overrides: Mapping[str, Elastic | None] | None = None,
        vocabulary: LayerVocabulary | None = None,
    ) -> None:
        found, kept = list(groups), list(stages)
        names = [group.name for group in found] + [stage.name for stage in kept]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise InsertError(f"{name}: two groups or stages are called {', '.join(twice)}")
        self.name = name
        self.groups = {group.name: group for group in found}
        self.stages = {stage.name: stage for stage in kept}
        self.refused = dict(refused or {})
        self.overrides = dict(overrides or {})
        self.vocabulary = vocabulary
        self._check_parts()

    @property
    def slots(self) -> dict[str, Group | Stage]:
        """All stages and groups by name, in the order of the axes of the space."""
        found: list[Group | Stage] = [*self.stages.values(), *self.groups.values()]
        return {slot.name: slot for axis in AXES for slot in found if slot.axis == axis}

    @property
    def space(self) -> SubnetSpace:
        """The search space: an axis per kind of size, and a slot per group and per stage."""
        slots = list(self.slots.values())
        axes = [
            Axis(axis, tuple(_slot(slot) for slot in slots if slot.axis == axis))
            for axis in AXES
            if any(slot.axis == axis for slot in slots)
        ]
        sizes, words = _Sizes(tuple(slots)), self.vocabulary
        if words is None:
            return SubnetSpace(self.name, axes, sizes)
        reader, writer = LayerConfigReader(words, tuple(slots)), LayerConfigWriter(words, tuple(slots))
        return SubnetSpace(self.name, axes, sizes, reader, writer)

    @property
    def elastic(self) -> dict[str, Elastic]:
        """The elastic description for `insert_`: name of a module -> operator, and what its parts follow."""
        found: dict[str, Elastic] = {}
        for module, members in self._members().items():
            operator = members[0][1].operator
            parts = list(dict.fromkeys(member.part for _, member in members))
            found[module] = Elastic(
                operator, {part: _followed([x for x in members if x[1].part == part]) for part in parts}
            )
        stacks: dict[str, dict[str, str]] = {}
        for stage in self.stages.values():
            for block in stage.blocks:
                stack, _, layer = block.rpartition(".")
                stacks.setdefault(stack, {})[layer] = f"{block}.keep"
        found |= {stack: LayerSelect.on(**follows) for stack, follows in stacks.items()}
        for module, entry in self.overrides.items():
            found.pop(module, None)
            if entry is not None:
                found[module] = entry
        return found

    # -- editing -----------------------------------------------------------------------------------

    def with_choices(self, pattern: str, choices: Sequence[float]) -> Description:
        """Return a description in which groups or stages have other choices.

        Args:
            pattern: a name, or a pattern of names with `*`, `?` and `[...]`; an axis also stands for all of
                its groups.
            choices: shares of the full size (floats) or sizes (integers).

        Raises:
            InsertError: no group or stage has such a name, or a choice is not legal for one of them.
        """
        names = self.matching(pattern)
        return self._edited(lambda slot: _resized(slot, choices) if slot.name in names else slot)

    def without(self, pattern: str, reason: str = "left out by the user") -> Description:
        """Return a description in which groups or stages keep their full size.

        Args:
            pattern: as for `with_choices`.
            reason: what `refused` says of them.

        Raises:
            InsertError: no group or stage has such a name.
        """
        names = self.matching(pattern)
        return self._edited(lambda slot: None if slot.name in names else slot, dict.fromkeys(names, reason))

    def merged(self, other: Description) -> Description:
        """Return a description with the groups and stages of another one added.

        Args:
            other: the other description; where both have a group or stage of a name, this one counts.
        """
        groups = {**self.groups, **other.groups}
        stages = {**self.stages, **other.stages}
        refused = {n: why for n, why in {**self.refused, **other.refused}.items() if n not in groups}
        overrides = {**self.overrides, **other.overrides}
        same = self.vocabulary if self.vocabulary == other.vocabulary else None
        return Description(self.name, groups.values(), stages.values(), refused, overrides, same)

    def override(self, elastic: Mapping[str, Elastic | None]) -> Description:
        """Return a description in which hand-written entries replace found ones.

        Args:
            elastic: name of a module -> operator, with the dimension that each of its parts follows. The
                dimensions are the names of groups. If an entry is None, the module stays as it is.

        Example:
            >>> description.override({"layer1.0.conv1": WeightSlice.on(out="layer1.0.conv1.width")})
        """
        overrides = {**self.overrides, **elastic}
        return Description(
            self.name,
            self.groups.values(),
            self.stages.values(),
            self.refused,
            overrides,
            self.vocabulary,
        )

    def matching(self, pattern: str) -> list[str]:
        """Return the names of the groups and stages that a pattern means.

        Args:
            pattern: a name, a pattern with `*`, `?` and `[...]`, or an axis.

        Raises:
            InsertError: there is none.
        """
        given: Any = pattern
        slots = self.slots.values() if isinstance(given, str) else ()
        names = [s.name for s in slots if pattern == s.axis or fnmatchcase(s.name, pattern)]
        if not names:
            raise InsertError(
                f"{self.name}: no group or stage matches {pattern!r}; it has {', '.join(self.slots)[:500]}"
            )
        return names

    # -- files -------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the description as a JSON document, which `from_json` reads."""
        return json.dumps({**FORMAT.header, **self._facts()}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Description:
        """Read what `to_json` wrote.

        Args:
            text: the JSON document.

        Returns:
            A description equal to the one that was written.

        Raises:
            FileFormatError: the text is not JSON, is another document, or is damaged.
        """
        try:
            document = parse_json(text)
        except ValueError as error:
            raise FileFormatError(f"the description is not JSON ({error}); {FORMAT.next_step}") from error
        FORMAT.check(document, "the description")
        with FORMAT.fields("the description", passing=(), damaged=(InsertError,)):
            return cls(
                _text(document["name"]),
                [_group(facts) for facts in document["groups"]],
                [
                    Stage(
                        _text(facts["name"]), tuple(map(_text, facts["blocks"])), _read_sizes(facts["sizes"])
                    )
                    for facts in document["stages"]
                ],
                {_text(name): _text(why) for name, why in document["refused"].items()},
                {module: _entry(facts) for module, facts in document["overrides"].items()},
                _vocabulary(document.get("vocabulary")),
            )

    def __str__(self) -> str:
        slots = list(self.slots.values())
        rows = [("name", "axis", "sizes", "members")]
        rows += [
            (
                slot.name,
                slot.axis,
                " ".join(map(str, dict.fromkeys(slot.sizes.values()))),
                ", ".join(slot.blocks)
                if isinstance(slot, Stage)
                else ", ".join(f"{m.module}.{m.part}" for m in slot.members),
            )
            for slot in slots
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        lines += [f"refused: {name}: {why}" for name, why in self.refused.items()]
        return "\n".join(lines)

    __repr__ = __str__

    # -- inner parts -------------------------------------------------------------------------------

    def _members(self) -> dict[str, list[tuple[Group, Member]]]:
        found: dict[str, list[tuple[Group, Member]]] = {}
        for group in self.groups.values():
            for member in group.members:
                found.setdefault(member.module, []).append((group, member))
        return found

    def _check_parts(self) -> None:
        for module, members in self._members().items():
            if len({member.operator for _, member in members}) > 1:
                raise InsertError(f"{self.name}: {module} gets several operators; give it one")
            whole = [member.part for _, member in members if member.start is None]
            for _, member in members:
                if whole.count(member.part) > 1 or (member.start is not None and member.part in whole):
                    raise InsertError(f"{self.name}: {module}.{member.part} follows several groups")

    def _edited(self, edit: Callable[[Any], Any], refused: Mapping[str, str] | None = None) -> Description:
        groups = [g for g in map(edit, self.groups.values()) if g is not None]
        stages = [s for s in map(edit, self.stages.values()) if s is not None]
        why = {**self.refused, **(refused or {})}
        return Description(self.name, groups, stages, why, self.overrides, self.vocabulary)

    def _facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "groups": [
                {
                    "name": g.name,
                    "axis": g.axis,
                    "full": g.full,
                    "unit": g.unit,
                    "sizes": list(g.sizes.items()),
                    "members": [
                        [m.module, m.part, m.operator.__name__, m.multiple, m.start, m.total]
                        for m in g.members
                    ],
                }
                for g in self.groups.values()
            ],
            "stages": [
                {"name": s.name, "blocks": list(s.blocks), "sizes": list(s.sizes.items())}
                for s in self.stages.values()
            ],
            "refused": self.refused,
            "overrides": {
                module: None if e is None else [e.operator.__name__, _written(e)]
                for module, e in self.overrides.items()
            },
            "vocabulary": None if self.vocabulary is None else asdict(self.vocabulary),
        }


class _Sizes:
    """Axis values -> sizes. It is an object and not a closure, so that spaces can be pickled."""

    def __init__(self, slots: tuple[Group | Stage, ...]) -> None:
        self.slots = slots

    def __call__(self, values: AxisValues) -> dict[str, int]:
        sizes: dict[str, int] = {}
        position = dict.fromkeys(AXES, 0)
        for slot in self.slots:
            choice = values[slot.axis][position[slot.axis]]
            position[slot.axis] += 1
            sizes.update(slot.dimensions(slot.sizes[choice]))
        return sizes


def _slot(slot: Group | Stage) -> Slot:
    """Return the slot of a group; choices that mean the same size are aliases of the first one."""
    first = {slot.sizes[choice]: choice for choice in sorted(slot.sizes, reverse=True)}
    full = max(slot.sizes)
    first[slot.sizes[full]] = full
    aliases: dict[Value, Value] = {c: first[size] for c, size in slot.sizes.items() if first[size] != c}
    return Slot(slot.name, tuple(first[size] for size in sorted(first)), aliases=aliases)


def _followed(members: list[tuple[Group, Member]]) -> str | Segments:
    """Return what a part follows: the name of a dimension, or segments, of which some are always whole."""
    group, member = members[0]
    if member.start is None:
        return group.dimension(member)
    segments: list[tuple[str | None, int]] = []
    end = 0
    for group, member in sorted(members, key=lambda pair: pair[1].start or 0):
        start, length = member.start or 0, group.full * member.multiple
        if start < end:
            raise InsertError(f"{member.module}.{member.part}: segments of {group.name} and another overlap")
        segments += [(None, start - end)] if start > end else []
        segments.append((group.dimension(member), length))
        end = start + length
    rest = max((m.total or 0) for _, m in members) - end
    return Segments(*segments, *([(None, rest)] if rest > 0 else []))


def _resized(slot: Group | Stage, choices: Sequence[float]) -> Group | Stage:
    smallest = 0 if isinstance(slot, Stage) else None
    divisor = math.lcm(slot.unit, 8) if isinstance(slot, Group) and slot.full >= 32 else None
    try:
        return replace(slot, sizes=sizes_of_choices(slot.full, choices, slot.unit, smallest, divisor))
    except InsertError as error:
        raise InsertError(f"{slot.name}: {error}") from None


def _operator(name: str) -> type[Operator]:
    found = getattr(operators, name, None)
    if not (isinstance(found, type) and issubclass(found, Operator)):
        raise InsertError(f"{name!r} is no operator")
    return found


def _read_sizes(pairs: Iterable[Sequence[Any]]) -> dict[float, int]:
    found = {choice: int(size) for choice, size in pairs}
    if not found or not all(isinstance(choice, int | float) and math.isfinite(choice) for choice in found):
        raise ValueError(f"sizes: {pairs!r} are no pairs of a choice and a size")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is no positive integer")
    return value


def _vocabulary(facts: Mapping[str, Any] | None) -> LayerVocabulary | None:
    if facts is None:
        return None
    fields = [None if facts[f] is None else (str(facts[f][0]), int(facts[f][1])) for f in _FIELDS]
    return LayerVocabulary(str(facts["stack"]), int(facts["layers"]), *fields)


_FIELDS = ("neurons", "queries", "pairs")


def _group(facts: Mapping[str, Any]) -> Group:
    members = tuple(
        Member(
            _text(m[0]), _text(m[1]), _operator(_text(m[2])), _count(m[3]), _position(m[4]), _position(m[5])
        )
        for m in facts["members"]
    )
    return Group(
        _text(facts["name"]),
        _text(facts["axis"]),
        _count(facts["full"]),
        members,
        _count(facts["unit"]),
        _read_sizes(facts["sizes"]),
    )


def _position(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"{value!r} is no position")
    return value


def _entry(facts: Any) -> Elastic | None:
    if facts is None:
        return None
    follows = {p: f if isinstance(f, str) else Segments.from_json(f) for p, f in facts[1].items()}
    return Elastic(_operator(facts[0]), follows)


def _written(entry: Elastic) -> dict[str, Any]:
    return {part: f.to_json() if isinstance(f, Segments) else f for part, f in entry.follows.items()}
