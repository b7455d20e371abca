"""The state of every worker: when it is free, and when a worker that was lost is started again."""

from __future__ import annotations

import math
from dataclasses import dataclass

_FIRST_PAUSE_MS = 100.0
_LONGEST_PAUSE_MS = 10_000.0
_MOST_HUNG_THREADS = 4
_HOPELESS_LOSSES = 6
"""Losses in a row, without a batch in between, after which nobody waits for a worker to end a batcher."""


def patience_ms(
    watchdog_ms: float | None, expected_ms: float = 0.0, known: bool = False, least_ms: float = 1000.0
) -> float:
    """Return after how long work is taken to hang; if it did not run before (`known`), not within 30 s."""
    if watchdog_ms is not None:
        return watchdog_ms
    return max(least_ms if known else 30_000.0, 20.0 * expected_ms)


@dataclass(slots=True)
class _Worker:
    """One worker; `back_at_ms` is when it is started again, or None if it is not down."""

    starting: bool = False
    back_at_ms: float | None = None
    losses: int = 0
    hung_threads: int = 0


class WorkerStates:
    """The workers of one scheduler, by number.

    A worker that hung or died is started again at once the first time. After every further loss without a
    successful batch in between, the pause before the restart doubles, from 0.1 s to at most 10 s. A worker
    stays down while four of its threads hang.

    A worker is up if it can take a batch now or after the one that it runs: it is not down, and it has
    started. `free_at_ms` is when each worker is expected to be free, in ms; inf for one that is down or seems
    to hang.
    """

    def __init__(self, workers: int) -> None:
        self.free_at_ms = [0.0] * workers
        self._workers = [_Worker() for _ in range(workers)]

    def is_up(self, worker: int) -> bool:
        """Return whether a worker is up."""
        one = self._workers[worker]
        return one.back_at_ms is None and not one.starting

    def up(self) -> int:
        """Return the number of workers that are up."""
        return sum(map(self.is_up, range(len(self._workers))))

    def threads(self) -> int:
        """Return how many threads they have, one for each and those that hang."""
        return sum(1 + one.hung_threads for one in self._workers)

    def is_opening(self) -> bool:
        """Return whether a worker starts that was not lost since its last batch, as all do at first."""
        return any(one.starting and not one.losses for one in self._workers)

    def starting(self, worker: int) -> None:
        """Note that a worker starts, and cannot take a batch until `started`."""
        self._workers[worker].starting = True
        self.free_at_ms[worker] = math.inf

    def started(self, worker: int, now_ms: float) -> None:
        """Note that a worker can take batches."""
        one = self._workers[worker]
        one.starting, one.back_at_ms = False, None
        self.free_at_ms[worker] = now_ms

    def any_down(self) -> bool:
        """Return whether a worker is down."""
        return any(one.back_at_ms is not None for one in self._workers)

    def any_helps(self) -> bool:
        """Return whether a worker is not down, or will be started again and may then succeed."""
        return any(
            one.back_at_ms is None
            or (one.hung_threads < _MOST_HUNG_THREADS and one.losses < _HOPELESS_LOSSES)
            for one in self._workers
        )

    def succeeded(self, worker: int) -> None:
        """Note that a worker finished a batch."""
        self._workers[worker].losses = 0

    def lost(self, worker: int, now_ms: float, hangs: bool = False) -> None:
        """Note that a worker's thread ended or hangs; the worker is down until `restart` returns it."""
        one = self._workers[worker]
        one.hung_threads += hangs
        pause_ms = min(_FIRST_PAUSE_MS * 2.0 ** (one.losses - 1), _LONGEST_PAUSE_MS) if one.losses else 0.0
        one.losses += 1
        one.starting, one.back_at_ms = False, now_ms + pause_ms
        self.free_at_ms[worker] = math.inf

    def hangs(self, worker: int) -> bool:
        """Return whether a worker is down and one of its threads hangs."""
        one = self._workers[worker]
        return one.back_at_ms is not None and one.hung_threads > 0

    def hung_thread_ended(self, worker: int) -> None:
        """Note that a thread of a worker that hung has ended after all."""
        self._workers[worker].hung_threads -= 1

    def restart(self, now_ms: float) -> list[int]:
        """Let the workers whose pause is over start, and return their numbers; `started` follows for each."""
        back = []
        for worker, one in enumerate(self._workers):
            is_due = one.back_at_ms is not None and one.back_at_ms <= now_ms
            if is_due and one.hung_threads < _MOST_HUNG_THREADS:
                one.back_at_ms = None
                self.starting(worker)
                back.append(worker)
        return back
