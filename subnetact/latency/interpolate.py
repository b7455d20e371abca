"""Latencies between measured batch sizes, and between measured numbers of co-runners."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from subnetact.errors import TableError

if TYPE_CHECKING:
    from subnetact.latency.table import LatencyTable

__all__ = ["between_co_runners", "between_sizes"]


def between_sizes(table: LatencyTable, subnet: int | str, batch_size: float) -> float:
    """See `LatencyTable.latency_at`."""
    at = table.subnets.index(subnet) if isinstance(subnet, str) and subnet in table.subnets else subnet
    if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < len(table.subnets):
        raise TableError(f"subnet {subnet!r}: not in the table; choose from 0 to {len(table.subnets) - 1}")
    sizes = table.batch_sizes
    if not sizes[0] <= batch_size <= sizes[-1]:
        raise TableError(
            f"batch size {batch_size}: measured were {sizes[0]} to {sizes[-1]}; "
            "nothing is extrapolated, profile more batch sizes"
        )
    upper = bisect_left(sizes, batch_size)
    above = float(table.latency_ms[at, upper])
    if sizes[upper] == batch_size:
        return above
    below = float(table.latency_ms[at, upper - 1])
    return below + (above - below) * (batch_size - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])


def between_co_runners(table: LatencyTable, number: float) -> npt.NDArray[np.float64]:
    """See `LatencyTable.at_co_runners`; only the cells, shape (subnets, batch sizes)."""
    if not table.co_runners:
        raise TableError("co_runners: this table was measured alone; profile it under co-runners first")
    if not math.isfinite(number):
        raise TableError(f"number: {number} must be finite")
    levels = table.co_runners
    number = min(max(number, levels[0]), levels[-1])
    upper = bisect_left(levels, number)
    cells: npt.NDArray[np.float64] = table.co_runner_ms[upper]
    if levels[upper] != number:
        share = (number - levels[upper - 1]) / (levels[upper] - levels[upper - 1])
        cells = (1 - share) * table.co_runner_ms[upper - 1] + share * cells
    return cells
