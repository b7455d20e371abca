"""Which numbers make a latency table, and what is said about those that make none."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from subnetact.errors import TableError
from subnetact.spec import shown

Floats: TypeAlias = npt.NDArray[np.float64]
LARGEST_BATCH = 65_536
"""The largest batch size of any table, which keeps an entry in memory for every size up to its own."""


def warn_of_fractions(accuracy: Sequence[Any]) -> None:
    """Warn if the accuracies that are known look like fractions of 1 instead of percent."""
    known = [value for value in accuracy if isinstance(value, float) and value == value]
    if known and 0.0 < max(known) <= 1.0:
        warnings.warn(
            f"accuracy is in percent, 0 to 100, but the highest of {len(known)} is {max(known)}; "
            f"a fraction? {max(known)} of 1 is {100 * max(known):g} percent",
            UserWarning,
            stacklevel=3,
        )


def ascending_sizes(batch_sizes: Sequence[object], name: str = "batch_sizes") -> tuple[int, ...]:
    """Return batch sizes as Python integers, after checking that they are positive and ascend."""
    sizes: list[int] = []
    for i, size in enumerate(batch_sizes):
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise TableError(f"{name}[{i}]: {shown(size)} is not a positive integer")
        if size > LARGEST_BATCH:
            raise TableError(f"{name}[{i}]: {shown(size)} is larger than {LARGEST_BATCH}")
        if sizes and size <= sizes[-1]:
            raise TableError(f"{name}[{i}]: {size} does not ascend from {sizes[-1]}")
        sizes.append(int(size))
    if not sizes:
        raise TableError(f"{name}: empty; give at least one number")
    return tuple(sizes)


def number(value: object, name: str) -> float:
    """Return a finite number as a float; `name` is for messages."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TableError(f"{name}: {shown(value)} is not a number")
    if not abs(value) <= sys.float_info.max:
        raise TableError(f"{name}: {shown(value)} must be finite, and no larger than a float can be")
    return float(value)


def percentages(accuracy: Sequence[object], keys: Sequence[str]) -> tuple[float, ...]:
    """Return one accuracy in percent per subnet; NaN, and None, which becomes NaN, are not known."""
    unknown = [v is None or (isinstance(v, float | np.floating) and math.isnan(v)) for v in accuracy]
    percents = tuple(math.nan if unknown[i] else number(v, f"accuracy[{i}]") for i, v in enumerate(accuracy))
    if len(percents) != len(keys):
        raise TableError(f"accuracy: {len(percents)} values for {len(keys)} subnets; give one per subnet")
    for key, percent in zip(keys, percents, strict=True):
        if percent < 0.0 or percent > 100.0:
            raise TableError(f"accuracy of {key!r}: {percent} is not a percentage; give 0 to 100")
    return percents


def checked_cells(
    name: str,
    values: npt.ArrayLike,
    keys: Sequence[str],
    sizes: Sequence[int],
    *,
    positive: bool = False,
) -> Floats:
    """Return a read-only copy of shape (subnets, batch sizes) of finite values; NaN stays."""
    try:
        cells = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise TableError(
            f"{name}: not an array of numbers ({error}); give one number per subnet and batch size"
        ) from error
    if cells.shape != (shape := (len(keys), len(sizes))):
        raise TableError(f"{name}: shape {cells.shape}; expected {shape}, (subnets, batch sizes)")
    wrong = np.isinf(cells) | (cells <= 0 if positive else cells < 0)
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        raise TableError(
            f"{name} of {keys[i]!r} at batch size {sizes[j]}: {cells[i, j]} ms; "
            f"give a finite value {'> 0' if positive else '>= 0'}, or NaN if the cell cannot run"
        )
    cells.setflags(write=False)
    return cells


def json_copy(stamp: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a stamp, as JSON gives it back."""
    try:
        return dict(json.loads(json.dumps(dict(stamp), allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise TableError(f"stamp: not serialisable as JSON ({error})") from error
