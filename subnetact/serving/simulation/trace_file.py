"""Arrival times in a file of a user's own: one column of a CSV or text file, and its unit."""

from __future__ import annotations

import csv
import re
import warnings
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np

from subnetact.errors import TraceError
from subnetact.latency.arrays import Floats

UNITS_MS = {"s": 1e3, "ms": 1.0, "us": 1e-3}
"""The units of times in a file, in ms."""
_VALUE = re.compile(r"[-+]?(\d[\d.e+-]*|\.\d+|nan|inf)|\d+[-:]\d.*", re.IGNORECASE)
_NAMED_UNIT = re.compile(r"(?:^|[^a-z])(s|ms|us)\W*$")


def read_times(name: str, column: str | int | None = None, unit: str | None = None) -> Floats:
    """Return the times in a column of a file, in ms, in the order of the file; see `load_trace`.

    Raises:
        TraceError: the file is unreadable or empty, has no such column, or a cell there is no time.
    """
    if unit is not None and unit not in UNITS_MS:
        raise TraceError(f"unit: {unit!r} is not known; choose from {', '.join(UNITS_MS)}")
    text = Path(name).read_text("utf-8-sig", errors="replace")
    lines = list(dropwhile(lambda line: line.lstrip()[:1] in ("#", ""), text.splitlines(keepends=True)))
    delimiter = next((mark for mark in "\t;," if mark in "".join(lines[:1])), " ")
    if delimiter == " ":
        lines = [line.partition("#")[0].strip() for line in lines]
    try:
        rows = list(filter(any, csv.reader(lines, delimiter=delimiter, skipinitialspace=True)))
    except csv.Error as error:
        raise TraceError(f"trace: {name} is no CSV or text file ({error}); give shorter cells") from error
    if not rows:
        raise TraceError(f"trace: {name} is empty; give a file with at least one arrival")
    first, *rest = rows
    names = [cell.strip() for cell in first]
    header = {} if any(map(_VALUE.fullmatch, names)) else {cell: i for i, cell in enumerate(names)}
    places = {**header, **{str(i + 1): i for i in range(len(first)) if str(i + 1) not in header}}
    wanted = "1" if column is None and len(first) == 1 else str(column)
    if wanted not in places:
        raise TraceError(
            f"trace: {name} has {len(first)} columns; choose one with column (--column): "
            f"{', '.join(places)}, got {column}"
        )
    at = places[wanted]
    stated = _NAMED_UNIT.search(first[at]) if header else None
    cells = [row[at].strip() if at < len(row) else "" for row in (rest if header else (first, *rest))]
    dated = bool(cells) and ":" in cells[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dates of different time zones are compared in UTC.
            values: Any = np.array(cells, "datetime64[ns]" if dated else "f8")
    except ValueError as error:
        raise TraceError(
            f"trace: column {wanted} of {name} holds no times ({error}); give numbers, in the unit that "
            "unit (--unit) names, or dates such as 2026-01-31 12:00:00.5"
        ) from error
    if dated:
        return (values - values[0]) / np.timedelta64(1, "ms")  # type: ignore[no-any-return]
    return values * UNITS_MS[unit or (stated[1] if stated else "ms")]  # type: ignore[no-any-return]
