"""What a sweep has measured so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from subnetact.files.journal import Journal
from subnetact.profile.modes import BESIDE
from subnetact.profile.window import CLOCKS, Window

Cell: TypeAlias = tuple[str, int, int]
"""What one latency belongs to: (mode, index of the subnet, batch size). Only a mode that is measured beside
the first one has its name there."""


class Measurements:
    """The windows of every cell, kept in the lines of a journal that are named `record`."""

    def __init__(self, journal: Journal, record: str = "window") -> None:
        self.windows: defaultdict[Cell, list[Window]] = defaultdict(list)
        self.out_of_memory: set[Cell] = set()
        self._journal = journal
        self._record = record
        with journal.fields():
            for line in journal.of(record):
                self._put(*_read(line))

    def add(self, cell: Cell, window: Window | None) -> None:
        """Keep the times of one window; None says that the memory ran out."""
        times = {clock: np.round(values, 6) for clock, values in (window or {}).items()}
        self._journal.append(self._record, cell=list(cell), **{c: t.tolist() for c, t in times.items()})
        self._put(cell, times or None)

    def impossible(self, cell: Cell) -> bool:
        """Tell whether this cell, or a smaller batch of the same subnet, ran out of memory."""
        return any(one[:2] == cell[:2] and one[2] <= cell[2] for one in self.out_of_memory)

    def _put(self, cell: Cell, window: Window | None) -> None:
        if window is None:
            self.out_of_memory.add(cell)
        else:
            self.windows[cell].append(window)


def _read(line: Mapping[str, Any]) -> tuple[Cell, Window | None]:
    mode, subnet, batch_size = line["cell"]
    if mode not in ("", *BESIDE) or not all(type(n) is int and n >= 0 for n in (subnet, batch_size)):
        raise ValueError(f"a cell {line['cell']!r}")
    window = {name: np.array(line[name], np.float64) for name in (*CLOCKS, "busy") if name in line}
    for times in window.values():
        if times.ndim != 1 or not times.size or not np.isfinite(times).all() or times.min() < 0:
            raise ValueError("times in ms that are not finite numbers >= 0")
    return (mode, subnet, batch_size), window or None
