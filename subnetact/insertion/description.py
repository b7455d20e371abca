"""Description: what can be elastic in a model, in one form for everything that finds it.

The analysis of a traced graph and the declarations of a model say what they found in `Group`s, each one
independent size, and `DepthStage`s, each a run of blocks that a subnet may skip. A `Description` makes the
search space and the elastic description for `insert_` from them.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from types import NoneType, UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from subnetact import operators
from subnetact.errors import FileFormatError, InsertError
from subnetact.files.documents import DocumentFormat
from subnetact.insertion.layer_vocabulary import LayerConfigs, LayerVocabulary
from subnetact.operators import Elastic, LayerSelect, Operator
from subnetact.operators.segments import Segments
from subnetact.operators.vocabulary import EXPERT_GROUPS
from subnetact.space import Axis, AxisValues, Slot, SubnetSpace
from subnetact.spec import Value, grouped
from subnetact.supernet.proved_inputs import ProvedInputs

AXES = ("depth", "width", "stream", "ffn", "heads", "pool", "experts")
"""The kinds of elastic sizes, in the order of the axes of the space.

depth: the kept blocks of a stage. width: channels that one layer computes, inside a block for example.
stream: channels that several layers share because their outputs are added, as in a residual stream, or
concatenated, as in a dense block. ffn: the neurons between linear layers. heads: the heads of an attention,
or those per group of a state space. pool: the experts that a mixture of experts has. experts: those that it
visits per token.
"""

FORMAT = DocumentFormat(
    "a description of an elastic model", "subnetact.description", 1, "write one with Description.to_json"
)


@dataclass(frozen=True)
class Member:
    """A part of a module that follows the size of a group.

    Attributes:
        module: the name of the module in the model.
        part: the part of the operator, `out` of a WeightSlice for example, or the name of an attribute.
        operator: the operator that replaces the module.
        multiple: how often the part follows the size: the rows per head for a group of heads.
        start: where the segment of this group, of the full size times `multiple`, begins in a part of several
            segments. A subnet keeps the beginning of it. If None, the part consists of this group alone.
        total: the full size of a part of several segments. If None, it ends with its last segment.
    """

    module: str
    part: str
    operator: type[Operator]
    multiple: int = 1
    start: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class Group:
    """One independent size of a model, such as the heads of an attention, and everything that follows it.

    Attributes:
        name: the name of the slot and of the dimension, "layer1.0.conv1.width" for example.
        axis: the kind of size, one of `AXES` except "depth".
        full: the size in the model.
        members: the parts of modules that follow the size.
        unit: every size is a multiple of this number.
        sizes: choice of the slot (a share of the full size, or a size) -> size, ascending.
        least: no size is smaller. A pool has at least the experts that the model visits per token.
    """

    name: str
    axis: str
    full: int
    members: tuple[Member, ...]
    unit: int = 1
    sizes: Mapping[float, int] = field(default_factory=dict)
    least: int = 1

    def dimension(self, member: Member) -> str:
        """Return the name of the dimension that a member follows."""
        return self.name if member.multiple == 1 else f"{self.name}*{member.multiple}"

    def dimensions(self, size: int) -> dict[str, int]:
        """Return the sizes of all dimensions of this group, for one size of the group."""
        return {self.name: size} | {self.dimension(m): size * m.multiple for m in self.members}


@dataclass(frozen=True)
class DepthStage:
    """Blocks of which a subnet keeps some; a skipped block is the identity.

    Attributes:
        name: the name of the slot, "layer1.depth" for example.
        blocks: the names of the blocks, the most important first. A subnet with n blocks keeps the first n.
        sizes: choice of the slot -> number of kept blocks, from the smallest to all blocks.
    """

    name: str
    blocks: tuple[str, ...]
    sizes: Mapping[float, int] = field(default_factory=dict)

    axis: ClassVar[str] = "depth"

    @property
    def full(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    def dimensions(self, size: int) -> dict[str, int]:
        """Return, for every block, 1 if a subnet with `size` blocks keeps it and 0 if not."""
        return {f"{block}.keep": int(i < size) for i, block in enumerate(self.blocks)}


def sizes_of_choices(
    full: int, choices: Sequence[float], unit: int = 1, least: int | None = None, divisor: int | None = None
) -> dict[float, int]:
    """Return choice -> size, ascending, with the full size; choices are sizes if all are integers."""
    least = unit if least is None else least
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
        shares, step = {*map(float, choices), 1.0}, divisor or unit
        wrong = sorted(share for share in shares if not 0 <= share <= 1)
        allowed = "shares from 0.0 to 1.0"
        rounded = {} if wrong else {s: math.ceil(s * full / step - 0.5) * step for s in shares}
        found = {share: min(full, max(least, size)) for share, size in rounded.items()} | {1.0: full}
    if wrong:
        raise InsertError(f"{wrong[0]!r} is not a choice; choose {allowed}")
    return dict(sorted(found.items()))


def without_numbers(name: str) -> str:
    """Return what the names of the members of a list of modules have in common."""
    return re.sub(r"\d+", "#", name)


def _texts(names: Iterable[str], ordered: bool = False) -> dict[str, list[str]]:
    """Return names by the text that stands for them: `layers.{0..29}.mlp` for those of 30 layers.

    Names that differ in one number have one text. Its numbers ascend, unless the names are `ordered`.
    """
    rows: dict[tuple[str, ...], list[str]] = {tuple(re.split(r"(\d+)", name)): [name] for name in names}
    for at in range(max(map(len, rows), default=0) - 2, 0, -2):
        alike: dict[Any, tuple[list[int], list[str]]] = {}
        for row, own in rows.items():
            numbers, together = alike.setdefault((row[:at], row[at + 1 :]), ([], []))
            numbers += map(int, row[at : at + 1])  # none if the name is shorter
            together += own
        rows = {(*k[0], *_listed(numbers, ordered), *k[1]): own for k, (numbers, own) in alike.items()}
    return {"".join(row): own for row, own in rows.items()}


def _listed(numbers: list[int], ordered: bool) -> Iterator[str]:
    """Yield a text for numbers, in which those that follow one another are a range: {0..3,7}."""
    steps = groupby(enumerate(numbers if ordered else sorted(numbers)), lambda item: item[1] - item[0])
    runs = [[str(number) for _, number in step] for _, step in steps]
    text = ",".join("..".join(dict.fromkeys((run[0], run[-1]))) for run in runs)
    yield from [f"{{{text}}}" if len(numbers) > 1 else text] * bool(numbers)


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

    The attributes are the arguments; `groups` and `stages` are dictionaries by name.

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
        stages: Iterable[DepthStage] = (),
        refused: Mapping[str, str] | None = None,
        overrides: Mapping[str, Elastic | None] | None = None,
        vocabulary: LayerVocabulary | None = None,
    ) -> None:
        found, kept = list(groups), list(stages)
        names = Counter([group.name for group in found] + [stage.name for stage in kept])
        if twice := sorted(name for name, count in names.items() if count > 1):
            raise InsertError(f"{name}: two groups or stages are called {', '.join(twice)}")
        self.name = name
        self.groups = {group.name: group for group in found}
        self.stages = {stage.name: stage for stage in kept}
        self.refused = dict(refused or {})
        self.overrides = dict(overrides or {})
        self.vocabulary = vocabulary
        self.proved: ProvedInputs | None = None  # of this description as it is, and in no file
        for module, members in self._members().items():
            if len({member.operator for _, member in members}) > 1:
                raise InsertError(f"{name}: {module} gets several operators; give it one")
            whole = [member.part for _, member in members if member.start is None]
            for _, member in members:
                if whole.count(member.part) > 1 or (member.start is not None and member.part in whole):
                    raise InsertError(f"{name}: {module}.{member.part} follows several groups")
        for group in found:
            if (size := min(group.sizes.values(), default=group.least)) < group.least:
                allowed = f"choose from {group.least} to {group.full}"
                raise InsertError(f"{group.name}: {size} is no size; {allowed}")

    @property
    def slots(self) -> dict[str, Group | DepthStage]:
        """All stages and groups by name, in the order of the axes of the space."""
        found: list[Group | DepthStage] = [*self.stages.values(), *self.groups.values()]
        return {slot.name: slot for axis in AXES for slot in found if slot.axis == axis}

    @property
    def space(self) -> SubnetSpace:
        """The search space: an axis per kind of size, and a slot per group and per stage."""
        own, words = tuple(self.slots.values()), self.vocabulary
        axes = [Axis(axis, tuple(map(_slot, slots))) for axis, slots in groupby(own, lambda slot: slot.axis)]
        sizes = partial(_sizes, own)  # no closure, so that spaces can be pickled
        if words is None:
            return SubnetSpace(self.name, axes, sizes)
        configs = LayerConfigs(words, own)
        return SubnetSpace(self.name, axes, sizes, configs.read, configs.write)

    @property
    def elastic(self) -> dict[str, Elastic]:
        """The elastic description for `insert_`: name of a module -> operator, and what its parts follow."""
        found: dict[str, Elastic] = {}
        for module, members in self._members().items():
            parts = grouped((member.part, (group, member)) for group, member in members)
            found[module] = Elastic(members[0][1].operator, {p: _followed(own) for p, own in parts.items()})
        blocks = [(block, block.rpartition(".")) for stage in self.stages.values() for block in stage.blocks]
        stacks = grouped((stack, (layer, f"{block}.keep")) for block, (stack, _, layer) in blocks)
        found |= {stack: LayerSelect.on(**dict(follows)) for stack, follows in stacks.items()}
        return {n: entry for n, entry in {**found, **self.overrides}.items() if entry is not None}

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
        return self._edited(lambda slot: _resized(slot, choices) if slot.name in names else slot, {})

    def without(self, pattern: str, reason: str = "left out by the user") -> Description:
        """Return a description in which groups or stages keep their full size.

        Args:
            pattern: as for `with_choices`.
            reason: what `refused` says of them.

        Raises:
            InsertError: no group or stage has such a name.
        """
        refused = dict.fromkeys(self.matching(pattern), reason)
        return self._edited(lambda slot: None if slot.name in refused else slot, refused)

    def override(self, elastic: Mapping[str, Elastic | None]) -> Description:
        """Return a description in which hand-written entries replace found ones.

        Args:
            elastic: name of a module -> operator, with the dimension that each of its parts follows. The
                dimensions are the names of groups. If an entry is None, the module stays as it is.

        Example:
            >>> description.override({"layer1.0.conv1": WeightSlice.on(out="layer1.0.conv1.width")})
        """
        slots, overrides = (self.groups.values(), self.stages.values()), {**self.overrides, **elastic}
        return Description(self.name, *slots, self.refused, overrides, self.vocabulary)

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
            known = ", ".join(self.slots)[:500]
            raise InsertError(f"{self.name}: no group or stage matches {pattern!r}; it has {known}")
        return names

    # -- files -------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the description as a JSON document, which `from_json` reads.

        An operator of your own is named by its module and class.

        Raises:
            InsertError: an operator is not found by that name, because its class was defined inside a
                function, or again.
            FileFormatError: `from_json` could not read the document.
        """
        slots = tuple(self.groups.values()), tuple(self.stages.values())
        facts = asdict(_Facts(self.name, *slots, self.refused, self.overrides, self.vocabulary))
        text = json.dumps(FORMAT.header | facts, indent=1, allow_nan=False, default=_name_of)
        self.from_json(text)  # What could not be read is not written.
        return text

    @classmethod
    def from_json(cls, text: str | bytes) -> Description:
        """Read what `to_json` wrote.

        Args:
            text: the JSON document.

        Returns:
            A description equal to the one that was written.

        Raises:
            FileFormatError: the text is not JSON, is another document, or is damaged; or it names an operator
                whose class is not imported, which the message says.
        """
        document = FORMAT.parsed("the description", text)
        with FORMAT.fields("the description", passing=(), damaged=(InsertError,)):
            found = cls(**vars(_decoded(_Facts, document)))
            for group in found.groups.values():
                if not all((group.full, group.unit, *(member.multiple for member in group.members))):
                    raise ValueError(f"{group.name} has a size of zero")
            if not all(slot.sizes for slot in found.slots.values()):
                raise ValueError("a group or stage has no sizes")
        return found

    def __str__(self) -> str:
        tables: dict[Any, dict[str, Sequence[str]]] = {}
        for slot in self.slots.values():
            sizes = " ".join(map(str, dict.fromkeys(slot.sizes.values())))
            parts = [f"{m.module}.{m.part}" for m in slot.members] if isinstance(slot, Group) else slot.blocks
            tables.setdefault((slot.axis, sizes, *map(without_numbers, parts)), {})[slot.name] = parts
        rows = [("name", "axis", "sizes", "members")]
        for (axis, sizes, *_), own in tables.items():
            for name, names in _texts(own).items():
                parts = [*_texts((part for n in names for part in own[n]), ordered=axis == "depth")]
                rows.append((name, axis, sizes, ", ".join(parts)))
        *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = ["  ".join(map(str.ljust, row, (*widths, 0))) for row in rows]
        return "\n".join(lines + [f"refused: {refusal}" for refusal in self.refusals()])

    __repr__ = __str__

    def refusals(self) -> list[str]:
        """Return what cannot be elastic and why, each reason once."""
        alike: dict[tuple[str, str], dict[str, str]] = {}
        for name, why in self.refused.items():
            alike.setdefault((without_numbers(name), without_numbers(why)), {})[name] = why
        texts: dict[str, list[str]] = {}
        for own in alike.values():
            texts.setdefault("; ".join(_texts(own.values())), []).extend(_texts(own))
        return [f"{', '.join(names)}: {why}" for why, names in texts.items()]

    # -- inner parts -------------------------------------------------------------------------------

    def _members(self) -> dict[str, list[tuple[Group, Member]]]:
        return grouped((m.module, (group, m)) for group in self.groups.values() for m in group.members)

    def _edited(self, edit: Callable[[Any], Any], refused: dict[str, str]) -> Description:
        groups, stages = (filter(None, map(edit, own.values())) for own in (self.groups, self.stages))
        why = self.refused | refused
        return Description(self.name, groups, stages, why, self.overrides, self.vocabulary)


