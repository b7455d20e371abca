"""`WorkerTurns`: several batchers take turns on the same workers, each with a share of the time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Condition

__all__ = ["Turn", "WorkerTurns"]


class Turn:
    """The right of a batcher to use one worker until `WorkerTurns.end`.

    Attributes:
        worker: number of the worker.
        batcher: name of the batcher.
        began_ms: when the turn began, ms.
    """

    __slots__ = ("batcher", "began_ms", "worker")

    def __init__(self, worker: int, batcher: str) -> None:
        self.worker = worker
        self.batcher = batcher
        self.began_ms = 0.0


class WorkerTurns:
    """Decides which of several batchers uses a worker next. Any thread may call the methods.

    Start-time fair queueing: every batcher has a virtual time, which grows by the time that it used divided
    by its share. A free worker goes to the waiting batcher with the least virtual time. Whoever did not wait
    for a while starts at the present virtual time, so that nobody saves up a claim. A batcher thus waits for
    one batch of another, however many requests the other has.

    Between two blocks of a batch, a batcher may pass its turn on and take the next one for the rest.

    Args:
        shares: the share of every batcher, > 0.
        clock_ms: a monotonic clock, ms.

    Attributes:
        used_ms: the time that every batcher used on all workers together, ms.
        urgent: for every batcher, a function from a time to wait in ms to what `Core.urgent` returns.
    """

    def __init__(self, shares: Mapping[str, float], clock_ms: Callable[[], float]) -> None:
        self._shares = dict(shares)
        self._clock_ms = clock_ms
        self._virtual = dict.fromkeys(shares, 0.0)
        self._now = 0.0
        self._holders: dict[int, Turn] = {}
        self._waiting: dict[int, dict[str, int]] = {}
        self._changed = Condition()
        self.used_ms = dict.fromkeys(shares, 0.0)
        self.urgent: dict[str, Callable[[float], tuple[int, float]]] = {}

    def take(self, worker: int, batcher: str) -> Turn:
        """Wait for the turn of a batcher on a worker.

        Args:
            worker: number of the worker.
            batcher: name of the batcher.

        Returns:
            The turn.
        """
        turn = Turn(worker, batcher)
        with self._changed:
            self._wait(turn)
        return turn

    def _wait(self, turn: Turn) -> None:
        worker, batcher = turn.worker, turn.batcher
        waiting = self._waiting.setdefault(worker, {})
        waiting[batcher] = waiting.get(batcher, 0) + 1
        self._virtual[batcher] = max(self._virtual[batcher], self._now)
        try:
            while worker in self._holders or min(waiting, key=self._order) != batcher:
                self._changed.wait()
            self._now = max(self._now, self._virtual[batcher])
            turn.began_ms = self._clock_ms()
            self._holders[worker] = turn
        finally:
            waiting[batcher] -= 1
            if not waiting[batcher]:
                del waiting[batcher]

    def _order(self, batcher: str) -> tuple[float, str]:
        return self._virtual[batcher], batcher

    def is_wanted(self, worker: int) -> bool:
        """Return, without the lock, whether a batcher waits for a worker.

        Args:
            worker: number of the worker.
        """
        return bool(self._waiting.get(worker))

    def rivals(self, turn: Turn) -> list[str]:
        """Return the batchers that wait for the worker of a turn and would get it if the turn ended now.

        Args:
            turn: a turn that has not ended.
        """
        with self._changed:
            own = self._virtual[turn.batcher] + self._used_ms(turn) / self._shares[turn.batcher]
            return [name for name in self._waiting.get(turn.worker, {}) if self._virtual[name] < own]

    def pass_on(self, turn: Turn) -> None:
        """End a turn, and wait until the same batcher has its next one on the worker.

        Args:
            turn: the turn; afterwards it is the next one.
        """
        with self._changed:
            if self._holders.get(turn.worker) is turn:
                self._end(turn)
            self._wait(turn)

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
        used_ms = self._used_ms(turn)
        self.used_ms[turn.batcher] += used_ms
        self._virtual[turn.batcher] += used_ms / self._shares[turn.batcher]
        self._changed.notify_all()

    def _used_ms(self, turn: Turn) -> float:
        return self._clock_ms() - turn.began_ms
