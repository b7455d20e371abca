"""TableArrays: the validated, immutable contents of a latency table.

`LatencyTable` adds the operations. Functions that only read a table (its file, merging, comparing) take
`TableArrays`, so that they do not depend on the class that offers them as methods.
"""

from __future__ import annotations

import json
import math
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from subnetact.errors import TableError
from subnetact.spec import shown

__all__ = ["Floats", "TableArrays", "ascending_sizes", "warn_of_fractions"]

Floats: TypeAlias = npt.NDArray[np.float64]
Table = TypeVar("Table", bound="TableArrays")
LARGEST_BATCH = 65_536
"""The largest batch size of any table. A table keeps an entry in memory for every size up to its own."""


@dataclass(frozen=True, eq=False, repr=False)
class TableArrays:
    """The contents of a latency table; the attributes are described at `LatencyTable`.

    Instances are immutable and are made with `from_arrays`. Every instance is valid: all arrays have one
    value per subnet and batch size, and all latencies are > 0 or NaN.
    """

    subnets: tuple[str, ...]
    accuracy: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    latency_ms: Floats
    statistics: Mapping[str, Floats]
    stamp: Mapping[str, Any]
    co_runners: tuple[float, ...]
    co_runner_ms: Floats
    pad_index: tuple[int, ...] = field(init=False)

    @classmethod
    def from_arrays(
        cls: type[Table],
        subnets: Sequence[str],
        accuracy: Sequence[float],
        batch_sizes: Sequence[int],
        latency_ms: npt.ArrayLike,
        statistics: Mapping[str, npt.ArrayLike] | None = None,
        stamp: Mapping[str, Any] | None = None,
        co_runners: Sequence[float] = (),
        co_runner_ms: npt.ArrayLike | None = None,
    ) -> Table:
        """Build a table.

        Args:
            subnets: one unique key per subnet.
            accuracy: the accuracy of each subnet, percent, from 0 to 100; NaN if it is not known.
            batch_sizes: positive integers, ascending.
            latency_ms: shape (subnets, batch sizes), ms; NaN for a cell that cannot run.
            statistics: further arrays of the same shape, by name.
            stamp: facts about the measurement, of values that JSON can hold.
            co_runners: the numbers of co-runners that `co_runner_ms` was measured with, ascending, >= 0.
            co_runner_ms: shape (numbers of co-runners, subnets, batch sizes), ms.

        Returns:
            The table, with copies of all arrays.

        Raises:
            TableError: an argument makes no table; the message names the first wrong value and its place.

        Example:
            >>> table = LatencyTable.from_arrays(["small", "large"], [70.0, 75.0], [1, 8], [[1, 5], [2, 9]])
            >>> table.latency_at("small", 4)
            2.7142857142857144
        """
        keys, sizes = tuple(str(key) for key in subnets), tuple(batch_sizes)
        none = np.empty((0, len(keys), len(sizes)))
        return cls(
            keys,
            tuple(accuracy),
            sizes,
            _array("latency_ms", latency_ms),
            {str(n): _array(f"statistics[{n!r}]", values) for n, values in (statistics or {}).items()},
            stamp or {},
            tuple(co_runners),
            none if co_runner_ms is None else _array("co_runner_ms", co_runner_ms),
        )

    def __post_init__(self) -> None:
        keys = self.subnets
        if not keys:
            raise TableError("subnets: the table is empty; give at least one subnet")
        repeated = sorted(key for key, count in Counter(keys).items() if count > 1)
        if repeated:
            raise TableError(f"subnets: {repeated[0]!r} appears more than once; keys must be unique")
        sizes = ascending_sizes(self.batch_sizes)
        numbers = tuple(_number(value, f"co_runners[{i}]") for i, value in enumerate(self.co_runners))
        if any(number < 0 for number in numbers) or any(a >= b for a, b in pairwise(numbers)):
            raise TableError(f"co_runners: {numbers} must be ascending and >= 0")
        if self.co_runner_ms.shape[:1] != (len(numbers),):
            raise TableError(
                f"co_runner_ms: {sum(self.co_runner_ms.shape[:1])} arrays of latencies for {len(numbers)} "
                "numbers of co-runners; give one array per number"
            )
        latency_ms = _cells("latency_ms", self.latency_ms, keys, sizes, positive=True)
        if np.isnan(latency_ms).all():
            raise TableError("latency_ms: every cell is NaN; no subnet can run at any batch size")
        co_runner_ms: Floats = np.empty((len(numbers), len(keys), len(sizes)))
        for i, cells in enumerate(self.co_runner_ms):
            co_runner_ms[i] = _cells(f"co_runner_ms[{i}]", cells, keys, sizes, positive=True)
        co_runner_ms.setflags(write=False)
        statistics = {n: _cells(f"statistics[{n!r}]", a, keys, sizes) for n, a in self.statistics.items()}
        checked = {
            "accuracy": _percentages(self.accuracy, keys),
            "batch_sizes": sizes,
            "latency_ms": latency_ms,
            "statistics": MappingProxyType(statistics),
            "stamp": MappingProxyType(_json_copy(self.stamp)),
            "co_runners": numbers,
            "co_runner_ms": co_runner_ms,
            "pad_index": tuple(bisect_left(sizes, k) for k in range(sizes[-1] + 1)),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TableArrays):
            return NotImplemented
        facts = [
            (t.subnets, t.batch_sizes, t.co_runners, dict(t.stamp), set(t.statistics)) for t in (self, other)
        ]
        return facts[0] == facts[1] and all(
            np.array_equal(own, theirs, equal_nan=True)
            for own, theirs in zip(self._numbers(), other._numbers(), strict=True)
        )

    def _numbers(self) -> list[Floats]:
        """Return all arrays in a fixed order."""
        statistics = [self.statistics[name] for name in sorted(self.statistics)]
        return [np.array(self.accuracy), self.latency_ms, self.co_runner_ms, *statistics]

    def __hash__(self) -> int:
        return hash((self.subnets, self.batch_sizes))

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_pickle, (
            type(self),
            self.subnets,
            self.accuracy,
            self.batch_sizes,
            self.latency_ms,
            dict(self.statistics),
            dict(self.stamp),
            self.co_runners,
            self.co_runner_ms,
        )


