"""The JSON file of a latency table."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subnetact.documents import replacing
from subnetact.errors import FileFormatError
from subnetact.latency.validate import with_nans, with_nulls

if TYPE_CHECKING:
    from subnetact.latency.table import LatencyTable

SCHEMA = 1
KIND = "subnetact.latency_table"
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
        "kind": KIND,
        "schema": SCHEMA,
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
    text = json.dumps(document(table), indent=1, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FileFormatError(f"{path}: not readable as a latency table ({error}); save it again") from error
    return found if isinstance(found, dict) else {}


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the file that `write` wrote.

    Raises:
        FileFormatError: truncated, foreign, or of a newer schema.
    """
    written = read_object(path)
    if written.get("kind") != KIND:
        raise FileFormatError(f"{path}: not a latency table; expected a JSON object of kind {KIND!r}")
    schema = written.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or not 1 <= schema <= SCHEMA:
        raise FileFormatError(
            f"{path}: schema {schema!r} is not known here (this version reads 1 to {SCHEMA}); "
            "update subnetact to read it"
        )
    try:
        return arguments(written)
    except (KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{path}: a field is missing or of the wrong kind: {error!r}") from error
