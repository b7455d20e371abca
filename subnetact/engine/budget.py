"""Budget: the bytes that fused programs, or CUDA graphs, may take together."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock

__all__ = ["Budget"]


class Budget:
    """Bytes that many holders may take together. Threads may share it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[Hashable, int] = {}
        self._lock = Lock()

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
