"""What policies compute when it is first asked for, and keep for the last few that asked."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Recent"]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """Keeps the values of a bounded number of keys; the one that was made first makes room for a new one.

    Args:
        make: makes the value of a key.
        most: the largest number of values that are kept.
    """

    def __init__(self, make: Callable[[Key], Value], most: int) -> None:
        self._make = make
        self._most = most
        self._made: dict[Key, Value] = {}

    def __len__(self) -> int:
        return len(self._made)

    def __call__(self, key: Key) -> Value:
        """Return the value of a key."""
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= self._most:
                del self._made[next(iter(self._made))]
            found = self._made[key] = self._make(key)
        return found
