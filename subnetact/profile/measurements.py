"""What a sweep has measured so far."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from subnetact.journal import Journal
from subnetact.profile.stability import CLOCKS, Window, stable
from subnetact.profile.sweep_settings import SweepSettings

__all__ = ["Cell", "Measurements"]

Cell: TypeAlias = tuple[int, int, int]
"""(number of co-runners, subnet, batch size)."""


class Measurements:
    """What was measured so far: windows by cell, and the cells without memory. Kept in a journal, if any.

    Args:
        journal: where they are, and go.
        record: the name of its records, so that one journal may hold several sweeps.
    """

    def __init__(self, journal: Journal | None = None, record: str = "window") -> None:
        self.windows: dict[Cell, list[Window]] = {}
        self.out_of_memory: set[Cell] = set()
        self._stable: dict[Cell, tuple[int, bool]] = {}
        self._journal = journal
        self._record = record
        for line in journal.of(record) if journal else ():
            level, subnet, batch_size = line["cell"]
            window = {clock: np.array(line[clock]) for clock in CLOCKS if clock in line}
            self._put((level, subnet, batch_size), window or None)

    def add(self, cell: Cell, window: Window | None) -> None:
        """Keep one window; None where the memory ran out."""
        if self._journal is not None:
            times = {clock: np.round(values, 6).tolist() for clock, values in (window or {}).items()}
            self._journal.append(self._record, cell=list(cell), **times)
            window = window and {clock: np.array(values) for clock, values in times.items()}
        self._put(cell, window)

    def impossible(self, cell: Cell) -> bool:
        """Tell whether this cell, or a smaller batch of the same subnet, ran out of memory."""
        level, subnet, batch_size = cell
        return any((n, i) == (level, subnet) and b <= batch_size for n, i, b in self.out_of_memory)

    def wants(self, cell: Cell, settings: SweepSettings) -> bool:
        """Tell whether a cell needs one more window: too few yet, or its median not known well enough."""
        windows = self.windows.get(cell, [])
        if self.impossible(cell) or len(windows) >= settings.max_windows:
            return False
        return len(windows) < settings.windows or not self.stable(cell, settings)

    def stable(self, cell: Cell, settings: SweepSettings) -> bool:
        """Tell whether the median of a cell is known well enough."""
        windows = self.windows.get(cell, [])
        if not windows:
            return False
        known = self._stable.get(cell)
        if known is None or known[0] != len(windows):
            known = self._stable[cell] = len(windows), stable(windows, settings.stability)
        return known[1]

    def _put(self, cell: Cell, window: Window | None) -> None:
        if window is None:
            self.out_of_memory.add(cell)
        else:
            self.windows.setdefault(cell, []).append(window)
