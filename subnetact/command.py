"""What all commands share: JSON as an option, and a quiet end on Ctrl-C and closed pipes.

A daemon thread that is inside torch when the interpreter ends aborts the process (SIGABRT), so the threads of
the library run networks in `computing()`: from then on none begins, and those that compute are waited for.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from subnetact.files.documents import parse_json

__all__ = ["INTERRUPTED", "NOBODY_READS", "TERMINATED", "computing", "json_object", "run_command"]

INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 and the number of SIGINT."""
TERMINATED = 143
"""The exit status after SIGTERM, if there is something to clean up: 128 and the number of SIGTERM."""
NOBODY_READS = 141
"""The exit status if the output goes to a program that has ended: 128 and the number of SIGPIPE."""
WAIT_S = 10.0
"""The longest time that the end of the interpreter waits for threads that compute."""
HELD_S = 30.0
"""Seconds after the end began at which held threads may compute again, so that a later `close` returns."""


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run the main function of a command, and end the process with the exit status that it returns."""
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        status = NOBODY_READS
        # Python writes what is left when it ends, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that an option of a command line holds, for `type=` of argparse."""
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object such as '{{\"n_classes\": 10}}'")
    return found


class _Computing:
    """The threads that compute now, by their identifiers."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.threads: set[int] = set()
        self.ended_s: float | None = None

    def begin(self, thread: int) -> None:
        """Note that a thread computes; when the interpreter ends, hold the thread."""
        with self.changed:
            while self.ended_s is not None and (left := self.ended_s + HELD_S - time.monotonic()) > 0:
                self.changed.wait(left)
            self.threads.add(thread)

    def end(self, thread: int) -> None:
        """Note that a thread does not compute any more."""
        with self.changed:
            self.threads.discard(thread)
            self.changed.notify_all()

    def end_all(self) -> None:
        """Let no thread begin to compute, and wait for those that do."""
        with self.changed:
            self.ended_s = time.monotonic()
            own = {threading.get_ident()}
            self.changed.wait_for(lambda: self.threads <= own, WAIT_S)


_now = _Computing()


@contextmanager
def computing() -> Iterator[None]:
    """Return a context in which a daemon thread may compute: the end of the interpreter waits for it."""
    now, thread = _now, threading.get_ident()
    if thread in now.threads:
        yield
        return
    now.begin(thread)
    try:
        yield
    finally:
        now.end(thread)


def _after_fork() -> None:
    global _now
    _now = _Computing()  # The threads did not come along, and one of them may have held the lock.


atexit.register(lambda: _now.end_all())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
