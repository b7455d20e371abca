"""Versioned documents: how every file of this library is written, read and checked.

A document says of which kind and schema it is. Files that are missing, damaged, of another kind or of another
schema are refused with an error that names the file and the next step. Reading executes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from subnetact.errors import FileFormatError, MissingFile, SubnetActError
from subnetact.files.atomic import one_version, read_regular, replacing, replacing_folder, require_regular
from subnetact.files.schema import violation

Result = TypeVar("Result")
StrPath: TypeAlias = str | os.PathLike[str]
Errors: TypeAlias = tuple[type[Exception], ...]

_DAMAGED = (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError, RecursionError)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON (bytes as UTF-8) that may be damaged or hostile; whatever is wrong is a ValueError."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_json(path: StrPath, found: Any, indent: int | None = 1, allow_nan: bool = True) -> None:
    """Write a result as JSON; an earlier file is replaced as a whole."""
    text = json.dumps(found, indent=indent, allow_nan=allow_nan)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True)
class DocumentFormat:
    """A kind of document; `noun` and `next_step` are for messages, and one `schema` is written and read."""

    noun: str
    kind: str
    schema: int
    next_step: str

    @property
    def header(self) -> dict[str, Any]:
        """The fields that every document of this kind begins with."""
        return {"kind": self.kind, "schema": self.schema}

    def write(self, path: StrPath, facts: Mapping[str, Any], indent: int | None = None) -> None:
        """Write a document of the header and these facts; ValueError if a number is not finite."""
        write_json(path, {**self.header, **facts}, indent, allow_nan=False)

    def read(self, path: StrPath) -> dict[str, Any]:
        """Return all fields of a document, including those of the header."""
        return self.parsed(path, self._bytes(path))

    def parsed(self, place: StrPath, text: str | bytes) -> dict[str, Any]:
        """Return all fields of a document that is given as text; `place` is for messages."""
        document = self._parsed(place, text)
        self.check(document, place)
        return dict(document)

    def read_lines(self, path: StrPath) -> tuple[dict[str, Any], list[Any], int]:
        """Return the first line, the other complete lines, and the number of bytes of all of them."""
        raw = self._bytes(path)
        complete = raw[: raw.rfind(b"\n") + 1]
        lines = complete.split(b"\n")[:-1] or [b""]
        header, *documents = [self._parsed(f"{path}, line {i}", line) for i, line in enumerate(lines, 1)]
        self.check(header, path)
        return header, documents, len(complete)

    def _bytes(self, path: StrPath) -> bytes:
        try:
            return read_regular(path)
        except MissingFile as error:
            raise MissingFile(f"{path}: no file is there, expected {self.noun}; {self.next_step}") from error

    def _parsed(self, place: StrPath, text: str | bytes) -> Any:
        try:
            return parse_json(text)
        except ValueError as error:
            raise FileFormatError(
                f"{place}: not readable as {self.noun} ({error}); {self.next_step}"
            ) from error

    def check(self, document: Any, path: StrPath) -> None:
        """Raise FileFormatError unless a document is of this kind and schema; `path` is for messages."""
        if not isinstance(document, Mapping) or document.get("kind") != self.kind:
            raise FileFormatError(
                f"{path}: not {self.noun}; expected a JSON object of kind {self.kind!r}; {self.next_step}"
            )
        schema = document.get("schema")
        if type(schema) is not int or schema != self.schema:
            raise FileFormatError(
                f"{path}: {self.noun} of schema {schema}, this version reads {self.schema}; update subnetact"
            )

    @contextmanager
    def fields(
        self, path: StrPath, passing: Errors = (SubnetActError,), damaged: Errors = ()
    ) -> Iterator[None]:
        """Turn KeyError and the like, and those of `damaged`, apart from `passing`, into FileFormatError."""
        try:
            yield
        except Exception as error:
            if isinstance(error, (FileFormatError, *passing)) or not isinstance(error, (*_DAMAGED, *damaged)):
                raise
            raise FileFormatError(
                f"{path}: damaged: a field is missing or of the wrong kind: {error!r}; {self.next_step}"
            ) from error


@dataclass(frozen=True)
class FolderFormat(DocumentFormat):
    """A kind of folder, whose file `index` has the checksums of all files; they are no signature.

    The index follows `json_schema`.
    """

    index: str
    json_schema: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def writing(self, directory: StrPath, facts: Mapping[str, Any]) -> Iterator[Path]:
        """Yield a folder to fill; then write the index with `facts`, and move the folder into place.

        Files that others put into the former version, also into folders in it, which its index does not
        list, are kept.
        """
        with replacing_folder(directory, self.index, self.noun) as folder:
            yield folder
            names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
            document = {**self.header, **facts, "files": {name: described(folder / name) for name in names}}
            document["checksum"] = checksum(document)
            one_version(directory, partial(self._keep_others, folder))
            (folder / self.index).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def _keep_others(self, folder: Path, former: Path) -> None:
        """Copy what others put into the former version, which another writer may be replacing."""
        try:
            own = {self.index, *self.read(former / self.index)["files"]}
        except (FileFormatError, KeyError, TypeError):  # There is no former version.
            return
        for path in former.rglob("*"):
            kept = folder / (name := path.relative_to(former))
            if path.is_file() and str(name) not in own and not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, kept)

    def read_version(
        self, directory: StrPath, read: Callable[[Path, dict[str, Any]], Result], verify: bool = True
    ) -> Result:
        """Return what `read` returns of a folder and its index; `read` may be called twice.

        Without `verify`, only the sizes of tensor files are compared, because they take long to read.
        """
        return one_version(directory, lambda folder: read(folder, self._checked_index(folder, verify)))

    def _checked_index(self, folder: Path, verify: bool) -> dict[str, Any]:
        index = folder / self.index
        document = self.read(index)
        known = document.pop("checksum", None)
        if known != checksum(document):
            raise FileFormatError(f"{index}: changed since it was written; restore it, or write it again")
        wrong = violation({**document, "checksum": known}, self.json_schema)
        if wrong:
            raise FileFormatError(f"{index}: damaged: {wrong}; {self.next_step}")
        listed = document.get("files")
        if not isinstance(listed, dict):
            raise FileFormatError(f"{index}: `files` lists no files; write the folder again")
        for name, known in listed.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise FileFormatError(f"{index}: {name!r} is not a file of this folder")
            path = folder / name
            quick = not verify and path.suffix == ".safetensors" and path.is_file()
            if quick and isinstance(known, dict) and path.stat().st_size == known.get("bytes"):
                continue
            if not path.exists() or described(path) != known:
                raise FileFormatError(
                    f"{path}: missing, truncated or changed since it was written; restore it, or "
                    "write it again"
                )
        return document


def described(path: Path) -> dict[str, Any]:
    """Return the size of a file as "bytes", and its SHA-256 as "sha256"; FileFormatError if unreadable."""
    require_regular(path)
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                size += len(block)
    except OSError as error:
        raise FileFormatError(f"{path}: not readable ({error}); restore it, or save again") from error
    return {"bytes": size, "sha256": digest.hexdigest()}


def checksum(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON document, whatever the order of its fields, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
