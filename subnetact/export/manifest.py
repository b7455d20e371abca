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
def writing_folder(directory: str | PathLike[str], kind: str, facts: dict[str, Any]) -> Iterator[Path]:
    """Yield an empty folder; then add the manifest, whose `facts` may be filled meanwhile, and place it."""
    facts |= {"subnetact": __version__, "torch": torch.__version__}
    with _format(kind).writing(directory, facts) as folder:
        yield folder


def read_version(
    directory: str | PathLike[str], kind: str, read: Callable[[Path, Mapping[str, Any]], Result]
) -> Result:
    """Return what `read` makes of the folder and its manifest, all files from one version of the folder."""
    return _format(kind).read_version(directory, read)
