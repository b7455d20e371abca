"""Merging two latency tables into one with more subnets, more batch sizes, or both."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import TableError
from subnetact.latency.arrays import Floats, TableArrays
from subnetact.latency.compare import differing_facts

__all__ = ["merge"]

SAME = ("device", "device_name", "instructions", "torch", "threads", "dtype", "input_shape", "input_dtype",
        "space", "supernet", "mode", "statistic", "include_actuation", "include_h2d", "channels_last",
        "co_runner_subnet")  # fmt: skip
"""Facts of the stamps that must be equal, because latencies are not comparable otherwise."""
OF_SUBNETS = ("out_of_memory", "subnet_dimension", "dominated")
"""Facts about the subnets of one table, by their index there; they do not hold for the merged table."""


def merge(first: TableArrays, second: TableArrays) -> dict[str, Any]:
    """Merge two tables; see `LatencyTable.merged`.

    Args:
        first: a table.
        second: another; a cell that both have is taken from this one.

    Returns:
        The arguments with which `TableArrays.from_arrays` makes the merged table.

    Raises:
        TableError: the tables were not measured alike, or contradict each other.
    """
    differing = differing_facts(first.stamp, second.stamp)
    apart = {name: values for name, values in differing.items() if name in SAME}
    if apart:
        shown = "; ".join(f"{name}: {a!r} and {b!r}" for name, (a, b) in apart.items())
        raise TableError(
            f"the tables were not measured alike and cannot be merged: {shown}; profile both alike"
        )
    if first.co_runners != second.co_runners:
        raise TableError(
            f"the tables have co_runners {list(first.co_runners)} and {list(second.co_runners)}; "
            "merge tables with the same numbers, or table.at_co_runners(number)"
        )
    keys = [*first.subnets, *(key for key in second.subnets if key not in set(first.subnets))]
    sizes = sorted({*first.batch_sizes, *second.batch_sizes})
    shape = len(keys), len(sizes)

    def placed(table: TableArrays, values: Floats) -> Floats:
        at = np.ix_([keys.index(k) for k in table.subnets], [sizes.index(b) for b in table.batch_sizes])
        cells = np.full((*values.shape[:-2], *shape), np.nan)
        cells[..., at[0], at[1]] = values
        return cells

    of_second: npt.NDArray[np.bool_] = ~np.isnan(placed(second, np.ones(second.latency_ms.shape)))

    def joined(a: Floats, b: Floats) -> Floats:
        return np.where(of_second, placed(second, b), placed(first, a))

    def statistic(table: TableArrays, name: str) -> Floats:
        return table.statistics.get(name, np.full(table.latency_ms.shape, np.nan))

    names = [*first.statistics, *(name for name in second.statistics if name not in first.statistics)]
    stamp = {
        key: value
        for key, value in first.stamp.items()
        if key not in OF_SUBNETS and second.stamp.get(key) == value
    }
    return {
        "subnets": keys,
        "accuracy": [_accuracy(first, second, key) for key in keys],
        "batch_sizes": sizes,
        "latency_ms": joined(first.latency_ms, second.latency_ms),
        "statistics": {name: joined(statistic(first, name), statistic(second, name)) for name in names},
        "stamp": {**stamp, "merged_from": [dict(first.stamp), dict(second.stamp)]},
        "co_runners": first.co_runners,
        "co_runner_ms": joined(first.co_runner_ms, second.co_runner_ms),
    }


def _accuracy(first: TableArrays, second: TableArrays, key: str) -> float:
    known = {
        table.accuracy[table.subnets.index(key)]
        for table in (first, second)
        if key in table.subnets and not math.isnan(table.accuracy[table.subnets.index(key)])
    }
    if len(known) > 1:
        raise TableError(
            f"accuracy of {key!r}: {' and '.join(map(str, sorted(known)))}; "
            "give both tables the same with table.with_accuracy([...])"
        )
    return known.pop() if known else math.nan
