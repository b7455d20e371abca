"""Fork: what becomes of locks and threads in a process that was forked while other threads ran.

They do not come along, but the locks that they held stay locked, and nobody would ever open them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock(kind: Callable[[], Any] = threading.Lock) -> Any:
    """Return a lock that is free in a forked process, unless the thread that forked holds it (`RLock`)."""
    lock = kind()
    _locks.add(lock)
    return lock


def hear_of_forks(listener: Any) -> None:
    """Let `listener.note_fork()` be called in every forked process, as long as the listener exists."""
    _listeners.add(listener)


def _note_fork() -> None:
    for lock in list(_locks):
        if not getattr(lock, "_is_owned", bool)():
            lock._at_fork_reinit()
    for listener in list(_listeners):
        listener.note_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
