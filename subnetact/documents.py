"""Files and folders that readers see whole or not at all, and checksums that tell whether they changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp, mkstemp
from typing import Any

from subnetact.errors import FileFormatError

__all__ = ["checksum", "described", "replacing", "replacing_folder"]


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it replaces `path`, on error it is removed."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target}: its folder {target.parent} does not exist; create it first")
    handle, name = mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: str | os.PathLike[str], marker: str, what: str) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it takes its place, on error it is removed.

    Args:
        path: new, empty, or a folder that holds `marker`, which is then replaced as a whole.
        marker: the file that every folder of this kind holds.
        what: the kind, for the message.

    Raises:
        FileFormatError: the folder holds something else.
    """
    target = Path(path)
    if target.exists() and (
        not target.is_dir() or (any(target.iterdir()) and not (target / marker).is_file())
    ):
        raise FileFormatError(f"{target}: holds something else than {what}; choose a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    new, old = temporary / "new", temporary / "old"
    try:
        new.mkdir()
        yield new
        if target.exists():
            target.replace(old)
        try:
            new.replace(target)
        except OSError:
            if old.exists():
                old.replace(target)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def described(path: Path) -> dict[str, Any]:
    """Return a file's size in bytes and its SHA-256.

    Raises:
        FileFormatError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise FileFormatError(
            f"{path}: not readable ({error.strerror}); restore it, or save again"
        ) from error
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def checksum(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
