"""The JSON file of a latency table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from subnetact.files.documents import DocumentFormat
from subnetact.latency.arrays import Floats, TableArrays

__all__ = ["LATENCY_TABLE", "arguments_of", "document_of"]

LATENCY_TABLE = DocumentFormat(
    "a latency table", "subnetact.latency_table", 1, "give a file that LatencyTable.save() wrote"
)
FORMER = {
    "interference": "co_runners",
    "contended_ms": "co_runner_ms",
    "colocate": "co_runners",
    "colocated": "co_runner_subnet",
    "beaten": "dominated",
}
"""Names of fields and facts in files of earlier versions, and their present names."""


def document_of(table: TableArrays) -> dict[str, Any]:
    """Return a table as dictionaries, lists, strings and numbers; None stands for NaN."""
    document: dict[str, Any] = {
        "subnets": list(table.subnets),
        "accuracy": [None if math.isnan(percent) else percent for percent in table.accuracy],
        "batch_sizes": list(table.batch_sizes),
        "latency_ms": _with_nulls(table.latency_ms),
        "statistics": {name: _with_nulls(values) for name, values in table.statistics.items()},
        "stamp": dict(table.stamp),
    }
    if table.co_runners:
        document["co_runners"] = list(table.co_runners)
        document["co_runner_ms"] = [_with_nulls(values) for values in table.co_runner_ms]
    return document


def arguments_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with which `TableArrays.from_arrays` makes a table from its document.

    Raises:
        KeyError: a field is missing.
        TypeError: a field is of the wrong kind; AttributeError likewise.
    """
    present = {FORMER.get(name, name): value for name, value in document.items()}
    return {
        "subnets": present["subnets"],
        "accuracy": _with_nans(present["accuracy"]),
        "batch_sizes": present["batch_sizes"],
        "latency_ms": _with_nans(present["latency_ms"]),
        "statistics": {
            re.sub(r"_beside_([0-9.e+]+)$", r"_with_\1_co_runners", name): _with_nans(values)
            for name, values in present["statistics"].items()
        },
        "stamp": _present_stamp(present["stamp"]),
        "co_runners": present.get("co_runners", ()),
        "co_runner_ms": _with_nans(present["co_runner_ms"]) if "co_runner_ms" in present else None,
    }


def _present_stamp(stamp: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stamp with present names; earlier versions gave the tolerance as a share, `stability`."""
    present = {FORMER.get(name, name): value for name, value in stamp.items() if name != "stability"}
    if "stability" in stamp:
        present["tolerance"] = 100.0 * stamp["stability"]
    return present


def _with_nulls(values: Floats) -> list[list[float | None]]:
    return [[None if math.isnan(value) else value for value in cells] for cells in values.tolist()]


def _with_nans(values: Any) -> Any:
    if isinstance(values, list):
        return [_with_nans(value) for value in values]
    return math.nan if values is None else values
