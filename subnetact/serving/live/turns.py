"""`Turns`: which of several drivers uses a worker next, by their shares of the workers' time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(eq=False)
class Turn:
    """The right of a driver, by its name, to use one worker; it begins at `began_ms`."""

    worker: int
    name: str
    began_ms: float = 0.0


class Turns:
    """Lets drivers use the same workers in turns, by their shares (> 0). Callers hold the `lock`.

    Start-time fair queueing (Goyal et al., 1996): every driver has a virtual time, which grows by the time
    that it used divided by its share. A free worker goes to the driver with the least virtual time among
    those that want it. A driver that was idle starts at the present virtual time, so that idleness earns
    no credit. A driver thus waits for one batch of another, however many requests that has.
    `changed` tells the threads that wait for a turn to look again; `used_ms` is the time that each driver
    used on all workers, and `holders` are the turns that have begun, by worker.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.used_ms = dict.fromkeys(shares, 0.0)
        self._shares = dict(shares)
        self._virtual = dict.fromkeys(shares, 0.0)
        self._now = 0.0
        self.holders: dict[int, Turn] = {}
        self._waiting: dict[int, list[Turn]] = {}

    def want(self, turn: Turn) -> None:
        """Let a turn wait for its worker; nothing happens if it does already."""
        waiting = self._waiting.setdefault(turn.worker, [])
        if turn not in waiting:
            waiting.append(turn)
            self._virtual[turn.name] = max(self._virtual[turn.name], self._now)

    def waiting(self) -> int:
        """Return how many turns wait."""
        return sum(map(len, self._waiting.values()))

    def may_begin(self) -> bool:
        """Tell whether a turn waits for a worker that is free."""
        return any(turns and worker not in self.holders for worker, turns in self._waiting.items())

    def give_up(self, turn: Turn) -> None:
        """Let a turn wait no longer."""
        if turn in self._waiting.get(turn.worker, ()):
            self._waiting[turn.worker].remove(turn)
            self.changed.notify_all()

    def begin(self, turn: Turn, now_ms: float) -> bool:
        """Begin a turn that waits if its worker is free and it goes first; return whether it began."""
        waiting = self._waiting[turn.worker]
        first = min(waiting, key=lambda one: (self._virtual[one.name], one.name))
        if turn.worker in self.holders or first.name != turn.name:
            return False
        waiting.remove(turn)
        self._now = max(self._now, self._virtual[turn.name])
        turn.began_ms = now_ms
        self.holders[turn.worker] = turn
        return True

    def end(self, turn: Turn, now_ms: float) -> None:
        """End a turn, if it holds its worker (still)."""
        if self.holders.get(turn.worker) is turn:
            del self.holders[turn.worker]
            used_ms = now_ms - turn.began_ms
            self.used_ms[turn.name] += used_ms
            self._virtual[turn.name] += used_ms / self._shares[turn.name]
            self.changed.notify_all()
