"""What a sweep has measured so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from subnetact.files.journal import JOURNAL, Journal
from subnetact.profile.stability import CLOCKS, Window, is_stable

__all__ = ["Cell", "Measurements"]

Cell: TypeAlias = tuple[int, int, int]
"""What one latency belongs to: (number of co-runners, index of the subnet, batch size)."""


class Measurements:
    """The windows of every cell, and the cells that ran out of memory.

    If there is a journal, every addition is written to it at once, so that a sweep that is killed loses one
    window at most.

    Args:
        journal: where measurements are kept; those that it already has are read. If None, they are kept in
            memory only.
        record: name of the records in the journal, so that one journal can hold several sweeps.

    Attributes:
        windows: the windows of every cell, in the order they were measured in.
        out_of_memory: the cells that ran out of memory.
    """

    def __init__(self, journal: Journal | None = None, record: str = "window") -> None:
        self.windows: dict[Cell, list[Window]] = {}
        self.out_of_memory: set[Cell] = set()
        self._stable: dict[Cell, tuple[int, bool]] = {}
        self._journal = journal
        self._record = record
        if journal is not None:
            with JOURNAL.fields(journal.path):
                self._read(journal.of(record))

    def _read(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            co_runners, subnet, batch_size = line["cell"]
            if not all(type(n) is int and n >= 0 for n in line["cell"]):
                raise ValueError(f"a cell {line['cell']!r}")
            window = {clock: np.array(line[clock], np.float64) for clock in CLOCKS if clock in line}
            for times in window.values():
                if times.ndim != 1 or not times.size or not np.isfinite(times).all() or times.min() < 0:
                    raise ValueError("times in ms that are not finite numbers >= 0")
            self._put((co_runners, subnet, batch_size), window or None)

    def add(self, cell: Cell, window: Window | None) -> None:
        """Keep one window of a cell.

        Args:
            cell: the cell that was measured.
            window: its times in ms. If None, the memory ran out.
        """
        if self._journal is not None:
            times = {clock: np.round(values, 6).tolist() for clock, values in (window or {}).items()}
            self._journal.append(self._record, cell=list(cell), **times)
            window = window and {clock: np.array(values) for clock, values in times.items()}
        self._put(cell, window)

    def count(self, cell: Cell) -> int:
        """Return how many windows a cell has.

        Args:
            cell: the cell.
        """
        return len(self.windows.get(cell, ()))

    def impossible(self, cell: Cell) -> bool:
        """Return whether this cell, or a smaller batch of the same subnet, ran out of memory.

        Args:
            cell: the cell.
        """
        co_runners, subnet, batch_size = cell
        return any((n, i) == (co_runners, subnet) and b <= batch_size for n, i, b in self.out_of_memory)

    def stable(self, cell: Cell, tolerance: float) -> bool:
        """Return whether the median of a cell is known well enough.

        Args:
            cell: the cell; if it has no windows, the answer is False.
            tolerance: percent of the median; see `subnetact.profile.stability.is_stable`. It must be the
                same in every call.
        """
        count = self.count(cell)
        if not count:
            return False
        known = self._stable.get(cell)
        if known is None or known[0] != count:
            known = self._stable[cell] = count, is_stable(self.windows[cell], tolerance)
        return known[1]

    def _put(self, cell: Cell, window: Window | None) -> None:
        if window is None:
            self.out_of_memory.add(cell)
        else:
            self.windows.setdefault(cell, []).append(window)
