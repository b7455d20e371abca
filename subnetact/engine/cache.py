"""An LRU cache bounded in bytes, with pinned entries.

This is where the memory limit of fused programs and CUDA graphs is enforced: `ByteCache.budget`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ByteCache"]

TRIM_AFTER = 2**24
"""After this number of freed bytes, the C allocator is asked to return free pages to the system."""


@dataclass
class _Entry:
    value: Any
    nbytes: int
    kind: str
    pinned: bool
    used: int = field(default=0)


class ByteCache:
    """Values by key, each with a size in bytes. The least recently used values make room for new ones.

    Look-ups take no lock. An evicted value that a caller still holds stays in memory; its bytes count until
    it is garbage collected. Values must support weak references.

    Args:
        budget: the most bytes that all values together may have.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._entries: dict[Hashable, _Entry] = {}
        self._bytes = 0
        self._freed: deque[int] = deque()  # sizes of values that died; appended to with or without the lock
        self._evicted_in_use = 0
        self._freed_since_trim = 0
        self._clock = itertools.count(1)
        self._now = 0
        self._lock = threading.Lock()

    def __contains__(self, key: Hashable) -> bool:
        """Tell whether a value is kept under the key."""
        return key in self._entries

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._entries)

    @property
    def now(self) -> int:
        """The clock of the cache: the number of look-ups so far that found a value."""
        return self._now

    def get(self, key: Hashable) -> Any:
        """Return the value of a key and note its use, or return None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.used = self._now = next(self._clock)
        return entry.value

    def make_room(self, nbytes: int, kind: str, before: float = math.inf, wait_s: float = 0.0) -> bool:
        """Evict least recently used values of one kind until `nbytes` are free.

        If evicting all that may be evicted would not be enough, nothing is evicted.

        Args:
            nbytes: the bytes that must be free.
            kind: only values of this kind are evicted, and only those that are not pinned.
            before: only values that were last used before this value of `now` are evicted.
            wait_s: seconds to wait for evicted values that somebody still uses.

        Returns:
            Whether `nbytes` are free now.
        """
        end = time.monotonic() + wait_s
        while True:
            with self._lock:
                made, in_use = self._make_room(nbytes, kind, before), self._in_use()
            if self._freed_since_trim >= TRIM_AFTER:
                self._freed_since_trim = 0
                _trim_heaps()
            if made or not in_use or time.monotonic() >= end:
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
        """Keep a value in place of the key's former one, if there is room.

        Args:
            key: the name of the value.
            value: any object that supports weak references.
            nbytes: its size in bytes.
            kind: its kind. Only values of the same kind are evicted for it.
            before: only values that were last used before this value of `now` are evicted.
            pinned: whether the value is protected from eviction.

        Returns:
            Whether the value is kept.
        """
        with self._lock:
            self._drop(key)
            if not self._make_room(nbytes, kind, before):
                return False
            self._entries[key] = _Entry(value, nbytes, kind, pinned, self._now)
            self._bytes += nbytes
            return True

    def grow(self, key: Hashable, nbytes: int) -> bool:
        """Count `nbytes` more bytes for a kept value, if they are free. Nothing is evicted for them.

        Returns:
            Whether the value is kept and may take the bytes.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or self._bytes + self._in_use() + nbytes > self.budget:
                return False
            entry.nbytes += nbytes
            self._bytes += nbytes
            return True

    def pin(self, key: Hashable, pinned: bool) -> None:
        """Protect a value from eviction, or stop protecting it. Unknown keys are ignored."""
        with self._lock:
            if key in self._entries:
                self._entries[key].pinned = pinned

    def drop(self, key: Hashable) -> None:
        """Remove a value, pinned or not. Unknown keys are ignored."""
        with self._lock:
            self._drop(key)

    def nbytes(self, kind: str | None = None) -> int:
        """Return the bytes of all kept values of one kind. If `kind` is None, of all kinds."""
        with self._lock:
            return sum(e.nbytes for e in self._entries.values() if kind is None or e.kind == kind)

    def _make_room(self, nbytes: int, kind: str, before: float) -> bool:
        victims = self._victims(self._bytes + self._in_use() + nbytes - self.budget, kind, before)
        if victims is None:
            return False
        for key in victims:
            self._drop(key)
        return self._bytes + self._in_use() + nbytes <= self.budget

    def _victims(self, missing: int, kind: str, before: float) -> list[Hashable] | None:
        """Return the keys to evict so that `missing` bytes become free, or None if that is impossible."""
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
            self._evicted_in_use += entry.nbytes
            weakref.finalize(entry.value, self._freed.append, entry.nbytes).atexit = False

    def _in_use(self) -> int:
        """Return the bytes of values that were removed and are still in use. Called under the lock."""
        while self._freed:
            freed = self._freed.popleft()
            self._evicted_in_use -= freed
            self._freed_since_trim += freed
        return self._evicted_in_use


def _trim_heaps() -> None:
    """Return free pages of glibc's heaps to the system; other C libraries are left alone.

    Every thread has a heap of its own and keeps what it freed there, which the other threads cannot use.
    Without trimming, a process with many threads holds several times the bytes that are in use.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return trim
