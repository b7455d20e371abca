"""What each subnet costs on one machine: a validated table of latencies per batch size.

Importing this module needs numpy and nothing else: schedulers and simulators read tables on machines
that have no torch.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact._table_checks import (
    ascending_sizes,
    checked_cells,
    checked_levels,
    json_copy,
    number,
    percentage,
    with_nans,
    with_nulls,
)
from subnetact.errors import FileFormatError, TableError
from subnetact.files import replacing

__all__ = ["LatencyTable"]

SCHEMA = 1
KIND = "subnetact.latency_table"
Floats = npt.NDArray[np.float64]


class LatencyTable:
    """Latency of every (subnet, batch size) on one machine, with the accuracy of every subnet.

    Immutable. A NaN latency marks a cell that cannot run (out of memory); schedulers never choose it.

    Attributes:
        subnets: readable key of each subnet, in id order.
        accuracy: profiled accuracy of each subnet, percent; NaN where it is not known.
        batch_sizes: profiled batch sizes, ascending.
        latency_ms: read-only float64 array, shape (subnets, batch sizes).
        statistics: further read-only arrays of that shape, such as "std", "p50" or "p99", ms.
        interference: pressure of co-runners at each measured level, ascending; empty where not measured.
        contended_ms: latencies under each level, shape (levels, subnets, batch sizes).
        stamp: JSON facts about the machine and the measurement.
    """

    __slots__ = (
        "_pads",
        "accuracy",
        "batch_sizes",
        "contended_ms",
        "interference",
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
    interference: tuple[float, ...]
    contended_ms: Floats
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
        interference: Sequence[float] = (),
        contended_ms: npt.ArrayLike | None = None,
    ) -> LatencyTable:
        """Build a table from arrays shaped (subnets, batch sizes).

        Args:
            subnets: one unique key a subnet.
            accuracy: percent, one a subnet; NaN = not known (see `known_accuracy`).
            batch_sizes: positive, ascending.
            latency_ms: shape (subnets, batch sizes); NaN = not measurable.
            statistics: further arrays of the same shape, ms.
            stamp: JSON-serialisable facts about the measurement.
            interference: levels of pressure at which `contended_ms` was measured, ascending, >= 0.
            contended_ms: shape (levels, subnets, batch sizes).

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
        levels = tuple(number(value, f"interference[{i}]") for i, value in enumerate(interference))
        if any(level < 0 for level in levels) or any(a >= b for a, b in pairwise(levels)):
            raise TableError(f"interference: {levels} must be ascending and >= 0")
        put("interference", levels)
        put("contended_ms", checked_levels(contended_ms, levels, shape, keys, sizes))
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
        """The same latencies with other accuracies, percent, one a subnet."""
        return LatencyTable.from_arrays(
            self.subnets,
            accuracy,
            self.batch_sizes,
            self.latency_ms,
            self.statistics,
            self.stamp,
            self.interference,
            self.contended_ms if self.interference else None,
        )

    def monotone(self) -> LatencyTable:
        """The same table with latencies that never fall as the batch grows.

        Each cell becomes the largest latency of its subnet at any batch size up to it, so no cell ever
        promises less time than was measured. Cells that cannot run stay NaN.
        """
        filled = np.where(np.isnan(self.latency_ms), -np.inf, self.latency_ms)
        rising = np.maximum.accumulate(filled, axis=1)
        rising[np.isnan(self.latency_ms)] = np.nan
        return self._with(latency_ms=rising)

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
            self.stamp,
            self.interference,
            self.contended_ms[:, rows][:, :, columns] if self.interference else None,
        )

    def scaled(self, factor: float) -> LatencyTable:
        """Every latency multiplied by `factor` > 0: a derated (or another machine's) profile."""
        if not (math.isfinite(factor) and factor > 0):
            raise TableError(f"factor: {factor} must be finite and > 0")
        return self._with(
            latency_ms=self.latency_ms * factor,
            contended_ms=self.contended_ms * factor if self.interference else None,
        )

    def at_interference(self, pressure: float) -> LatencyTable:
        """The table for one level of pressure from co-runners, linear between measured levels.

        Pressure outside the measured levels takes the nearest one. The result has no interference
        dimension of its own.

        Raises:
            TableError: the table has no interference dimension, or `pressure` is not finite.
        """
        if not self.interference:
            raise TableError("interference: this table was measured alone; profile it under co-runners first")
        if not math.isfinite(pressure):
            raise TableError(f"pressure: {pressure} must be finite")
        levels = self.interference
        pressure = min(max(pressure, levels[0]), levels[-1])
        upper = bisect_left(levels, pressure)
        cells = self.contended_ms[upper]
        if levels[upper] != pressure:
            share = (pressure - levels[upper - 1]) / (levels[upper] - levels[upper - 1])
            cells = (1 - share) * self.contended_ms[upper - 1] + share * cells
        return LatencyTable.from_arrays(
            self.subnets, self.accuracy, self.batch_sizes, cells, self.statistics, self.stamp
        )

    def _with(self, latency_ms: Floats, contended_ms: Floats | None = None) -> LatencyTable:
        if contended_ms is None and self.interference:
            contended_ms = self.contended_ms
        return LatencyTable.from_arrays(
            self.subnets,
            self.accuracy,
            self.batch_sizes,
            latency_ms,
            self.statistics,
            self.stamp,
            self.interference,
            contended_ms,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LatencyTable):
            return NotImplemented
        return self._document() == other._document()

    def __hash__(self) -> int:
        return hash((self.subnets, self.accuracy, self.batch_sizes, self.latency_ms.tobytes()))

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _from_document, (self._document(),)

    def __repr__(self) -> str:
        known = [percent for percent in self.accuracy if not math.isnan(percent)]
        span = f"{min(known):g}-{max(known):g} %" if known else "accuracy not known"
        return (
            f"LatencyTable({len(self.subnets)} subnets, {span}, "
            f"batch sizes {list(self.batch_sizes)}, fastest {self.fastest_ms:.3g} ms)"
        )

    def _document(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "kind": KIND,
            "schema": SCHEMA,
            "subnets": list(self.subnets),
            "accuracy": [None if math.isnan(percent) else percent for percent in self.accuracy],
            "batch_sizes": list(self.batch_sizes),
            "latency_ms": with_nulls(self.latency_ms),
            "statistics": {name: with_nulls(values) for name, values in self.statistics.items()},
            "stamp": dict(self.stamp),
        }
        if self.interference:
            document["interference"] = list(self.interference)
            document["contended_ms"] = [with_nulls(level) for level in self.contended_ms]
        return document

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON; an interrupted write leaves any earlier file intact."""
        text = json.dumps(self._document(), indent=1, allow_nan=False)
        with replacing(path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencyTable:
        """Read a table that `save` wrote.

        Raises:
            FileFormatError: truncated, foreign, or of a newer schema.
            TableError: a well-formed file whose numbers make no table.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise FileFormatError(
                f"{path}: not readable as a latency table ({error}); save it again"
            ) from error
        if not isinstance(document, dict) or document.get("kind") != KIND:
            raise FileFormatError(f"{path}: not a latency table; expected a JSON object of kind {KIND!r}")
        schema = document.get("schema")
        if not isinstance(schema, int) or isinstance(schema, bool) or not 1 <= schema <= SCHEMA:
            raise FileFormatError(
                f"{path}: schema {schema!r} is not known here (this version reads 1 to {SCHEMA}); "
                "update subnetact to read it"
            )
        try:
            return _from_document(document)
        except (KeyError, TypeError, AttributeError) as error:
            raise FileFormatError(f"{path}: a field is missing or of the wrong kind: {error!r}") from error


def _from_document(document: Mapping[str, Any]) -> LatencyTable:
    return LatencyTable.from_arrays(
        document["subnets"],
        with_nans(document["accuracy"]),
        document["batch_sizes"],
        with_nans(document["latency_ms"]),
        {name: with_nans(values) for name, values in document["statistics"].items()},
        document["stamp"],
        document.get("interference", ()),
        with_nans(document["contended_ms"]) if "contended_ms" in document else None,
    )