def _from_pickle(cls: type[TableArrays], *contents: Any) -> TableArrays:
    return cls(*contents)


def warn_of_fractions(accuracy: Sequence[Any]) -> None:
    """Warn if accuracies look like fractions of 1 instead of percent.

    Args:
        accuracy: one value per subnet; NaN if it is not known.
    """
    known = [value for value in accuracy if isinstance(value, float) and value == value]
    if known and 0.0 < max(known) <= 1.0:
        warnings.warn(
            f"accuracy is in percent, 0 to 100, but the highest of {len(known)} is {max(known)}; "
            f"a fraction? {max(known)} of 1 is {100 * max(known):g} percent",
            UserWarning,
            stacklevel=3,
        )


def ascending_sizes(batch_sizes: Sequence[object]) -> tuple[int, ...]:
    """Check batch sizes.

    Args:
        batch_sizes: positive integers, ascending, at least one.

    Returns:
        The same, as Python integers.

    Raises:
        TableError: a value is not an integer from 1 to `LARGEST_BATCH`, or does not ascend.
    """
    sizes: list[int] = []
    for i, size in enumerate(batch_sizes):
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise TableError(f"batch_sizes[{i}]: {shown(size)} is not a positive integer")
        if size > LARGEST_BATCH:
            raise TableError(f"batch_sizes[{i}]: {shown(size)} is larger than {LARGEST_BATCH}")
        if sizes and size <= sizes[-1]:
            raise TableError(f"batch_sizes[{i}]: {size} does not ascend from {sizes[-1]}")
        sizes.append(int(size))
    if not sizes:
        raise TableError("batch_sizes: empty; give at least one batch size")
    return tuple(sizes)


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TableError(f"{name}: {shown(value)} is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise TableError(f"{name}: the number is too large for a floating-point number") from None
    if not math.isfinite(number):
        raise TableError(f"{name}: {value} must be finite")
    return number


def _percentages(accuracy: Sequence[object], keys: Sequence[str]) -> tuple[float, ...]:
    unknown = [isinstance(value, float | np.floating) and math.isnan(value) for value in accuracy]
    percents = tuple(
        math.nan if unknown[i] else _number(value, f"accuracy[{i}]") for i, value in enumerate(accuracy)
    )
    if len(percents) != len(keys):
        raise TableError(f"accuracy: {len(percents)} values for {len(keys)} subnets; give one per subnet")
    for key, percent in zip(keys, percents, strict=True):
        if percent < 0.0 or percent > 100.0:
            raise TableError(f"accuracy of {key!r}: {percent} is not a percentage; give 0 to 100")
    return percents


def _array(name: str, values: npt.ArrayLike) -> Floats:
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise TableError(
            f"{name}: not an array of numbers ({error}); give one number per subnet and batch size"
        ) from error


def _cells(
    name: str, values: Floats, keys: Sequence[str], sizes: Sequence[int], *, positive: bool = False
) -> Floats:
    cells, shape = np.array(values, dtype=np.float64), (len(keys), len(sizes))
    if cells.shape != shape:
        raise TableError(f"{name}: shape {cells.shape}; expected (subnets, batch sizes) = {shape}")
    wrong = np.isinf(cells) | (cells <= 0 if positive else cells < 0)
    if wrong.any():
        i, j = (int(at) for at in np.argwhere(wrong)[0])
        bound = "> 0" if positive else ">= 0"
        raise TableError(
            f"{name} of {keys[i]!r} at batch size {sizes[j]}: {cells[i, j]} ms; "
            f"give a finite value {bound}, or NaN if the cell cannot run"
        )
    cells.setflags(write=False)
    return cells


def _json_copy(stamp: Mapping[str, Any]) -> dict[str, Any]:
    try:
        copy = json.loads(json.dumps(dict(stamp), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise TableError(f"stamp: not serialisable as JSON ({error})") from error
    return dict(copy)
