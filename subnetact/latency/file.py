"""The JSON file of a latency table."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from subnetact.documents import DocumentFormat
from subnetact.latency.validate import with_nans, with_nulls

if TYPE_CHECKING:
    from subnetact.latency.table import LatencyTable

LATENCY_TABLE = DocumentFormat(
    "a latency table", "subnetact.latency_table", 1, "give a file that LatencyTable.save() wrote"
)
FORMER = {
    "interference": "co_runners",
    "contended_ms": "co_runner_ms",
    "colocate": "co_runners",
    "colocated": "co_runner_subnet",
}
"""Names of fields and facts in files of earlier versions, and their present names."""


def document(table: LatencyTable) -> dict[str, Any]:
    """The table as plain lists, strings and numbers."""
    written: dict[str, Any] = {
        "subnets": list(table.subnets),
        "accuracy": [None if math.isnan(percent) else percent for percent in table.accuracy],
        "batch_sizes": list(table.batch_sizes),
        "latency_ms": with_nulls(table.latency_ms),
        "statistics": {name: with_nulls(values) for name, values in table.statistics.items()},
        "stamp": dict(table.stamp),
    }
    if table.co_runners:
        written["co_runners"] = list(table.co_runners)
        written["co_runner_ms"] = [with_nulls(level) for level in table.co_runner_ms]
    return written


def arguments(written: Mapping[str, Any]) -> dict[str, Any]:
    """What `LatencyTable.from_arrays` makes the table of again."""
    written = {FORMER.get(name, name): value for name, value in written.items()}
    return {
        "subnets": written["subnets"],
        "accuracy": with_nans(written["accuracy"]),
        "batch_sizes": written["batch_sizes"],
        "latency_ms": with_nans(written["latency_ms"]),
        "statistics": {
            re.sub(r"_beside_([0-9.e+]+)$", r"_with_\1_co_runners", name): with_nans(values)
            for name, values in written["statistics"].items()
        },
        "stamp": {FORMER.get(name, name): value for name, value in written["stamp"].items()},
        "co_runners": written.get("co_runners", ()),
        "co_runner_ms": with_nans(written["co_runner_ms"]) if "co_runner_ms" in written else None,
    }


def write(table: LatencyTable, path: str | os.PathLike[str]) -> None:
    """Write a table to a file, atomically."""
    LATENCY_TABLE.write(path, document(table), indent=1)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the file that `write` wrote.

    Raises:
        FileFormatError: truncated, foreign, or of a newer schema.
    """
    written = LATENCY_TABLE.read(path)
    with LATENCY_TABLE.fields(path):
        return arguments(written)
