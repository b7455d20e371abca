"""Manifests: what an exported folder holds, with the size and SHA-256 of every other file in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from subnetact import __version__
from subnetact.documents import checksum, described, replacing_folder
from subnetact.errors import FileFormatError

__all__ = ["MANIFEST", "SCHEMA", "read_manifest", "writing_folder"]

MANIFEST = "export.json"
SCHEMA = 1


@contextmanager
def writing_folder(directory: str | Path, kind: str, facts: dict[str, Any]) -> Iterator[Path]:
    """Yield an empty folder to write into; then add the manifest and put the folder at `directory`.

    Args:
        directory: new, empty, or an earlier export, which is replaced.
        kind: of the export.
        facts: JSON; may be filled until the block ends.

    Raises:
        FileFormatError: the directory holds something else.
    """
    with replacing_folder(directory, MANIFEST, "an export") as folder:
        yield folder
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        document = {
            "kind": kind,
            "schema": SCHEMA,
            "subnetact": __version__,
            "torch": torch.__version__,
            **facts,
            "files": {name: described(folder / name) for name in names},
        }
        document["checksum"] = checksum(document)
        (folder / MANIFEST).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_manifest(directory: str | Path, kind: str) -> Mapping[str, Any]:
    """Read a folder's manifest and compare every file with it.

    Checksums find accidents and edits; they are no signature.

    Raises:
        FileFormatError: naming the file that is missing, truncated, changed, or of a newer schema.
    """
    folder = Path(directory)
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileFormatError(
            f"{folder}: no export is there ({MANIFEST} is missing); give the folder that the exporter wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path}: not a readable export ({error}); export again") from error
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise FileFormatError(f"{path}: not of kind {kind}; give the folder that the exporter wrote")
    schema = document.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or not 1 <= schema <= SCHEMA:
        raise FileFormatError(
            f"{path}: export of schema {schema!r}, this version reads 1 to {SCHEMA}; update subnetact"
        )
    if document.pop("checksum", None) != checksum(document):
        raise FileFormatError(f"{path}: changed since it was written; restore it, or export again")
    listed = document.get("files")
    if not isinstance(listed, dict):
        raise FileFormatError(f"{path}: `files` lists no files; export again")
    for name, known in listed.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise FileFormatError(f"{path}: {name!r} is not a file of this folder")
        if described(folder / name) != known:
            raise FileFormatError(
                f"{folder / name}: truncated or changed since it was written; restore it, or export again"
            )
    return document
