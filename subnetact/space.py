"""SubnetSpace: the search space of a supernet, with its axes, their choices and the sizes that they mean."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, TypeAlias, overload

import numpy as np

from subnetact.errors import ForeignSpec, IllegalChoice, SpecError
from subnetact.spec import FLOAT32, PRECISION, PRECISIONS, SubnetSpec, Value, shown

__all__ = ["Axis", "SizeRow", "Slot", "SubnetSpace", "UsedWhen", "make_divisible"]

SizeRow: TypeAlias = tuple[int, ...]
"""The size row of a subnet: one size per dimension, in the order of `SubnetSpace.dimensions`."""

HASHED_WHOLE = 1000
"""The most subnets of a space of which all are hashed for its id."""
HASHED_SAMPLE = 64
"""The random subnets that are hashed for the id of a larger space."""

_BITS = f"{PRECISION}.bits"
"""The dimension of the axis of precisions."""

AxisValues: TypeAlias = Mapping[str, tuple[Any, ...]]
"""The values of every axis, one per slot. A slot that the subnet does not use holds None."""

Rng: TypeAlias = random.Random | np.random.Generator
Place: TypeAlias = tuple[str, int]
"""Where a slot is: the name of its axis, and its position there."""


def make_divisible(value: float, divisor: int = 8, minimum: int | None = None) -> int:
    """Return the multiple of `divisor` nearest to a `value`, or the next one if that is below 90 % of it.

    The result is at least `minimum`; if None, `divisor`.

    Source:
        `make_divisible` in ofa/utils/pytorch_modules.py.
    """
    rounded = max(divisor if minimum is None else minimum, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


@dataclass(frozen=True)
class UsedWhen:
    """The condition under which a subnet uses a slot: another slot takes one of certain values.

    Attributes:
        axis: the axis of the other slot.
        slot: the position of the other slot in its axis. That slot must have no condition itself.
        values: the choices of the other slot with which the conditional slot is used.
    """

    axis: str
    slot: int
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Slot:
    """One place of an axis where a subnet takes one choice.

    Attributes:
        name: the name for messages, "stage2" for example.
        choices: the legal values, from the smallest network to the largest.
        used_when: the condition under which subnets use the slot. If None, every subnet uses it.
        aliases: other accepted spellings of values, each with the choice that it means.
    """

    name: str
    choices: tuple[Value, ...]
    used_when: UsedWhen | None = None
    aliases: Mapping[Value, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Axis:
    """One kind of choice, such as depth, expansion ratio, width or kernel size.

    Attributes:
        name: the name of the axis.
        slots: the places where a subnet takes a choice of this kind.
    """

    name: str
    slots: tuple[Slot, ...]

    @classmethod
    def uniform(cls, name: str, slots: Sequence[str], choices: Sequence[Value]) -> Axis:
        """Return an axis whose slots are used by every subnet and have the same choices.

        Args:
            name: the name of the axis.
            slots: the names of the slots, of stages or blocks for example.
            choices: the legal values of every slot, from the smallest network to the largest.

        Raises:
            SpecError: `slots` or `choices` is one string instead of a list.

        Example:
            >>> Axis.uniform("width", ["stage1", "stage2"], [0.5, 1.0])
        """
        for what, given in (("slots", slots), ("choices", choices)):
            if isinstance(given, str):
                raise SpecError(f"{name}: {what} is the string {given!r}; give a list, [{given!r}]")
        return cls(name, tuple(Slot(slot, tuple(choices)) for slot in slots))


class SubnetSpace:
    """All subnets of a supernet.

    Args:
        name: the name of the family, or any name for an own network.
        axes: the kinds of choices.
        resolve: a function from axis values (axis -> one value per slot, None where the subnet does not use
            the slot) to sizes (dimension of the elastic description -> whole number). Whether a layer is
            kept is a dimension of size 1 or 0. All subnets must give the same dimensions in the same order,
            and the largest subnet must give the largest sizes.
        parse: a function from the family's own notation to axis values. If None, `parse` takes axis values.
        format: the inverse of `parse`. If None, `format` returns axis values.

    Attributes:
        name: as given.
        axes: as given.
        dimensions: the names of the dimensions, in the order of size rows.
        id: the name and a hash of the axes, the dimensions and the sizes of all subnets of a small space, or
            of a fixed sample of a large one in which every choice occurs. Specifications and tables carry it.

    Raises:
        SpecError: the axes contradict themselves, an axis has the name `precision`, a choice is a truth
            value, or `resolve` gives a subnet that is hashed a size that is not a whole number or other
            dimensions.

    Example:
        >>> widths = Axis.uniform("width", ["stage1", "stage2"], [0.5, 1.0])
        >>> def resolve(values):
        ...     return {f"width{i}": int(64 * share) for i, share in enumerate(values["width"])}
        >>> space = SubnetSpace("my_network", [widths], resolve)
        >>> space.spec(width=[0.5, 1.0]).key
        'width=0.5,1.0'
    """

    def __init__(
        self,
        name: str,
        axes: Sequence[Axis],
        resolve: Callable[[AxisValues], Mapping[str, int]],
        parse: Callable[[Any], Mapping[str, Any]] | None = None,
        format: Callable[[AxisValues], Any] | None = None,
    ) -> None:
        self.name = name
        self.axes = tuple(axes)
        self._resolve = resolve
        self._parse = parse
        self._format = format
        self.id = name
        self._check_axes()
        self.dimensions: tuple[str, ...] = tuple(self._sizes(dict(self.largest().values)))
        described = [
            [*place, slot.choices, [w.axis, w.slot, w.values] if (w := slot.used_when) else 0]
            for place, slot in self._slots()
        ]
        digest = hashlib.sha256(json.dumps([described, self.dimensions]).encode())
        for spec in self._hashed():
            digest.update(json.dumps(self._sizes_of(spec)).encode())
        self.id = f"{name}-{digest.hexdigest()[:12]}"

    @cached_property
    def resolve(self) -> Callable[[SubnetSpec], SizeRow]:
        """The function that returns the size row of a specification, one size per dimension.

        It raises `SpecError` if the specification is of another space. The last 4,096 results are cached.
        """
        return lru_cache(maxsize=4096)(lambda spec: self._sizes_of(self.check(spec)))

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickle take along; pickle needs functions of the top level of a module."""
        return {key: v for key, v in self.__dict__.items() if key != "resolve"}

    def with_precision(self, *precisions: str) -> SubnetSpace:
        """Return this space with one more axis, `precision`, and one more dimension, its bits.

        `Supernet.enable_precision` uses it. It has the same id, and specifications of this space are
        specifications of it at `float32`.

        Args:
            precisions: `int8` or `bfloat16`, or both. `float32` is always among the choices.

        Raises:
            SpecError: a precision is unknown, none is given, or this space has an axis of precisions.
        """
        unknown = [name for name in precisions if name not in PRECISIONS]
        if unknown or not set(precisions) - {FLOAT32}:
            got = repr(unknown[0]) if unknown else "none but float32" if precisions else "none"
            raise SpecError(f"{self.name}: precisions are {', '.join(PRECISIONS)}, got {got}; give 'int8'")
        if self._precision is not None:
            raise SpecError(f"{self.name}: the space has an axis {PRECISION!r} already; enable all at once")
        choices = tuple(name for name in PRECISIONS if name in (*precisions, FLOAT32))
        extended = copy(self)
        extended.axes = (*self.axes, Axis.uniform(PRECISION, ["network"], choices))
        extended.dimensions = (*self.dimensions, _BITS)
        return extended

    def distinct(self, specs: Iterable[SubnetSpec], what: str) -> list[SubnetSpec]:
        """Return the canonical forms of `specs`, one or more; `what` needs them, in messages.

        Raises:
            SpecError: there is no specification, one occurs twice, or one is not of this space.
        """
        given: Any = specs
        if isinstance(given, SubnetSpec | str) or not isinstance(given, Iterable):
            kind = type(given).__name__
            raise SpecError(f"{what} takes a list of specifications, got {kind}; write [spec]")
        found = [self.check(spec) for spec in given]
        if not found or len(set(found)) < len(found):
            got = next((f"{spec} twice" for spec in found if found.count(spec) > 1), "none")
            raise SpecError(f"{what} needs distinct subnets, at least one; got {got}")
        return found

    def at_precision(self, spec: SubnetSpec, precision: str) -> SubnetSpec:
        """Return a subnet at another precision.

        Args:
            spec: a subnet of this space.
            precision: `float32`, `int8` or `bfloat16`, if it is a choice of this space.

        Raises:
            SpecError: the specification is not of this space, or the space does not have the precision.
        """
        spec = self.check(spec).base
        if precision == FLOAT32:
            return spec
        if self._precision is None:
            raise SpecError(
                f"{self.name}: subnets are float32 only, got {precision!r}; call "
                f"supernet.enable_precision({precision!r}) first"
            )
        return self.spec(**dict(spec.values), **{PRECISION: precision})

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis.name}[{len(axis.slots)}]" for axis in self.axes)
        return f"SubnetSpace({self.name}: {axes}; {self.size():.3g} subnets)"

    # -- making specifications -------------------------------------------------------------------

    def spec(self, **values: Any) -> SubnetSpec:
        """Return the specification of a subnet, in its canonical form.

        Args:
            values: axis -> a list of one value per slot, or one value for every slot. Values of slots that
                the subnet does not use are ignored. Without `precision` the subnet is float32.

        Raises:
            IllegalChoice: a value is not a choice of its slot.
            SpecError: an axis is missing, unknown, or has the wrong number of slots.
        """
        known = [axis.name for axis in self.axes]
        if self._precision is not None:
            values = {PRECISION: FLOAT32, **values}
        wrong = [f"unknown axis {name!r}" for name in values if name not in known]
        wrong += [f"missing axis {name!r}" for name in known if name not in values]
        if wrong:
            raise SpecError(f"{self.name}: {'; '.join(wrong)}; the axes are {', '.join(known)}")
        return self._canonical({axis.name: self._broadcast(axis, values[axis.name]) for axis in self.axes})

    def check(self, spec: SubnetSpec) -> SubnetSpec:
        """Return the canonical form of `spec`, which may come from a file, if it is of this space and legal.

        Raises:
            ForeignSpec: the specification was made by another space.
            SpecError: the argument is no specification, or a value in it is not legal.
        """
        if not isinstance(spec, SubnetSpec):
            raise SpecError(
                f"{self.name}: expected a SubnetSpec, got {type(spec).__name__}; "
                "make one with space.parse(...)"
            )
        if spec.space != self.id:
            raise ForeignSpec(
                f"{self.name}: the specification belongs to space {spec.space}, this one is {self.id}; "
                "parse the configuration with this supernet's own space"
            )
        if spec.precision != FLOAT32 and self._precision is None:
            raise ForeignSpec(
                f"{self.name}: the specification is at {spec.precision}, and the subnets of this space are "
                "float32; call supernet.enable_precision with the same precisions"
            )
        return self.spec(**dict(spec.values))

    def parse(self, config: Any) -> SubnetSpec:
        """Return the subnet of a configuration in the family's own notation, or of a readable key.

        Args:
            config: for an adapted family, the configuration that the family's own code takes; for an own
                network, axis values. A string may be a `SubnetSpec.key`, as tables contain it, or the
                text of a `SubnetSpec`, as messages show it.

        Raises:
            SpecError: the configuration is malformed or outside the space.
        """
        if isinstance(config, str) and "=" in config and (keyed := self._keyed(config)) is not None:
            return keyed
        precision: dict[str, Any] = {}
        if isinstance(config, Mapping) and PRECISION in config:
            precision = {PRECISION: config[PRECISION]}
            config = {name: value for name, value in config.items() if name != PRECISION}
        values = self._parse(config) if self._parse else config
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            given = repr(values) if isinstance(values, str) else type(values).__name__
            raise SpecError(f"{self.name}: expected a mapping of axes, or a key of this space, got {given}")
        return self.spec(**values, **precision)

    def format(self, spec: SubnetSpec) -> Any:
        """Return the subnet `spec` in the family's own notation, the inverse of `parse`.

        Slots that the subnet does not use get their smallest choice. A dictionary also has the `precision`,
        unless that is float32.

        Raises:
            SpecError: the specification is not legal, or of another space (`ForeignSpec`).
        """
        chosen = self.values(self.check(spec))
        filled = {
            axis.name: tuple(
                slot.choices[0] if v is None else v
                for slot, v in zip(axis.slots, chosen[axis.name], strict=True)
            )
            for axis in self.axes
        }
        precision = filled.pop(PRECISION, ())
        written = self._format(filled) if self._format else {name: list(v) for name, v in filled.items()}
        if isinstance(written, Mapping) and any(value != FLOAT32 for value in precision):
            written = {**written, PRECISION: list(precision)}
        return written

    def values(self, spec: SubnetSpec) -> dict[str, tuple[Value | None, ...]]:
        """Return the choices of the subnet `spec` on every axis, in the order of `axes`; nothing is checked.

        A slot that the subnet does not use has None; the precisions of float32 are given, too.
        """
        found = dict(spec.values)
        return {axis.name: found.get(axis.name, (FLOAT32,)) for axis in self.axes}

    def chosen(self, choose: Callable[[tuple[Value, ...]], Value]) -> SubnetSpec:
        """Return the subnet with what a function, `choose`, takes of the choices of every slot."""
        return self._canonical({a.name: tuple(choose(s.choices) for s in a.slots) for a in self.axes})

    def smallest(self) -> SubnetSpec:
        """Return the subnet with the first choice in every slot."""
        return self.chosen(itemgetter(0))

    def largest(self) -> SubnetSpec:
        """Return the subnet with the last choice in every slot."""
        return self.chosen(itemgetter(-1))

    def narrowed(self, places: Collection[Place]) -> SubnetSpec:
        """Return the largest subnet, with the first choices at some `places`: pairs of axis and position."""
        narrow = (place in places for place, _ in self._slots())
        return self.chosen(lambda choices: choices[0 if next(narrow) else -1])

    @overload
    def sample(self, rng: Rng | int, n: None = None) -> SubnetSpec: ...

    @overload
    def sample(self, rng: Rng | int, n: int) -> list[SubnetSpec]: ...

    def sample(self, rng: Rng | int, n: int | None = None) -> SubnetSpec | list[SubnetSpec]:
        """Draw one random subnet, or `n` distinct subnets that include the smallest and the largest.

        Every slot is drawn uniformly and independently of the others.

        Args:
            rng: a `random.Random`, a NumPy generator, or a seed. A generator is advanced.
            n: the number of subnets.

        Returns:
            One specification if `n` is None. Otherwise a list of the smallest subnet, the largest, and
            distinct random ones, which is shorter than `n` if the space has fewer subnets.

        Raises:
            SpecError: `rng` is of another type, or `n` is no positive number.

        Example:
            >>> smallest, largest, *random_specs = space.sample(0, 10)
        """
        source = random.Random(int(rng)) if isinstance(rng, int | np.integer) else rng
        if not isinstance(source, random.Random | np.random.Generator):
            raise SpecError(f"{self.name}: rng is a random.Random, a NumPy generator or a seed, got {rng!r}")
        pick: Callable[[int], Any] = getattr(source, "randrange", None) or source.integers  # type: ignore[union-attr]

        def draw() -> SubnetSpec:
            return self.chosen(lambda choices: choices[int(pick(len(choices)))])

        if n is None:
            return draw()
        given: Any = n
        if isinstance(given, bool) or not isinstance(given, int | np.integer) or n < 1:
            raise SpecError(f"{self.name}: n is the number of subnets to sample, at least 1, got {n!r}")
        found, size = dict.fromkeys([self.smallest(), self.largest()]), self.size()
        if n >= size:
            found.update(dict.fromkeys(self.enumerate(limit=n)))
        while len(found) < min(n, size):
            found[draw()] = None
        return list(found)[:n]

    # -- counting and sizes ----------------------------------------------------------------------

    def size(self) -> int:
        """Return the exact number of distinct subnets."""
        conditional = [slot for _, slot in self._slots() if slot.used_when]
        return math.prod(
            sum(
                math.prod(len(other.choices) for other in conditional if _used(other, {place: choice}))
                for choice in slot.choices
            )
            for place, slot in self._slots()
            if slot.used_when is None
        )

    def enumerate(self, limit: int = 1_000_000) -> Iterator[SubnetSpec]:
        """Yield every distinct subnet, the smallest first; `SpecError` if there are more than `limit`."""
        if self.size() > limit:
            raise SpecError(f"{self.name}: {self.size():.3g} subnets are more than {limit}; sample instead")
        free = {place: slot.choices for place, slot in self._slots() if slot.used_when is None}
        for choices in itertools.product(*free.values()):
            gates = dict(zip(free, choices, strict=True))
            options: list[tuple[Value | None, ...]] = [
                (gates[place],) if place in gates else slot.choices if _used(slot, gates) else (None,)
                for place, slot in self._slots()
            ]
            for values in itertools.product(*options):
                yield self._assemble(values)

    # -- inner parts -----------------------------------------------------------------------------

    def _sizes_of(self, spec: SubnetSpec) -> SizeRow:
        sizes = self._sizes(dict(spec.values))
        if tuple(sizes) != self.dimensions:
            raise SpecError(f"{self.name}: resolve() names other dimensions for {spec} than for the largest")
        return tuple(sizes.values())

    def _keyed(self, key: str) -> SubnetSpec | None:
        """Return the subnet of a readable key, or None if the key is of no subnet of this space."""
        known = {axis.name: axis for axis in self.axes}
        values: dict[str, Any] = {}
        for name, _, listed in (part.partition("=") for part in key.split()):
            slots, words = known[name].slots if name in known else (), listed.split(",")
            values[name] = [
                next((c for c in slot.choices if word in (str(c), "-")), word)
                for slot, word in zip(slots, words if "," in listed else words * len(slots), strict=False)
            ]
        try:
            spec = self.spec(**values)
        except SpecError:
            return None
        return spec if key in (spec.key, str(spec)) else None

    @property
    def _precision(self) -> Axis | None:
        """The axis of precisions, which is the last one."""
        return self.axes[-1] if self.axes and self.axes[-1].name == PRECISION else None

    def _slots(self) -> Iterator[tuple[Place, Slot]]:
        for axis in self.axes:
            for index, slot in enumerate(axis.slots):
                yield (axis.name, index), slot

    def _sizes(self, values: AxisValues) -> dict[str, int]:
        computed: Mapping[str, Any] = self._resolve({n: v for n, v in values.items() if n != PRECISION})
        sizes = {
            name: size if type(size) is int else self._whole(name, size) for name, size in computed.items()
        }
        if self._precision is not None:
            sizes[_BITS] = PRECISIONS[values.get(PRECISION, (FLOAT32,))[0]]
        return sizes

    def _whole(self, name: str, size: Any) -> int:
        with suppress(TypeError, ValueError, OverflowError):
            if bool(int(size) == size):
                return int(size)
        raise SpecError(
            f"{self.name}: the size {name!r} comes out as {size!r}; make it a whole number where sizes are "
            "computed, with round(...)"
        )

    def _broadcast(self, axis: Axis, values: Any) -> tuple[Any, ...]:
        if isinstance(values, np.ndarray):
            values = values.tolist()
        if isinstance(values, str) or not isinstance(values, Sequence):
            return (values,) * len(axis.slots)
        if len(values) != len(axis.slots):
            slots = ", ".join(slot.name for slot in axis.slots)
            raise SpecError(
                f"{self.name}: {axis.name} needs one value for each slot ({slots}), got {len(values)} values"
            )
        return tuple(values)

    def _canonical(self, given: Mapping[str, tuple[Any, ...]]) -> SubnetSpec:
        slots = list(self._slots())
        chosen = {place: self._choice(place, slot, given) for place, slot in slots if slot.used_when is None}
        chosen |= {p: self._choice(p, s, given) for p, s in slots if p not in chosen and _used(s, chosen)}
        return self._assemble(chosen.get(place) for place, _ in slots)

    def _assemble(self, values: Iterator[Value | None] | tuple[Value | None, ...]) -> SubnetSpec:
        rest = iter(values)
        pairs = [(axis.name, tuple(itertools.islice(rest, len(axis.slots)))) for axis in self.axes]
        if self._precision is not None and set(pairs[-1][1]) == {FLOAT32}:
            pairs.pop()
        return SubnetSpec(self.id, tuple(pairs))

    def _choice(self, place: Place, slot: Slot, given: Mapping[str, tuple[Any, ...]]) -> Value:
        axis, index = place
        value = given[axis][index]
        plain = value.item() if isinstance(value, np.generic) else value
        huge = isinstance(plain, int) and not -(2**63) <= plain < 2**63
        if isinstance(plain, int | float | str) and not isinstance(plain, bool) and not huge:
            for legal in (*slot.choices, *slot.aliases):
                if plain == legal or (
                    isinstance(plain, int | float)
                    and isinstance(legal, int | float)
                    and math.isclose(plain, legal, rel_tol=1e-6)
                ):
                    return slot.aliases.get(legal, legal)
        raise IllegalChoice(
            f"{self.name}: {axis}[{index}] ({slot.name}): {shown(value)} is not a choice; "
            f"choose from {', '.join(map(str, slot.choices))}"
        )

    def _hashed(self) -> Iterator[SubnetSpec]:
        """Yield the subnets whose sizes identify the space: all, or a sample that covers every choice."""
        if self.size() <= HASHED_WHOLE:
            yield from self.enumerate()
            return
        number = random.Random(0).random  # It gives the same numbers in every version of Python.
        drawn = [
            self.chosen(lambda choices: choices[int(number() * len(choices))]) for _ in range(HASHED_SAMPLE)
        ]
        covered = {(name, i, v) for spec in drawn for name, slots in spec.values for i, v in enumerate(slots)}
        yield from (self.smallest(), self.largest(), *drawn)
        for (axis, index), slot in self._slots():
            for choice in slot.choices:
                if (axis, index, choice) not in covered:
                    values = {a.name: [s.choices[0] for s in a.slots] for a in self.axes}
                    if slot.used_when and slot.used_when.values:
                        values[slot.used_when.axis][slot.used_when.slot] = slot.used_when.values[0]
                    values[axis][index] = choice
                    yield self._canonical({name: tuple(v) for name, v in values.items()})

    def _check_axes(self) -> None:
        gates = {place: slot for place, slot in self._slots() if slot.used_when is None}
        for (axis, index), slot in self._slots():
            where = f"{self.name}: {axis}[{index}] ({slot.name})"
            if not slot.choices or len(set(slot.choices)) != len(slot.choices):
                raise SpecError(f"{where}: choices must be distinct and at least one, got {slot.choices}")
            flags = [choice for choice in slot.choices if isinstance(choice, bool)]
            if flags:
                raise SpecError(f"{where}: {flags[0]} is a truth value; use the choices 0 and 1")
            texts = [str(choice) for choice in slot.choices]
            if len(set(texts)) < len(texts) or any(c == "," or c.isspace() for c in "".join(texts)):
                raise SpecError(
                    f"{where}: choices must be told apart by their text, without commas and blanks, which "
                    f"stand between choices in the key of a subnet; got {slot.choices}"
                )
            when = slot.used_when
            if when and (when.axis, when.slot) not in gates:
                raise SpecError(f"{where}: depends on {when.axis}[{when.slot}], which is not unconditional")
            if when and not set(when.values) <= set(gates[when.axis, when.slot].choices):
                raise SpecError(f"{where}: {when.values} are not all choices of {when.axis}[{when.slot}]")
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise SpecError(f"{self.name}: two axes have the same name")
        if PRECISION in names:
            raise SpecError(
                f"{self.name}: the axis {PRECISION!r} is the one that supernet.enable_precision adds; choose "
                "another name"
            )


def _used(slot: Slot, gates: Mapping[Place, Value]) -> bool:
    when = slot.used_when
    return when is None or gates.get((when.axis, when.slot)) in when.values
