"""The identity of a subnet: which choice every slot of every axis takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from subnetact.errors import SpecError

__all__ = ["SubnetSpec", "Value"]

Value: TypeAlias = int | float | str
"""One choice of one slot: a width multiplier, a depth, a kernel size ..."""


@dataclass(frozen=True)
class SubnetSpec:
    """Canonical, hashable control tuple of one subnet, made by a `SubnetSpace`.

    `values` pairs each axis, in alphabetical order, with one value per slot; a slot that this subnet
    skips holds None, so two specifications that differ only in skipped slots are the same subnet.
    `space` names the space that made it (`SubnetSpace.id`).
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

    def __getitem__(self, axis: str) -> tuple[Value | None, ...]:
        """Return the values of one axis, None where the slot is skipped.

        Raises:
            SpecError: the space has no such axis.
        """
        for name, values in self.values:
            if name == axis:
                return values
        raise SpecError(f"{self.space}: no axis {axis!r}; choose from {', '.join(n for n, _ in self.values)}")

    @cached_property
    def key(self) -> str:
        """Readable name, unique within the space: `depth=0,2 expand=0.2,-,0.35`; `-` is skipped."""
        return " ".join(
            f"{name}={','.join('-' if v is None else str(v) for v in values)}" for name, values in self.values
        )

    def __str__(self) -> str:
        return self.key

    def to_json(self) -> dict[str, Any]:
        """Return the specification as plain lists, strings and numbers."""
        return {"space": self.space, "values": {name: list(values) for name, values in self.values}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SubnetSpec:
        """Rebuild a specification; `SubnetSpace.check` tells whether a space knows it.

        Raises:
            SpecError: the mapping does not have the layout `to_json` writes.
        """
        try:
            space, values = data["space"], data["values"]
            pairs = tuple((name, tuple(slots)) for name, slots in values.items())
        except (TypeError, KeyError, AttributeError) as error:
            raise SpecError(
                f"a specification needs 'space' and 'values' (axis -> list), got {data!r}; "
                "write it with to_json()"
            ) from error
        legal = all(
            isinstance(name, str)
            and all(
                v is None or (isinstance(v, int | float | str) and not isinstance(v, bool)) for v in slots
            )
            for name, slots in pairs
        )
        if not isinstance(space, str) or not legal:
            raise SpecError(f"values of a specification are numbers, strings or null, got {data!r}")
        return cls(space, pairs)
