"""ByteCache: what may be dropped at any time, within a number of bytes."""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from subnetact.engine.host_memory import give_back

__all__ = ["ByteCache"]

GIVE_BACK_AFTER = 2**24
"""Bytes freed after which the allocator is asked to return free pages to the system."""


@dataclass
class _Entry:
    value: Any
    nbytes: int
    kind: str
    pinned: bool
    used: int = field(default=0)


class ByteCache:
    """Values by key, each of a size in bytes; the least recently used make room for new ones.

    Look-ups take no lock. A value that somebody still holds lives on after it was dropped here, and its
    bytes are not free before it is gone. Values can be referred to weakly.

    Args:
        budget: the most bytes that all values together may have.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._entries: dict[Hashable, _Entry] = {}
        self._bytes = 0
        self._gone: deque[int] = deque()  # appended to wherever a value dies, under the lock or not
        self._dropped = 0
        self._given_back = 0
        self._clock = itertools.count(1)
        self._now = 0
        self._lock = threading.Lock()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

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

    def make_room(self, nbytes: int, kind: str, before: float = math.inf, wait_s: float = 0.0) -> bool:
        """Evict least recently used values of a kind until `nbytes` are free; none if that is impossible.

        Args:
            nbytes: the bytes that must be free.
            kind: only values of this kind may be evicted, and none that is pinned.
            before: only values last used before this value of `now` may be evicted.
            wait_s: seconds to wait for evicted values that somebody still uses.

        Returns:
            Whether `nbytes` are free now.
        """
        end = time.monotonic() + wait_s
        while True:
            with self._lock:
                made, dying = self._make_room(nbytes, kind, before), self._dying()
            if self._given_back >= GIVE_BACK_AFTER:
                self._given_back = 0
                give_back()
            if made or not dying or time.monotonic() >= end:
                return made
            time.sleep(1e-3)

    def put(
        self,
        key: Hashable,
        value: Any,
        nbytes: int,
        kind: str,
        before: float = math.inf,
        pinned: bool = False,
    ) -> bool:
        """Keep a value if `make_room` finds room for it."""
        with self._lock:
            self._drop(key)
            if not self._make_room(nbytes, kind, before):
                return False
            self._entries[key] = _Entry(value, nbytes, kind, pinned, self._now)
            self._bytes += nbytes
            return True

    def grow(self, key: Hashable, nbytes: int) -> bool:
        """Count more bytes for a value if they are free; nothing is evicted for them."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or self._bytes + self._dying() + nbytes > self.budget:
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

    def _make_room(self, nbytes: int, kind: str, before: float) -> bool:
        victims = self._victims(self._bytes + self._dying() + nbytes - self.budget, kind, before)
        if victims is None:
            return False
        for key in victims:
            self._drop(key)
        return self._bytes + self._dying() + nbytes <= self.budget

    def _victims(self, missing: int, kind: str, before: float) -> list[Hashable] | None:
        found: list[Hashable] = []
        for key, entry in sorted(self._entries.items(), key=lambda item: item[1].used):
            if missing <= 0:
                break
            if entry.kind == kind and entry.used < before and not entry.pinned:
                found.append(key)
                missing -= entry.nbytes
        return found if missing <= 0 else None

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.nbytes
            self._dropped += entry.nbytes
            weakref.finalize(entry.value, self._gone.append, entry.nbytes).atexit = False

    def _dying(self) -> int:
        """Return the bytes of values that were dropped and are still in use. Called under the lock."""
        while self._gone:
            freed = self._gone.popleft()
            self._dropped -= freed
            self._given_back += freed
        return self._dropped
