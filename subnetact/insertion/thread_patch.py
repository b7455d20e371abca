"""thread_patch: replaces functions of another library for one thread, and for no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from subnetact.files.fork import new_lock

_TURN = new_lock(threading.RLock)


@contextmanager
def patched_here(place: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of a module or class for calls from this thread, one thread at a time."""
    threads = {threading.get_ident()}

    def chosen(usual: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(usual)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if threading.get_ident() in threads else usual)(*args, **kwargs)

        return call

    with _TURN:
        replaced: Any = {name: chosen(getattr(place, name), new) for name, new in functions.items()}
        with patch.multiple(place, **replaced):
            try:
                yield
            finally:
                threads.clear()  # Somebody may have kept what stood there meanwhile.
