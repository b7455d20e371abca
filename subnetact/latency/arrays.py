"""Which numbers make a latency table, and what is said about those that make none."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from subnetact.errors import TableError
from subnetact.spec import shown

__all__ = [
    "LARGEST_BATCH",
    "Floats",
    "array_of",
    "ascending_sizes",
    "checked_cells",
    "json_copy",
    "number",
    "percentages",
    "warn_of_fractions",
]

Floats: TypeAlias = npt.NDArray[np.float64]
LARGEST_BATCH = 65_536
"""The largest batch size of any table. A table keeps an entry in memory for every size up to its own."""


def warn_of_fractions(accuracy: Sequence[Any]) -> None:
    """Warn if accuracies, of which NaN ones are not known, look like fractions of 1 instead of percent."""
    known = [value for value in accuracy if isinstance(value, float) and value == value]
    if known and 0.0 < max(known) <= 1.0:
        warnings.warn(
            f"accuracy is in percent, 0 to 100, but the highest of {len(known)} is {max(known)}; "
            f"a fraction? {max(known)} of 1 is {100 * max(known):g} percent",
            UserWarning,
            stacklevel=3,
        )


def ascending_sizes(batch_sizes: Sequence[object]) -> tuple[int, ...]:
    """Return batch sizes as Python integers, after checking that they are positive and ascend."""
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


def number(value: object, name: str) -> float:
    """Return a finite number as a float; `name` is for messages."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TableError(f"{name}: {shown(value)} is not a number")
    try:
        converted = float(value)
    except OverflowError:
        raise TableError(f"{name}: the number is too large for a floating-point number") from None
    if not math.isfinite(converted):
        raise TableError(f"{name}: {value} must be finite")
    return converted


def percentages(accuracy: Sequence[object], keys: Sequence[str]) -> tuple[float, ...]:
    """Return one accuracy in percent per subnet; NaN stays."""
    unknown = [isinstance(value, float | np.floating) and math.isnan(value) for value in accuracy]
    percents = tuple(
        math.nan if unknown[i] else number(value, f"accuracy[{i}]") for i, value in enumerate(accuracy)
    )
    if len(percents) != len(keys):
        raise TableError(f"accuracy: {len(percents)} values for {len(keys)} subnets; give one per subnet")
    for key, percent in zip(keys, percents, strict=True):
        if percent < 0.0 or percent > 100.0:
            raise TableError(f"accuracy of {key!r}: {percent} is not a percentage; give 0 to 100")
    return percents


def array_of(name: str, values: npt.ArrayLike) -> Floats:
    """Return a copy of numbers as an array."""
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise TableError(
            f"{name}: not an array of numbers ({error}); give one number per subnet and batch size"
        ) from error


def checked_cells(
    name: str, values: Floats, keys: Sequence[str], sizes: Sequence[int], *, positive: bool = False
) -> Floats:
    """Return a read-only array (subnets, batch sizes) of finite values; NaN stays."""
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


def json_copy(stamp: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a stamp, as JSON gives it back."""
    try:
        copy = json.loads(json.dumps(dict(stamp), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise TableError(f"stamp: not serialisable as JSON ({error})") from error
    return dict(copy)
