"""The published slices of Gemma 3n: a CSV file with one subnet per row.

The columns are those of google/gemma3n-slicing-configs. The widths are listed for the layers that are kept.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ofa_adapters.networks.gemma3n import DIMS, SKIPPED
from subnetact.errors import FileFormatError, SpecError
from subnetact.files.atomic import read_regular, replacing
from subnetact.space import SubnetSpace
from subnetact.spec import SubnetSpec

__all__ = ["Slice", "read_slices", "write_slices"]

NAME, LAYERS, SIZE, ACCURACY = "name", "# Layers", "# Effective Params (B)", "MMLU PT accuracy"
COLUMNS = (NAME, LAYERS, SIZE, ACCURACY, DIMS, SKIPPED)


@dataclass(frozen=True)
class Slice:
    """One row of a file of slices.

    Attributes:
        spec: the subnet.
        billions: its effective parameters in billions, which are those outside of both embeddings. If None,
            the file does not state them.
        accuracy: its accuracy on MMLU in percent. If None, the file does not state it.
    """

    spec: SubnetSpec
    billions: float | None = None
    accuracy: float | None = None


def read_slices(path: str | PathLike[str], space: SubnetSpace) -> dict[str, Slice]:
    """Read a CSV file of slices.

    Args:
        path: the file.
        space: the space of a Gemma 3n.

    Returns:
        The slices by name, in the order of the file.

    Raises:
        FileFormatError: the file is missing or is no such table.
        SpecError: a row describes no subnet of the space. The message names the row.

    Example:
        >>> slices = read_slices("gemma3n-slicing-configs.csv", supernet.space)
        >>> view = supernet.subnet(slices["Config for official E2B Model"].spec)
    """
    try:
        rows = list(csv.DictReader(io.StringIO(read_regular(Path(path)).decode("utf-8-sig"), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise FileFormatError(f"{path}: not a CSV file of slices ({error})") from error
    if not rows or not {NAME, DIMS} <= set(rows[0]):
        raise FileFormatError(f"{path}: not a CSV file of slices; its columns are {', '.join(COLUMNS)}")
    found: dict[str, Slice] = {}
    for number, row in enumerate(rows, 2):
        where = f"{path}, line {number}"
        try:
            spec = space.parse({DIMS: row.get(DIMS), SKIPPED: row.get(SKIPPED)})
        except SpecError as error:
            raise type(error)(f"{where}: {error}") from error
        layers = _number(where, LAYERS, row)
        kept = len(space.format(spec)[DIMS])
        if layers is not None and layers != kept:
            raise FileFormatError(f"{where}: {LAYERS} is {layers:g}, but {kept} layers are kept")
        name = row[NAME] or ""
        if name in found:
            raise FileFormatError(f"{where}: a second slice is called {name!r}")
        found[name] = Slice(spec, _number(where, SIZE, row), _number(where, ACCURACY, row))
    return found


def write_slices(path: str | PathLike[str], space: SubnetSpace, slices: Mapping[str, Slice]) -> None:
    """Write a CSV file of slices, which `read_slices` and the tools that slice Gemma 3n read.

    Args:
        path: the file; a former one is replaced as a whole.
        space: the space of a Gemma 3n.
        slices: the slices by name.

    Raises:
        SpecError: a slice is not of the space.
        WriteError: the file cannot be written.
    """
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for name, given in slices.items():
        row = space.format(given.spec)
        size = "" if given.billions is None else f"{given.billions:.2f}"
        percent = "" if given.accuracy is None else f"{given.accuracy:.2f}%"
        table.writerow([name, len(row[DIMS]), size, percent, row[DIMS], row[SKIPPED] or ""])
    with replacing(path) as new:
        new.write_text(text.getvalue())


def _number(where: str, column: str, row: Mapping[str, Any]) -> float | None:
    text = (row.get(column) or "").strip().removesuffix("%")
    if not text:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise FileFormatError(f"{where}: {column} is {text!r}, no number") from error
