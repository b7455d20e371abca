"""The earliest-deadline-first queue of the simulator and of the live batcher.

Requests with equal deadlines leave in order of arrival, because `bisect_right` in `EDFQueue.push` inserts a
request behind those with the same deadline.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from subnetact.serving.scheduling.floors import NO_FLOOR
from subnetact.serving.scheduling.request import Request

LOOK = 1024
"""How many of the most urgent requests a step looks at one by one that cannot stop at a deadline."""
_COMPACT_FROM = 1024


class EDFQueue:
    """Requests in order of deadline; requests with equal deadlines are in order of arrival.

    The queue consists of two parallel sorted lists with a moving head. Taking the k most urgent requests
    costs O(k), reading the i-th deadline O(1), and finding the place of a new request O(log n). A floor is
    the minimum accuracy, percent, that a request accepts; `NO_FLOOR` accepts any. The queue is not
    thread-safe; its owner locks.
    `demanding` requests in the queue have a floor, and `prioritised` another rank than 0.
    """

    __slots__ = ("_deadlines", "_head", "_requests", "demanding", "prioritised")

    def __init__(self) -> None:
        self._deadlines: list[float] = []
        self._requests: list[Any] = []
        self._head = 0
        self.demanding = 0
        self.prioritised = 0

    def __len__(self) -> int:
        return len(self._deadlines) - self._head

    def push(self, request: Request) -> None:
        """Add one request, behind those with the same deadline."""
        self.demanding += request.ask.floor > NO_FLOOR
        self.prioritised += request.rank != 0
        at = bisect_right(self._deadlines, request.deadline_ms, self._head)
        self._deadlines.insert(at, request.deadline_ms)
        self._requests.insert(at, request)

    def deadline(self, i: int = 0) -> float:
        """Return the deadline, ms, of the i-th most urgent request (0-based)."""
        return self._deadlines[self._head + i]

    def floor(self, i: int = 0) -> float:
        """Return the minimum accuracy, percent, of the i-th most urgent request (0-based)."""
        return self.request(i).ask.floor

    def deadlines(self, start: int, step: int) -> list[float]:
        """Return the deadlines, ms, at positions start, start + step, start + 2 step and so on."""
        return self._deadlines[self._head + start :: step]

    def request(self, i: int = 0) -> Request:
        """Return the i-th most urgent request (0-based)."""
        return self._requests[self._head + i]  # type: ignore[no-any-return]

    def requests(self, start: int, stop: int) -> list[Request]:
        """Return the requests at positions from start on, before `stop`."""
        return self._requests[self._head + start : self._head + stop]

    def take(self, k: int) -> list[Request]:
        """Remove and return the k most urgent requests, most urgent first."""
        requests = self.requests(0, k)
        self._uncount(requests)
        self._advance(self._head + k)
        return requests

    def take_satisfied(self, k: int, accuracy: float, shape: int = -1) -> list[Request]:
        """Remove and return the k most urgent requests of a shape whose floor is at most `accuracy`.

        Only the 1024 most urgent requests are examined, or 2 k if that is more. So a decision takes the same
        time behind any number of requests that demand more.
        """
        fits = lambda request: request.ask.floor <= accuracy and request.shape == shape  # noqa: E731
        return self._take_where(k, fits, max(LOOK, 2 * k))

    def take_at(self, positions: Sequence[int]) -> list[Request]:
        """Remove and return the requests at the given positions (ascending)."""
        wanted = set(map(self.request, positions))
        return self._take_where(len(wanted), wanted.__contains__)

    def remove(self, request: Request) -> bool:
        """Remove one request, if it is in the queue; return whether it was."""
        at = bisect_left(self._deadlines, request.deadline_ms, self._head)
        if request not in self._requests[at : bisect_right(self._deadlines, request.deadline_ms, at)]:
            return False
        at = self._requests.index(request, at)
        self._uncount([request])
        del self._deadlines[at], self._requests[at]
        return True

    def _take_where(self, k: int, wanted: Callable[[Any], bool], most: float = math.inf) -> list[Request]:
        taken: list[Request] = []
        kept: list[Request] = []
        end = self._head
        last = min(len(self._requests), end + most)
        while end < last and len(taken) < k:
            request = self._requests[end]
            (taken if wanted(request) else kept).append(request)
            end += 1
        self._uncount(taken)
        start = end - len(kept)
        self._requests[start:end] = kept
        self._deadlines[start:end] = [request.deadline_ms for request in kept]
        self._advance(start)
        return taken

    def _uncount(self, requests: Sequence[Request]) -> None:
        """Subtract requests that leave from those with a floor and those with a rank."""
        if self.demanding:
            self.demanding -= sum(request.ask.floor > NO_FLOOR for request in requests)
        if self.prioritised:
            self.prioritised -= sum(request.rank != 0 for request in requests)

    def _advance(self, end: int) -> None:
        self._requests[self._head : end] = repeat(None, end - self._head)
        if end == len(self._deadlines) or (end > _COMPACT_FROM and 2 * end > len(self._deadlines)):
            del self._deadlines[:end], self._requests[:end]
            end = 0
        self._head = end
