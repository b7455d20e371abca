"""Memory that the C allocator keeps after it was freed, and how to return it to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

__all__ = ["give_back"]


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return trim


def give_back() -> bool:
    """Return free pages of glibc's heaps to the system; tell whether there were any.

    Each thread frees into a heap of its own, and what it freed is of no use to the others: without this,
    a process of many threads holds several times the bytes that are in use. Other C libraries: nothing.
    """
    trim = _trim()
    return trim is not None and bool(trim(0))
