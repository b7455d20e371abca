"""`computing()`: what lets the interpreter end while daemon threads run networks.

A daemon thread that is inside torch when the interpreter ends aborts the process (SIGABRT). From then on no
thread begins to compute, and those that compute are waited for.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from subnetact.files.fork import hear_of_forks

WAIT_S = 10.0
"""The longest time that the end of the interpreter waits for threads that compute."""
HELD_S = 30.0
"""Seconds after the end began at which held threads may compute again, so that a later `close` returns."""


class _Computing:
    """The threads that compute now, by their identifiers."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.threads: set[int] = set()
        self.ended_s: float | None = None

    def note_fork(self) -> None:
        """Begin anew: the threads do not come along, and one may have held the lock."""
        self.__init__()  # type: ignore[misc]

    def end_all(self) -> None:
        """Let no thread begin to compute, and wait for those that do."""
        with self.changed:
            self.ended_s = time.monotonic()
            self.changed.wait_for(lambda: self.threads <= {threading.get_ident()}, WAIT_S)


_now = _Computing()


@contextmanager
def computing() -> Iterator[None]:
    """Return a context in which a daemon thread may compute: the end of the interpreter waits for it."""
    now, thread = _now, threading.get_ident()
    with now.changed:
        while now.ended_s is not None and (left := now.ended_s + HELD_S - time.monotonic()) > 0:
            now.changed.wait(left)
        now.threads.add(thread)
    try:
        yield
    finally:
        with now.changed:
            now.threads.discard(thread)
            now.changed.notify_all()


atexit.register(lambda: _now.end_all())
hear_of_forks(_now)
