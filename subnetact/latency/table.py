"""What each subnet costs on one machine: a validated table of latencies per batch size.

Importing this module needs numpy and nothing else: schedulers and simulators read tables on machines
that have no torch.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import TableError
from subnetact.latency.compare import Comparison, compare
from subnetact.latency.file import (
    LATENCY_TABLE,
    arguments,
    document,
    read,
    write,
)
from subnetact.latency.interpolate import between_co_runners, between_sizes
from subnetact.latency.merge import merge
from subnetact.latency.superserve import read_superserve
from subnetact.latency.validate import (
    ascending_sizes,
    checked_cells,
    checked_levels,
    json_copy,
    number,
    percentage,
    warn_of_fractions,
)

__all__ = ["LatencyTable"]

Floats = npt.NDArray[np.float64]
NO_TIMES = ("stable", "windows", "runs")
"""Statistics of a profile that are not in ms."""


class LatencyTable:
    """Latency of every (subnet, batch size) on one machine, with the accuracy of every subnet.

    Immutable. A NaN latency marks a cell that cannot run (out of memory); schedulers never choose it.

    Attributes:
        subnets: readable key of each subnet, in id order.
        accuracy: profiled accuracy of each subnet, percent; NaN where it is not known.
        batch_sizes: profiled batch sizes, ascending.
        latency_ms: read-only float64 array, shape (subnets, batch sizes).
        statistics: further read-only arrays of that shape: "std", "p50" or "p99", ms; of a profile also
            "stable" (1 or 0), "windows" and "runs" (counts), and all of them beside 2 co-runners as
            "std_with_2_co_runners" and so on.
        co_runners: numbers of co-runners at which latencies were measured, ascending; empty if none were.
        co_runner_ms: latencies under each level, shape (levels, subnets, batch sizes).
        stamp: JSON facts about the machine and the measurement.
    """

    __slots__ = (
        "_pads",
        "accuracy",
        "batch_sizes",
        "co_runner_ms",
        "co_runners",
        "latency_ms",
        "stamp",
        "statistics",
        "subnets",
    )

    subnets: tuple[str, ...]
    accuracy: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    latency_ms: Floats
    statistics: Mapping[str, Floats]
    co_runners: tuple[float, ...]
    co_runner_ms: Floats
    stamp: Mapping[str, Any]
    _pads: tuple[int, ...]

    def __init__(self) -> None:
        raise TypeError("LatencyTable(...) is not used directly; call from_arrays(...) or load(path)")

    @classmethod
    def from_arrays(
        cls,
        subnets: Sequence[str],
        accuracy: Sequence[float],
        batch_sizes: Sequence[int],
        latency_ms: npt.ArrayLike,
        statistics: Mapping[str, npt.ArrayLike] | None = None,
        stamp: Mapping[str, Any] | None = None,
        co_runners: Sequence[float] = (),
        co_runner_ms: npt.ArrayLike | None = None,
    ) -> LatencyTable:
        """Build a table from arrays shaped (subnets, batch sizes).

        Args:
            subnets: one unique key a subnet.
            accuracy: percent, one a subnet; NaN = not known (see `known_accuracy`).
            batch_sizes: positive, ascending.
            latency_ms: shape (subnets, batch sizes); NaN = not measurable.
            statistics: further arrays of the same shape, ms.
            stamp: JSON-serialisable facts about the measurement.
            co_runners: numbers of co-runners at which `co_runner_ms` was measured, ascending, >= 0.
            co_runner_ms: shape (levels, subnets, batch sizes).

        Raises:
            TableError: naming the first thing that is wrong and where it stands.
        """
        keys = tuple(str(key) for key in subnets)
        if not keys:
            raise TableError("subnets: the table is empty; give at least one subnet")
        repeated = sorted({key for key in keys if keys.count(key) > 1}) if len(set(keys)) < len(keys) else []
        if repeated:
            raise TableError(f"subnets: {repeated[0]!r} appears more than once; keys must be unique")
        percents = tuple(percentage(value, i) for i, value in enumerate(accuracy))
        if len(percents) != len(keys):
            raise TableError(f"accuracy: {len(percents)} values for {len(keys)} subnets; give one a subnet")
        for key, percent in zip(keys, percents, strict=True):
            if percent < 0.0 or percent > 100.0:
                raise TableError(f"accuracy of {key!r}: {percent} is not a percentage; give 0 to 100")
        sizes = ascending_sizes(batch_sizes)
        shape = (len(keys), len(sizes))

        table = object.__new__(cls)
        put = super(LatencyTable, table).__setattr__
        put("subnets", keys)
        put("accuracy", percents)
        put("batch_sizes", sizes)
        put("latency_ms", checked_cells("latency_ms", latency_ms, shape, keys, sizes, positive=True))
        if np.isnan(table.latency_ms).all():
            raise TableError("latency_ms: every cell is NaN; no subnet can run at any batch size")
        extra = {
            str(name): checked_cells(f"statistics[{name!r}]", values, shape, keys, sizes)
            for name, values in (statistics or {}).items()
        }
        put("statistics", MappingProxyType(extra))
        levels = tuple(number(value, f"co_runners[{i}]") for i, value in enumerate(co_runners))
        if any(level < 0 for level in levels) or any(a >= b for a, b in pairwise(levels)):
            raise TableError(f"co_runners: {levels} must be ascending and >= 0")
        put("co_runners", levels)
        put("co_runner_ms", checked_levels(co_runner_ms, levels, shape, keys, sizes))
        put("stamp", MappingProxyType(json_copy(stamp or {})))
        put("_pads", tuple(bisect_left(sizes, k) for k in range(sizes[-1] + 1)))
        return table

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"LatencyTable is immutable; {name!r} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"LatencyTable is immutable; {name!r} cannot be deleted")

    def padded(self, k: int) -> int:
        """Smallest profiled batch size >= k.

        Raises:
            TableError: k is not within 1..the largest profiled batch size.
        """
        if not 1 <= k <= self.batch_sizes[-1]:
            raise TableError(f"batch of {k}: not profiled; the table covers 1 to {self.batch_sizes[-1]}")
        return self.batch_sizes[self._pads[k]]

    @property
    def pad_index(self) -> tuple[int, ...]:
        """Entry k is the column of `padded(k)`, for k in 0..largest batch size."""
        return self._pads

    @property
    def fastest_ms(self) -> float:
        """The least latency of any cell, ms."""
        return float(np.nanmin(self.latency_ms))

    def known_accuracy(self) -> tuple[float, ...]:
        """The accuracy of every subnet, for those who choose by it.

        Raises:
            TableError: naming a subnet whose accuracy is not known.
        """
        for key, percent in zip(self.subnets, self.accuracy, strict=True):
            if math.isnan(percent):
                raise TableError(f"accuracy of {key!r} is not known; give it with table.with_accuracy([...])")
        return self.accuracy

    def with_accuracy(self, accuracy: Sequence[float]) -> LatencyTable:
        """The same latencies with other accuracies, percent, one a subnet.

        Warns where they look like fractions.
        """
        warn_of_fractions(accuracy)
        return LatencyTable.from_arrays(
            self.subnets,
            accuracy,
            self.batch_sizes,
            self.latency_ms,
            self.statistics,
            self.stamp,
            self.co_runners,
            self.co_runner_ms if self.co_runners else None,
        )

    def monotone(self) -> LatencyTable:
        """The same table with latencies that never fall as the batch grows.

        Each cell becomes the largest latency of its subnet at any batch size up to it, so no cell ever
        promises less time than was measured, beside co-runners neither. Cells that cannot run stay NaN.
        """
        return self._with(_rising(self.latency_ms), _rising(self.co_runner_ms), self.statistics)

    def select(
        self, indices: Sequence[int] | None = None, *, batch_sizes: Sequence[int] | None = None
    ) -> LatencyTable:
        """The rows `indices` (in that order) and the columns `batch_sizes`; None keeps all.

        Raises:
            TableError: an index or batch size the table does not have.
        """
        rows = list(range(len(self.subnets))) if indices is None else [int(i) for i in indices]
        for i in rows:
            if not 0 <= i < len(self.subnets):
                raise TableError(f"subnet {i}: not in the table; choose from 0 to {len(self.subnets) - 1}")
        columns = []
        for size in self.batch_sizes if batch_sizes is None else batch_sizes:
            if size not in self.batch_sizes:
                raise TableError(f"batch size {size}: not profiled; choose from {list(self.batch_sizes)}")
            columns.append(self.batch_sizes.index(size))
        cells = np.ix_(rows, columns)
        return LatencyTable.from_arrays(
            [self.subnets[i] for i in rows],
            [self.accuracy[i] for i in rows],
            [self.batch_sizes[j] for j in columns],
            self.latency_ms[cells],
            {name: values[cells] for name, values in self.statistics.items()},
            _selected(self.stamp, rows, [self.batch_sizes[j] for j in columns]),
            self.co_runners,
            self.co_runner_ms[:, rows][:, :, columns] if self.co_runners else None,
        )

    def scaled(self, factor: float) -> LatencyTable:
        """Every latency multiplied by `factor` > 0: a derated (or another machine's) profile."""
        if not (math.isfinite(factor) and factor > 0):
            raise TableError(f"factor: {factor} must be finite and > 0")
        statistics = {
            name: values if _apart(name)[0] in NO_TIMES else values * factor
            for name, values in self.statistics.items()
        }
        return self._with(self.latency_ms * factor, self.co_runner_ms * factor, statistics)

    def at_co_runners(self, number: float) -> LatencyTable:
        """Return the table for a number of co-runners, linear between measured numbers.

        A number outside of the measured ones takes the nearest one. The result has no co-runner dimension;
        the result has statistics only if the number was measured.

        Raises:
            TableError: the table has no co-runner dimension, or `number` is not finite.
        """
        cells = between_co_runners(self, number)
        statistics = {
            _apart(name)[0]: values for name, values in self.statistics.items() if _apart(name)[1] == number
        }
        return LatencyTable.from_arrays(
            self.subnets, self.accuracy, self.batch_sizes, cells, statistics, self.stamp
        )

    def latency_at(self, subnet: int | str, batch_size: float) -> float:
        """Latency, ms, of one subnet at any batch size the table spans, linear between measured ones.

        NaN where one of the two measured sizes around it cannot run.

        Args:
            subnet: its index or key.
            batch_size: from the smallest measured one to the largest; nothing is extrapolated.

        Raises:
            TableError: the table has no such subnet, or the batch size is outside of it.
        """
        return between_sizes(self, subnet, batch_size)

    def merged(self, other: LatencyTable) -> LatencyTable:
        """One table with the subnets and batch sizes of both; cells that neither has are NaN.

        A cell that both have is taken from `other`. The stamp keeps what both say alike, and both stamps.

        Raises:
            TableError: the two were measured on different machines, weights or settings, or at different
                numbers of co-runners; or they know different accuracies of a subnet.
        """
        return LatencyTable.from_arrays(**merge(self, other))

    def compare(self, other: LatencyTable, statistic: str | None = None) -> Comparison:
        """Ratios of `other`'s latencies to this table's, over the cells that both have.

        Args:
            other: another profile of some of the same subnets.
            statistic: a name in `statistics`, `p50` for example; None = `latency_ms`.

        Raises:
            TableError: they have no cell in common, or lack the statistic.
        """
        return compare(self, other, statistic)

    def _with(
        self, latency_ms: Floats, co_runner_ms: Floats, statistics: Mapping[str, Floats]
    ) -> LatencyTable:
        return LatencyTable.from_arrays(
            self.subnets,
            self.accuracy,
            self.batch_sizes,
            latency_ms,
            statistics,
            self.stamp,
            self.co_runners,
            co_runner_ms if self.co_runners else None,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LatencyTable):
            return NotImplemented
        return document(self) == document(other)

    def __hash__(self) -> int:
        return hash((self.subnets, self.accuracy, self.batch_sizes, self.latency_ms.tobytes()))

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _rebuilt, (document(self),)

    def __repr__(self) -> str:
        known = [percent for percent in self.accuracy if not math.isnan(percent)]
        span = f"{min(known):g}-{max(known):g} %" if known else "accuracy not known"
        return (
            f"LatencyTable({len(self.subnets)} subnets, {span}, "
            f"batch sizes {list(self.batch_sizes)}, fastest {self.fastest_ms:.3g} ms)"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON; an interrupted write leaves any earlier file intact."""
        write(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencyTable:
        """Read a table that `save` wrote.

        Raises:
            FileFormatError: truncated, foreign, or of a newer schema.
            TableError: a well-formed file whose numbers make no table.
        """
        given = read(path)
        with LATENCY_TABLE.fields(path):
            return cls.from_arrays(**given)

    @classmethod
    def from_superserve(cls, path: str | os.PathLike[str], stage: str = "forward") -> LatencyTable:
        """Read a profile in the layout that SuperServe's authors publish (JSON, nanoseconds).

        Subnets keep the order of the file; `stamp["subnet_dimension"]` has each one's depths, expand ratios
        and width indices for `space.parse`. Latencies are the means.

        Args:
            path: the file.
            stage: `forward`, the model's own latency; `deserialize`, `h2d_copy`, `postprocess` or
                `d2h_copy`; `total`, their sum.

        Raises:
            FileFormatError: the file has another layout.
            TableError: the stage is unknown, or the numbers make no table.
        """
        return cls.from_arrays(**read_superserve(path, stage))


def _apart(name: str) -> tuple[str, float]:
    """Split a name such as `p99_with_2_co_runners` into the statistic and the number of co-runners."""
    found = re.fullmatch(r"(.+)_with_([0-9.e+]+)_co_runners", name)
    return (found[1], float(found[2])) if found else (name, 0.0)


def _rising(cells: Floats) -> Floats:
    """Each cell, or the largest before it on the last axis; NaN stays NaN."""
    missing = np.isnan(cells)
    rising: Floats = np.maximum.accumulate(np.where(missing, -np.inf, cells), axis=-1)
    return np.where(missing, np.nan, rising)


def _selected(stamp: Mapping[str, Any], rows: Sequence[int], batch_sizes: Sequence[int]) -> dict[str, Any]:
    """The stamp with what it says by row in the order of the rows chosen."""
    found = {name: value for name, value in stamp.items() if name != "beaten"}
    if "out_of_memory" in found:
        found["out_of_memory"] = sorted(
            [level, new, size]
            for level, subnet, size in found["out_of_memory"]
            for new, row in enumerate(rows)
            if row == subnet and size in batch_sizes
        )
    if "subnet_dimension" in found:
        found["subnet_dimension"] = [found["subnet_dimension"][row] for row in rows]
    return found


def _rebuilt(written: Mapping[str, Any]) -> LatencyTable:
    return LatencyTable.from_arrays(**arguments(written))
