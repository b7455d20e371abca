"""Validation and JSON forms of the arrays of a latency table."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import TableError

Floats = npt.NDArray[np.float64]


def number(value: object, name: str) -> float:
    """Return a finite number as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TableError(f"{name}: {value!r} is not a number")
    if not math.isfinite(value):
        raise TableError(f"{name}: {value} must be finite")
    return float(value)


def percentage(value: object, i: int) -> float:
    """Return an accuracy in percent; NaN means that it is not known."""
    unknown = isinstance(value, float | np.floating) and math.isnan(value)
    return math.nan if unknown else number(value, f"accuracy[{i}]")


def warn_of_fractions(accuracy: Sequence[Any]) -> None:
    """Warn if accuracies look like fractions of 1 instead of percent."""
    known = [value for value in accuracy if isinstance(value, float) and value == value]
    if known and 0.0 < max(known) <= 1.0:
        warnings.warn(
            f"accuracy is in percent, 0 to 100, but the highest of {len(known)} is {max(known)}; "
            f"a fraction? {max(known)} of 1 is {100 * max(known):g} percent",
            UserWarning,
            stacklevel=3,
        )


def ascending_sizes(batch_sizes: Sequence[object]) -> tuple[int, ...]:
    """Return batch sizes, which must be positive and ascending."""
    sizes: list[int] = []
    for i, size in enumerate(batch_sizes):
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise TableError(f"batch_sizes[{i}]: {size!r} is not a positive integer")
        if sizes and size <= sizes[-1]:
            raise TableError(f"batch_sizes[{i}]: {size} does not ascend from {sizes[-1]}")
        sizes.append(int(size))
    if not sizes:
        raise TableError("batch_sizes: empty; give at least one batch size")
    return tuple(sizes)


def checked_cells(
    name: str,
    values: npt.ArrayLike,
    shape: tuple[int, int],
    keys: Sequence[str],
    sizes: Sequence[int],
    *,
    positive: bool = False,
) -> Floats:
    """Return one number per subnet and batch size as an array."""
    try:
        cells = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TableError(f"{name}: not an array of numbers of shape {shape} ({error})") from error
    if cells.shape != shape:
        raise TableError(f"{name}: shape {cells.shape}; expected (subnets, batch sizes) = {shape}")
    wrong = np.isinf(cells) | (cells <= 0 if positive else cells < 0)
    if wrong.any():
        i, j = (int(at) for at in np.argwhere(wrong)[0])
        bound = "> 0" if positive else ">= 0"
        raise TableError(
            f"{name} of {keys[i]!r} at batch size {sizes[j]}: {cells[i, j]} ms; "
            f"give a finite value {bound}, or NaN where it cannot run"
        )
    cells.setflags(write=False)
    return cells


def checked_levels(
    values: npt.ArrayLike | None,
    levels: Sequence[float],
    shape: tuple[int, int],
    keys: Sequence[str],
    sizes: Sequence[int],
) -> Floats:
    """Return one array of cells per number of co-runners."""
    given = [] if values is None else list(np.asarray(values, dtype=np.float64))
    if len(given) != len(levels):
        raise TableError(f"co_runner_ms: {len(given)} levels for {len(levels)} of co_runners")
    planes = [
        checked_cells(f"co_runner_ms[{i}]", plane, shape, keys, sizes, positive=True)
        for i, plane in enumerate(given)
    ]
    stacked: Floats = np.stack(planes) if planes else np.empty((0, *shape))
    stacked.setflags(write=False)
    return stacked


def json_copy(stamp: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a stamp as JSON would give it back."""
    try:
        copy = json.loads(json.dumps(dict(stamp), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TableError(f"stamp: not serialisable as JSON ({error})") from error
    return dict(copy)


def with_nulls(values: Floats) -> list[list[float | None]]:
    """Replace NaN by None, which JSON can hold."""
    return [[None if math.isnan(value) else value for value in row] for row in values.tolist()]


def with_nans(values: Any) -> Any:
    """Replace None by NaN, the inverse of `with_nulls`."""
    if isinstance(values, list):
        return [with_nans(value) for value in values]
    return math.nan if values is None else values
