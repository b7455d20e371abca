"""Virtual time for live batchers: their threads are real, but the clock moves only when all of them wait.

So what a test sees does not depend on how busy the machine is.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from subnetact.serving.live.driver import is_settled

__all__ = ["VirtualTime"]

LIMIT_S = 60.0


class VirtualTime:
    """A clock for `clock_ms=`, with which runners sleep, and which `run` moves.

    A worker's thread either sleeps here, or waits for work, for a turn, or until it is wanted. Once that
    holds for all threads, the next thing happens: a thread wakes, or what was planned with `at`.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._watched: list[Any] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._over = False
        self._sleepers: list[tuple[float, int, threading.Event]] = []
        self._planned: list[tuple[float, int, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now

    def watch(self, batcher: Any) -> Any:
        """Note a Batcher, TenantBatcher or Pipeline whose threads `run` waits for, and return it."""
        inner = batcher.batchers.values() if hasattr(batcher, "batchers") else [batcher]
        self._watched += [one._driver for one in inner]
        return batcher

    def sleep(self, ms: float) -> None:
        event = threading.Event()
        with self._lock:
            if self._over:
                return
            self._sleepers.append((self.now + ms, next(self._numbers), event))
        assert event.wait(LIMIT_S), "nobody moves the clock"

    def at(self, ms: float, function: Callable[[], object]) -> None:
        self._planned.append((ms, next(self._numbers), function))

    def run(self, ms: float = float("inf")) -> None:
        """Let everything happen within a time from now, or until nothing is left to happen."""
        end = self.now + ms
        while True:
            self._settle()
            with self._lock:
                coming = min([*self._sleepers, *self._planned], default=(float("inf"),))
            if coming[0] > end or coming[0] == float("inf"):
                break
            self.now = max(self.now, coming[0])
            if coming in self._planned:
                self._planned.remove(coming)
                coming[2]()
            else:
                with self._lock:
                    self._sleepers.remove(coming)
                coming[2].set()
        if end < float("inf"):
            self.now = end

    def wake_all(self) -> None:
        """Let all threads go on that sleep, for example for ever, and let nobody sleep any more."""
        with self._lock:
            self._over = True
            sleepers, self._sleepers = self._sleepers, []
        for _, _, event in sleepers:
            event.set()

    def _settle(self) -> None:
        limit = time.monotonic() + LIMIT_S
        while not (self._is_settled() and self._is_settled()):
            assert time.monotonic() < limit, "a thread neither sleeps nor waits"
            time.sleep(1e-4)

    def _is_settled(self) -> bool:
        with self._lock:
            asleep = len(self._sleepers)
        return is_settled(self._watched, asleep)

    def send(self, arrivals: Iterable[tuple[float, Callable[[], Any]]]) -> list[Any]:
        """Plan calls at (ms from now, function), run them all, and return what they returned, in order."""
        found: list[Any] = []
        for at, function in arrivals:
            self.at(self.now + at, lambda function=function: found.append(function()))
        self.run()
        return found
