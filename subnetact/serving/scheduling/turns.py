"""`Turns`: which of several schedulers uses a worker next, by their shares of the workers' time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from subnetact.serving.scheduling.request import Job
from subnetact.serving.scheduling.scheduler import Scheduler


@dataclass(eq=False)
class Turn:
    """The right of a scheduler, by its name, to use one worker; it begins at `began_ms`."""

    worker: int
    name: str
    began_ms: float = 0.0


class Turns:
    """Decides which of several schedulers uses a worker next, without a lock or a clock.

    Start-time fair queueing (Goyal et al., 1996): every scheduler has a virtual time, which grows by the time
    that it used divided by its share. A free worker goes to the scheduler with the least virtual time among
    those that want it. Whoever did not want one for a while starts at the present virtual time, so that
    nobody saves up a claim. A scheduler thus waits for one batch of another, however many requests that has.
    `shares` are > 0, `schedulers` enter themselves, and `used_ms` is the time each used on all workers.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.schedulers: dict[str, Scheduler] = {}
        self.used_ms = dict.fromkeys(shares, 0.0)
        self._shares = dict(shares)
        self._virtual = dict.fromkeys(shares, 0.0)
        self._now = 0.0
        self._holders: dict[int, Turn] = {}
        self._waiting: dict[int, list[Turn]] = {}

    def want(self, turn: Turn) -> None:
        """Let a turn wait for its worker; nothing happens if it does already."""
        waiting = self._waiting.setdefault(turn.worker, [])
        if turn not in waiting:
            waiting.append(turn)
            self._virtual[turn.name] = max(self._virtual[turn.name], self._now)

    def give_up(self, turn: Turn) -> bool:
        """Let a turn wait no longer; return whether it waited."""
        waits = turn in self._waiting.get(turn.worker, ())
        if waits:
            self._waiting[turn.worker].remove(turn)
        return waits

    def begin(self, turn: Turn, now_ms: float) -> bool:
        """Begin a turn that waits if its worker is free and it goes first; return whether it began."""
        waiting = self._waiting[turn.worker]
        first = min(waiting, key=lambda one: (self._virtual[one.name], one.name))
        if turn.worker in self._holders or first.name != turn.name:
            return False
        waiting.remove(turn)
        self._now = max(self._now, self._virtual[turn.name])
        turn.began_ms = now_ms
        self._holders[turn.worker] = turn
        return True

    def end(self, turn: Turn, now_ms: float) -> bool:
        """End a turn; return whether it held its worker (still)."""
        holds = self._holders.get(turn.worker) is turn
        if holds:
            del self._holders[turn.worker]
            used_ms = now_ms - turn.began_ms
            self.used_ms[turn.name] += used_ms
            self._virtual[turn.name] += used_ms / self._shares[turn.name]
        return holds

    def is_wanted(self, worker: int) -> bool:
        """Return whether a scheduler waits for a worker."""
        return bool(self._waiting.get(worker))

    def gives_way(self, turn: Turn, job: Job, done: float, now_ms: float) -> bool:
        """Suspend a job between two steps if a scheduler that would come next has urgent requests."""
        own = self._virtual[turn.name] + (now_ms - turn.began_ms) / self._shares[turn.name]
        return any(
            self._virtual[rival.name] < own
            and self.schedulers[turn.name].suspend_for(self.schedulers[rival.name], job, done, now_ms)
            for rival in self._waiting.get(turn.worker, ())
        )
