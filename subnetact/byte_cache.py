"""ByteCache: what may be dropped at any time, within a number of bytes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ByteCache"]


@dataclass
class _Entry:
    value: Any
    nbytes: int
    kind: str
    pinned: bool
    used: int = field(default=0)


class ByteCache:
    """Values by key, each of a size in bytes; the least recently used make room for new ones.

    Look-ups take no lock. A value that somebody still holds lives on after it was dropped here.

    Args:
        budget: the most bytes that all values together may have.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._entries: dict[Hashable, _Entry] = {}
        self._bytes = 0
        self._clock = itertools.count(1)
        self._now = 0
        self._lock = threading.Lock()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    @property
    def now(self) -> int:
        """The number of look-ups that found something so far."""
        return self._now

    def get(self, key: Hashable) -> Any:
        """Return a value and note its use, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.used = self._now = next(self._clock)
        return entry.value

    def make_room(self, nbytes: int, evicts: Mapping[str, float]) -> bool:
        """Drop least recently used values until `nbytes` are free; drop none if that is impossible.

        Args:
            nbytes: what is to be put.
            evicts: kind -> values of this kind last used before this `now` may be dropped, unless they
                are pinned. Other kinds stay.
        """
        with self._lock:
            return self._make_room(nbytes, evicts)

    def put(
        self,
        key: Hashable,
        value: Any,
        nbytes: int,
        kind: str,
        evicts: Mapping[str, float],
        pinned: bool = False,
    ) -> bool:
        """Keep a value if `make_room` finds room for it."""
        with self._lock:
            self._drop(key)
            if not self._make_room(nbytes, evicts):
                return False
            self._entries[key] = _Entry(value, nbytes, kind, pinned, self._now)
            self._bytes += nbytes
            return True

    def grow(self, key: Hashable, nbytes: int, evicts: Mapping[str, float]) -> bool:
        """Let a value that is kept have more bytes, if there is room for them."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not self._make_room(nbytes, evicts, key):
                return False
            entry.nbytes += nbytes
            self._bytes += nbytes
            return True

    def pin(self, key: Hashable, pinned: bool) -> None:
        """Protect a value from being dropped to make room, or no longer."""
        with self._lock:
            if key in self._entries:
                self._entries[key].pinned = pinned

    def drop(self, key: Hashable) -> None:
        """Forget a value, pinned or not."""
        with self._lock:
            self._drop(key)

    def nbytes(self, kind: str | None = None) -> int:
        """Return the bytes of one kind, or of all."""
        with self._lock:
            return sum(e.nbytes for e in self._entries.values() if kind is None or e.kind == kind)

    def _make_room(self, nbytes: int, evicts: Mapping[str, float], spared: Hashable = None) -> bool:
        missing = self._bytes + nbytes - self.budget
        victims: list[Hashable] = []
        if missing > 0:
            for key, entry in sorted(self._entries.items(), key=lambda item: item[1].used):
                before = evicts.get(entry.kind, -1)
                if entry.used < before and not entry.pinned and key != spared:
                    victims.append(key)
                    missing -= entry.nbytes
                    if missing <= 0:
                        break
            if missing > 0:
                return False
        for key in victims:
            self._drop(key)
        return True

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.nbytes