def _sizes(slots: tuple[Group | DepthStage, ...], values: AxisValues) -> dict[str, int]:
    """Return the sizes that some axis values mean."""
    sizes: dict[str, int] = {}
    choices = {axis: iter(chosen) for axis, chosen in values.items()}
    for slot in slots:
        sizes.update(slot.dimensions(slot.sizes[next(choices[slot.axis])]))
    return sizes


def _slot(slot: Group | DepthStage) -> Slot:
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


def _resized(slot: Group | DepthStage, choices: Sequence[float]) -> Group | DepthStage:
    unit, least = (1, 0) if isinstance(slot, DepthStage) else (slot.unit, max(slot.unit, slot.least))
    divisor = math.lcm(unit, 8) if isinstance(slot, Group) and slot.full >= 32 else unit
    try:
        return replace(slot, sizes=sizes_of_choices(slot.full, choices, unit, least, divisor))
    except InsertError as error:
        grouped = any(m.part in EXPERT_GROUPS for m in getattr(slot, "members", ()))
        counted = " groups of experts" if grouped else "; heads with one key count as one"
        raise InsertError(f"{slot.name}: {error}{counted * (grouped or slot.axis == 'heads')}") from None


@dataclass(frozen=True)
class _Facts:
    """What a document says; its fields are the arguments of `Description`."""

    name: str
    groups: tuple[Group, ...]
    stages: tuple[DepthStage, ...]
    refused: Mapping[str, str]
    overrides: Mapping[str, Elastic | None]
    vocabulary: LayerVocabulary | None


