"""SubnetSpec: the identity of a subnet, which is the choice that it takes in every slot of every axis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from subnetact.errors import SpecError

__all__ = ["FLOAT32", "PRECISION", "PRECISIONS", "SubnetSpec", "Value", "brief", "grouped", "shown"]

PRECISION = "precision"
"""The name of the axis of precisions, which `SubnetSpace.with_precision` adds."""
FLOAT32 = "float32"
"""The precision of the weights, and of specifications without that axis."""
PRECISIONS: Mapping[str, int] = {"int8": 8, "bfloat16": 16, FLOAT32: 32}
"""The precisions of weights, from the cheapest, each with its bits."""

Value: TypeAlias = int | float | str
"""One choice of one slot, for example a width multiplier, a depth or a kernel size."""


@dataclass(frozen=True)
class SubnetSpec:
    """The specification of one subnet. It is hashable and compares by value.

    A `SubnetSpace` makes specifications, in a canonical form: a slot that the subnet does not use holds
    None, so two specifications that would differ only in unused slots are equal. A subnet at float32 has no
    axis of precisions, so its specification stays the same when `Supernet.enable_precision` adds that axis.

    Attributes:
        space: the id of the space that made the specification (`SubnetSpace.id`).
        values: pairs of an axis and its values, one per slot; the axes are in alphabetical order.

    Source:
        The control tuple of SuperServe, section 3.

    Example:
        >>> spec = supernet.space.smallest()
        >>> spec["depth"]
        (1, 1, 1)
    """

    space: str
    values: tuple[tuple[str, tuple[Value | None, ...]], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return SubnetSpec, (self.space, self.values)

    @cached_property
    def _hash(self) -> int:
        return hash((self.space, self.values))

    __iter__ = None  # Without this, Python would take a class with __getitem__ for a sequence.

    def __getitem__(self, axis: str) -> tuple[Value | None, ...]:
        """Return one value per slot of the axis of this name, None for slots that this subnet does not use.

        Raises:
            SpecError: the space has no such axis.
        """
        for name, values in self.values:
            if name == axis:
                return values
        raise SpecError(f"{self.space}: no axis {axis!r}; choose from {', '.join(n for n, _ in self.values)}")

    @cached_property
    def precision(self) -> str:
        """The precision of the subnet: `float32`, `bfloat16` or `int8`."""
        return str((*dict(self.values).get(PRECISION, ()), FLOAT32)[0])

    @cached_property
    def base(self) -> SubnetSpec:
        """The same subnet at float32. Subnets of one base share their BatchNorm statistics."""
        if self.precision == FLOAT32:
            return self
        return SubnetSpec(self.space, tuple(pair for pair in self.values if pair[0] != PRECISION))

    @cached_property
    def key(self) -> str:
        """A readable name, unique within the space: `depth=0,2 expand=0.2,-,0.35`. `-` is an unused slot."""
        return " ".join(
            f"{name}={','.join('-' if v is None else str(v) for v in values)}" for name, values in self.values
        )

    def __str__(self) -> str:
        """Return the key, in which the value of an axis stands once if all of its slots have the same one."""
        return brief(self.key)

    def to_json(self) -> dict[str, Any]:
        """Return the specification as dictionaries, lists, strings and numbers that JSON can hold."""
        return {"space": self.space, "values": {name: list(values) for name, values in self.values}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SubnetSpec:
        """Return the specification of `data`, as `to_json` returns it; `SubnetSpace.check` checks the values.

        Raises:
            SpecError: the data does not have the layout that `to_json` writes.
        """
        given: Any = data
        fields = given if isinstance(given, Mapping) else {}
        space, values = fields.get("space"), fields.get("values")
        listed = isinstance(values, Mapping) and all(isinstance(v, list | tuple) for v in values.values())
        if not isinstance(values, Mapping) or not listed or space is None:
            raise SpecError(
                f"a specification needs 'space' and 'values' (axis -> list), got {shown(given)}; "
                "write it with to_json()"
            )
        legal = all(isinstance(name, str) and all(map(_is_value, slots)) for name, slots in values.items())
        if not isinstance(space, str) or not legal:
            raise SpecError(f"values of a specification are numbers, strings or null, got {shown(given)}")
        return cls(space, tuple((name, tuple(slots)) for name, slots in values.items()))


def brief(key: str) -> str:
    """Return a key in which the value of an axis stands once if all of its slots have the same one."""
    return re.sub(r"(?<![^ ])([^ =]+=)([^ ,]+)(,\2)+(?= |$)", r"\1\2", key)


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """Return key -> all values that come with it, both in their order."""
    groups: dict[Any, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def shown(value: Any) -> str:
    """Return a value as a message shows it: in one line, shortened, and whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # Python refuses to write integers of more than 4,300 digits.
        text = f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _is_value(value: Any) -> bool:
    if value is None or isinstance(value, str):
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -(2**63) <= value < 2**63  # False for NaN, too
