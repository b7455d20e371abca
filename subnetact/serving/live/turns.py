"""`WorkerTurns`: several batchers take turns on the same workers, each with a share of the time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from threading import Condition

__all__ = ["Turn", "WorkerTurns"]


class Turn:
    """The right to use one worker until `WorkerTurns.end`.

    Attributes:
        worker: number of the worker.
        batcher: name of the batcher.
        began_s: when the turn began, s.
    """

    __slots__ = ("batcher", "began_s", "worker")

    def __init__(self, worker: int, batcher: str) -> None:
        self.worker = worker
        self.batcher = batcher
        self.began_s = time.perf_counter()


class WorkerTurns:
    """Decides which of several batchers uses a worker next. Any thread may call the methods.

    Start-time fair queueing: every batcher has a virtual time, which grows by the time that it used divided
    by its share. A free worker goes to the waiting batcher with the least virtual time. Whoever did not wait
    for a while starts at the present virtual time, so that nobody saves up a claim. A batcher thus waits for
    one batch of another, however many requests the other has.

    Args:
        shares: the share of every batcher, > 0.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = dict(shares)
        self._virtual = dict.fromkeys(shares, 0.0)
        self._now = 0.0
        self._holders: dict[int, Turn] = {}
        self._waiting: dict[int, dict[str, int]] = {}
        self._changed = Condition()
        self.used_ms = dict.fromkeys(shares, 0.0)

    def take(self, worker: int, batcher: str) -> Turn:
        """Wait for the turn of a batcher on a worker.

        Args:
            worker: number of the worker.
            batcher: name of the batcher.

        Returns:
            The turn.
        """
        with self._changed:
            waiting = self._waiting.setdefault(worker, {})
            waiting[batcher] = waiting.get(batcher, 0) + 1
            self._virtual[batcher] = max(self._virtual[batcher], self._now)
            try:
                while worker in self._holders or min(waiting, key=self._order) != batcher:
                    self._changed.wait()
                self._now = max(self._now, self._virtual[batcher])
                turn = self._holders[worker] = Turn(worker, batcher)
                return turn
            finally:
                waiting[batcher] -= 1
                if not waiting[batcher]:
                    del waiting[batcher]

    def _order(self, batcher: str) -> tuple[float, str]:
        return self._virtual[batcher], batcher

    def end(self, turn: Turn) -> None:
        """End a turn, and let the next batcher use the worker.

        Args:
            turn: the turn; if it was ended before, nothing happens.
        """
        with self._changed:
            if self._holders.get(turn.worker) is turn:
                self._end(turn)

    def end_of(self, worker: int, batcher: str) -> None:
        """End the turn of a batcher on a worker, if it has one, because the worker was lost.

        Args:
            worker: number of the worker.
            batcher: name of the batcher.
        """
        with self._changed:
            turn = self._holders.get(worker)
            if turn is not None and turn.batcher == batcher:
                self._end(turn)

    def _end(self, turn: Turn) -> None:
        del self._holders[turn.worker]
        used_ms = (time.perf_counter() - turn.began_s) * 1e3
        self.used_ms[turn.batcher] += used_ms
        self._virtual[turn.batcher] += used_ms / self._shares[turn.batcher]
        self._changed.notify_all()
