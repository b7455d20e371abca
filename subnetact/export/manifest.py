"""Manifests: the contents of an exported folder, with the size and SHA-256 of every other file in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from subnetact import __version__
from subnetact.documents import FolderFormat

__all__ = ["MANIFEST", "read_manifest", "writing_folder"]

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


def read_manifest(directory: str | Path, kind: str) -> Mapping[str, Any]:
    """Read the manifest of a folder and compare every file with it.

    Checksums find accidents and edits; they are no signature.

    Args:
        directory: the folder.
        kind: the kind of export that it must be.

    Returns:
        The fields of the manifest.

    Raises:
        FileFormatError: a file is missing, truncated, changed, or of a newer schema; the message names it.
    """
    return _format(kind).read_folder(directory)
