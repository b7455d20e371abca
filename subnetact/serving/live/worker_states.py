"""Which workers there are, when each is free, and when one that was lost comes back."""

from __future__ import annotations

import math

__all__ = ["WorkerStates"]

_FIRST_PAUSE_MS = 100.0
_LONGEST_PAUSE_MS = 10_000.0
_MOST_STUCK = 4


class WorkerStates:
    """The workers of one batcher, by number. Its owner locks.

    A worker that hung or died comes back at once the first time; after every further loss without a batch
    in between it pauses twice as long, from 0.1 to 10 s. While four of its threads hang, it stays down.

    Attributes:
        free_at_ms: when each is expected to be free; inf for one that is down or seems to hang.
    """

    def __init__(self, workers: int) -> None:
        self.free_at_ms = [0.0] * workers
        self._back_ms: dict[int, float] = {}
        self._losses = [0] * workers
        self._stuck = [0] * workers

    def up(self) -> int:
        """How many are up."""
        return len(self.free_at_ms) - len(self._back_ms)

    def any_down(self) -> bool:
        """Whether one is down."""
        return bool(self._back_ms)

    def hope(self) -> bool:
        """Whether one is up, or will come back by itself."""
        return self.up() > 0 or any(self._stuck[worker] < _MOST_STUCK for worker in self._back_ms)

    def succeeded(self, worker: int) -> None:
        """A batch came back from it."""
        self._losses[worker] = 0

    def down(self, worker: int, now_ms: float) -> None:
        """Its thread ended."""
        losses = self._losses[worker]
        pause_ms = min(_FIRST_PAUSE_MS * 2.0 ** (losses - 1), _LONGEST_PAUSE_MS) if losses else 0.0
        self._losses[worker] = losses + 1
        self._back_ms[worker] = now_ms + pause_ms
        self.free_at_ms[worker] = math.inf

    def hung(self, worker: int, now_ms: float) -> None:
        """Its thread does not come back."""
        self._stuck[worker] += 1
        self.down(worker, now_ms)

    def hangs(self, worker: int) -> bool:
        """Whether it is down and a thread of it hangs."""
        return worker in self._back_ms and self._stuck[worker] > 0

    def came_back(self, worker: int) -> None:
        """A thread that hung has ended."""
        self._stuck[worker] -= 1

    def due(self, now_ms: float) -> list[int]:
        """Bring back the workers whose pause is over."""
        back = [
            worker
            for worker, back_ms in self._back_ms.items()
            if back_ms <= now_ms and self._stuck[worker] < _MOST_STUCK
        ]
        for worker in back:
            del self._back_ms[worker]
            self.free_at_ms[worker] = now_ms
        return back
