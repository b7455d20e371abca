"""The state of every worker: when it is free, and when a worker that was lost is started again."""

from __future__ import annotations

import math
from collections.abc import Callable

_FIRST_PAUSE_MS = 100.0
_LONGEST_PAUSE_MS = 10_000.0
_MOST_HUNG_THREADS = 4
_HOPELESS_LOSSES = 6
"""Losses in a row, without a batch in between, after which nobody waits for a worker to end a batcher."""


class WorkerStates:
    """The workers of one scheduler, by number.

    A worker that hung or died is started again at once the first time. After every further loss without a
    successful batch in between, the pause before the restart doubles, from 0.1 s to at most 10 s. A worker
    stays down while four of its threads hang.

    A worker is up if it can take a batch now or after the one that it runs: it is not down, it has started,
    and what it runs batches with is there.
    `is_there` returns whether it is, such as a process that lives; if None, it always is. `free_at_ms` is
    when each worker is expected to be free, in ms; inf for one that is down or seems to hang.
    """

    def __init__(self, workers: int, is_there: Callable[[int], bool] | None = None) -> None:
        self.free_at_ms = [0.0] * workers
        self._is_there = is_there
        self._starting: set[int] = set()
        self._back_at_ms: dict[int, float] = {}
        self._losses = [0] * workers
        self._hung_threads = [0] * workers

    def up(self) -> int:
        """Return the number of workers that are up."""
        there = self._is_there
        away = self._back_at_ms.keys() | self._starting
        return sum(w not in away and (there is None or there(w)) for w in range(len(self.free_at_ms)))

    def is_opening(self) -> bool:
        """Return whether a worker starts that was not lost since its last batch, as all do at first."""
        return any(not self._losses[worker] for worker in self._starting)

    def starting(self, worker: int) -> None:
        """Note that a worker starts, and cannot take a batch until `started`."""
        self._starting.add(worker)
        self.free_at_ms[worker] = math.inf

    def started(self, worker: int, now_ms: float) -> None:
        """Note that a worker can take batches."""
        self._starting.discard(worker)
        self._back_at_ms.pop(worker, None)
        self.book(worker, now_ms)

    def book(self, worker: int, until_ms: float) -> None:
        """Note until when a worker is expected to be busy."""
        self.free_at_ms[worker] = until_ms

    def any_down(self) -> bool:
        """Return whether a worker is down."""
        return bool(self._back_at_ms)

    def any_helps(self) -> bool:
        """Return whether a worker is not down, or will be started again and may then succeed."""
        return any(
            worker not in self._back_at_ms
            or (self._hung_threads[worker] < _MOST_HUNG_THREADS and losses < _HOPELESS_LOSSES)
            for worker, losses in enumerate(self._losses)
        )

    def succeeded(self, worker: int) -> None:
        """Note that a worker finished a batch."""
        self._losses[worker] = 0

    def died(self, worker: int, now_ms: float) -> None:
        """Note that a worker's thread ended; the worker is down until `restart` returns it."""
        losses = self._losses[worker]
        pause_ms = min(_FIRST_PAUSE_MS * 2.0 ** (losses - 1), _LONGEST_PAUSE_MS) if losses else 0.0
        self._losses[worker] = losses + 1
        self._back_at_ms[worker] = now_ms + pause_ms
        self._starting.discard(worker)
        self.free_at_ms[worker] = math.inf

    def hung(self, worker: int, now_ms: float) -> None:
        """Note that a worker's thread hangs; the worker is down until `restart` returns it."""
        self._hung_threads[worker] += 1
        self.died(worker, now_ms)

    def hangs(self, worker: int) -> bool:
        """Return whether a worker is down and one of its threads hangs."""
        return worker in self._back_at_ms and self._hung_threads[worker] > 0

    def hung_thread_ended(self, worker: int) -> None:
        """Note that a thread of a worker that hung has ended after all."""
        self._hung_threads[worker] -= 1

    def restart(self, now_ms: float) -> list[int]:
        """Let the workers whose pause is over start, and return their numbers; `started` follows for each."""
        due = [worker for worker, back_at_ms in self._back_at_ms.items() if back_at_ms <= now_ms]
        back = [worker for worker in due if self._hung_threads[worker] < _MOST_HUNG_THREADS]
        for worker in back:
            del self._back_at_ms[worker]
            self.starting(worker)
        return back
