"""The earliest-deadline-first queue of the simulator and of the live batcher.

Requests with equal deadlines leave in order of arrival, because `bisect_right` in `EDFQueue.push` inserts a
request behind those with the same deadline.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
NO_FLOOR = 0.0
LOOK = 1024
"""How many of the most urgent requests a step looks at one by one that cannot stop at a deadline."""
_COMPACT_FROM = 1024


class EDFQueue(Generic[Item]):
    """Requests in order of deadline; requests with equal deadlines are in order of arrival.

    The queue consists of three parallel sorted lists with a moving head. Taking the k most urgent requests
    costs O(k), reading the i-th deadline O(1), and finding the place of a new request O(log n). A floor is
    the minimum accuracy, percent, that a request accepts; `NO_FLOOR` accepts any. The queue is not
    thread-safe; its owner locks.
    `priority` returns the priority of an item; if None, all have 0. `demanding` requests in the queue have a
    floor, and `prioritised` another priority than 0.
    """

    __slots__ = ("_deadlines", "_floors", "_head", "_items", "_priority", "demanding", "prioritised")

    def __init__(self, priority: Callable[[Item], int] | None = None) -> None:
        self._deadlines: list[float] = []
        self._items: list[Item | None] = []
        self._floors: list[float] = []
        self._head = 0
        self._priority = priority
        self.demanding = 0
        self.prioritised = 0

    def __len__(self) -> int:
        return len(self._deadlines) - self._head

    def push(self, deadline_ms: float, item: Item, floor: float = NO_FLOOR) -> None:
        """Add one request, behind those with the same deadline."""
        if floor > NO_FLOOR:
            self.demanding += 1
        if self._priority is not None and self._priority(item):
            self.prioritised += 1
        at = bisect_right(self._deadlines, deadline_ms, self._head)
        self._deadlines.insert(at, deadline_ms)
        self._items.insert(at, item)
        self._floors.insert(at, floor)

    def deadline(self, i: int = 0) -> float:
        """Return the deadline, ms, of the i-th most urgent request (0-based)."""
        return self._deadlines[self._head + i]

    def floor(self, i: int = 0) -> float:
        """Return the minimum accuracy, percent, of the i-th most urgent request (0-based)."""
        return self._floors[self._head + i]

    def deadlines(self, start: int, step: int) -> list[float]:
        """Return the deadlines, ms, at positions start, start + step, start + 2 step and so on."""
        return self._deadlines[self._head + start :: step]

    def item(self, i: int = 0) -> Item:
        """Return the i-th most urgent request (0-based)."""
        return self._items[self._head + i]  # type: ignore[return-value]

    def entries(self, most: int) -> list[tuple[float, Item]]:
        """Return (deadline, item) of the `most` most urgent requests."""
        cut = slice(self._head, self._head + most)
        return list(zip(self._deadlines[cut], self._items[cut], strict=True))  # type: ignore[arg-type]

    def classes(self, start: int, stop: int) -> list[tuple[float, float]]:
        """Return (deadline, floor) at positions from start on, before `stop`."""
        cut = slice(self._head + start, self._head + stop)
        return list(zip(self._deadlines[cut], self._floors[cut], strict=True))

    def take(self, k: int) -> list[Item]:
        """Remove and return the k most urgent requests, most urgent first."""
        head, end = self._head, self._head + k
        items = self._items[head:end]
        self._uncount(items, self._floors[head:end])
        self._advance(end)
        return items  # type: ignore[return-value]

    def take_satisfied(
        self, k: int, accuracy: float, alike: Callable[[Item], bool] | None = None
    ) -> list[Item]:
        """Remove and return the k most urgent requests whose floor is at most `accuracy`.

        Only the 1024 most urgent requests are examined, or 2 k if that is more. So a decision takes the same
        time behind any number of requests that demand more.
        """
        floors, items = self._floors, self._items
        return self._take_where(
            k,
            lambda at: floors[at] <= accuracy and (alike is None or alike(items[at])),  # type: ignore[arg-type]
            max(LOOK, 2 * k),
        )

    def take_at(self, positions: Sequence[int]) -> list[Item]:
        """Remove and return the requests at the given positions (ascending)."""
        wanted = {self._head + i for i in positions}
        return self._take_where(len(wanted), wanted.__contains__)

    def remove(self, deadline_ms: float, item: Item) -> bool:
        """Remove one request, which is found by identity."""
        at = bisect_left(self._deadlines, deadline_ms, self._head)
        while at < len(self._deadlines) and self._deadlines[at] == deadline_ms:
            if self._items[at] is item:
                self._uncount((item,), (self._floors[at],))
                del self._deadlines[at], self._items[at], self._floors[at]
                return True
            at += 1
        return False

    def _take_where(self, k: int, wanted: Callable[[int], bool], most: float = math.inf) -> list[Item]:
        chosen: list[int] = []
        end = self._head
        last = min(len(self._deadlines), end + most)
        while end < last and len(chosen) < k:
            if wanted(end):
                chosen.append(end)
            end += 1
        items = [self._items[at] for at in chosen]
        self._uncount(items, [self._floors[at] for at in chosen])
        taken = set(chosen)
        kept = [at for at in range(self._head, end) if at not in taken]
        start = end - len(kept)
        self._deadlines[start:end] = [self._deadlines[at] for at in kept]
        self._items[start:end] = [self._items[at] for at in kept]
        self._floors[start:end] = [self._floors[at] for at in kept]
        self._advance(start)
        return items  # type: ignore[return-value]

    def _uncount(self, items: Sequence[Any], floors: Sequence[float]) -> None:
        """Subtract requests that leave from those with a floor and those with a priority."""
        if self.demanding:
            self.demanding -= sum(map(NO_FLOOR.__lt__, floors))
        if self._priority is not None and self.prioritised:
            self.prioritised -= sum(map(bool, map(self._priority, items)))

    def _advance(self, end: int) -> None:
        self._items[self._head : end] = repeat(None, end - self._head)
        if end == len(self._deadlines) or (end > _COMPACT_FROM and 2 * end > len(self._deadlines)):
            del self._deadlines[:end], self._items[:end], self._floors[:end]
            end = 0
        self._head = end