def _decoded(kind: Any, value: Any) -> Any:
    """Return what a JSON document says of a value of a type; whole numbers are not negative."""
    args, home = get_args(kind), get_origin(kind)
    if isinstance(kind, UnionType):  # something or None, or a name or segments
        if value is None and NoneType in args:
            return None
        return _decoded(Segments if Segments in args and not isinstance(value, str) else args[0], value)
    if home is type:
        return _operator(value)
    if home is tuple:
        kinds = args[:1] * len(value) if Ellipsis in args else args
        return tuple(_decoded(inner, item) for inner, item in zip(kinds, value, strict=True))
    if home is Mapping:
        return {_decoded(args[0], name): _decoded(args[1], item) for name, item in value.items()}
    if kind is Segments:
        return Segments(*value["segments"])
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{part.name: _decoded(hints[part.name], value[part.name]) for part in fields(kind)})
    if kind is float:  # a choice, which is the name of its size
        value = json.loads(value)
        fits = type(value) in (int, float) and math.isfinite(value)
    else:
        fits = type(value) is kind and (kind is not int or value >= 0)
    if not fits:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value


def _named(name: str) -> Any:
    """Return what a document calls `name`, "module:class" from elsewhere; it imports and runs nothing."""
    module, _, path = name.rpartition(":")
    found: Any = sys.modules.get(module) if module else operators
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _name_of(operator: type[Operator]) -> str:
    """Return the name by which whoever reads a document finds an operator."""
    names = operator.__name__, f"{operator.__module__}:{operator.__qualname__}"
    for name in names:
        if _named(name) is operator:
            return name
    raise InsertError(
        f"{names[1]}: a file cannot name this operator, as another class or none is found there; define it "
        "once, at the top of a module"
    )


def _operator(name: str) -> type[Operator]:
    found = _named(name)
    if not (isinstance(found, type) and issubclass(found, Operator)):
        raise FileFormatError(
            f"the description: damaged, or made with a class that is not imported: there is no operator "
            f"{name!r}; import the module before the colon, which must have the class, and read again"
        )
    return found
