"""Budget: the bytes that fused programs, or CUDA graphs, may take together."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from subnetact.errors import EngineError
from subnetact.files.fork import new_lock

BUDGET_PER_WEIGHT = 1.25
"""Bytes of the default budget per byte of the weights: enough for the program of the largest subnet."""
LARGEST_BUDGET = 2**30
"""The default budget is at most so many bytes."""


def budget_bytes(mebibytes: Any, weights: int = 0) -> int:
    """Return a memory budget in bytes; None is the default for a supernet of so many bytes of weights."""
    if mebibytes is None:
        return min(int(BUDGET_PER_WEIGHT * weights), LARGEST_BUDGET)
    if isinstance(mebibytes, bool) or not isinstance(mebibytes, int | float) or not 0 <= mebibytes < 2**40:
        raise EngineError(
            f"memory_budget_mb: {mebibytes!r} must be a number of MiB of at least 0; 0 means views only, and "
            "None the default"
        )
    return int(mebibytes * 2**20)


class Budget:
    """Bytes that many holders may take together. Threads may share it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[Hashable, int] = {}
        self._lock = new_lock()

    @property
    def used(self) -> int:
        """The bytes that all holders have together."""
        with self._lock:
            return sum(self._held.values())

    def take(self, holder: Hashable, nbytes: int, grow: bool = False) -> bool:
        """Count bytes for a holder if they are free. To `grow`, it must hold some already."""
        with self._lock:
            if sum(self._held.values()) + nbytes > self.limit or (grow and holder not in self._held):
                return False
            self._held[holder] = self._held.get(holder, 0) + nbytes
            return True

    def free(self, holder: Hashable) -> None:
        """Forget a holder."""
        with self._lock:
            self._held.pop(holder, None)
