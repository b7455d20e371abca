"""Manifests: the contents of an exported folder, with the size and SHA-256 of every other file in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch

from subnetact import __version__
from subnetact.files.documents import FolderFormat

__all__ = ["MANIFEST", "read_version", "writing_folder"]

Result = TypeVar("Result")

MANIFEST = "export.json"


def _format(kind: str) -> FolderFormat:
    return FolderFormat("an export", kind, 1, "give the folder that the exporter wrote", MANIFEST)


@contextmanager
def writing_folder(directory: str | Path, kind: str, facts: dict[str, Any]) -> Iterator[Path]:
    """Yield an empty folder to write into; then add the manifest and put the folder at `directory`.

    Args:
        directory: new, empty, or an earlier export, which is replaced.
        kind: the kind of export.
        facts: further fields of the manifest; the dictionary may be filled until the block ends.

    Raises:
        FileFormatError: the directory holds something else.
    """
    facts |= {"subnetact": __version__, "torch": torch.__version__}
    with _format(kind).writing(directory, facts) as folder:
        yield folder


def read_version(
    directory: str | PathLike[str], kind: str, read: Callable[[Path, Mapping[str, Any]], Result]
) -> Result:
    """Read an export, all files from one version of the folder.

    Checksums find accidents and edits; they are no signature.

    Args:
        directory: the folder.
        kind: the kind of export that it must be.
        read: gets the folder and the manifest; it may be called several times.

    Returns:
        What `read` returned.

    Raises:
        FileFormatError: a file is missing, truncated, changed, or of a newer schema; the message names it.
            Errors of `read` are raised as they are.
    """
    return _format(kind).read_version(directory, read)
