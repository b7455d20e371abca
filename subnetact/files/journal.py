"""The journal: what long work has found so far, so that the work can be killed at any time and goes on.

Searches, calibrations and latency profiles keep unfinished work in no other form. The file has one JSON
object per line. The first holds the environment: the facts that must be the same for records to be of use.
A last line that was cut short counts as not written. Every line has a checksum of itself and of the lines
before it, so that a damaged journal is refused; checksums are no signature.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

from subnetact.errors import FileFormatError, ResumeMismatch
from subnetact.files.atomic import replacing
from subnetact.files.documents import DocumentFormat, StrPath

Facts: TypeAlias = Mapping[str, Any]
JOURNAL = DocumentFormat("a journal", "subnetact.journal", 1, "choose another file, or remove it")


class Journal:
    """Records in the order of writing; `folder` is what a user removes to begin anew, if not the file.

    Without a path, it keeps nothing, for work that nobody wants to resume.
    """

    def __init__(
        self, path: StrPath | None, environment: Facts, resume: bool = True, folder: Path | None = None
    ) -> None:
        self.path, self._keeps = Path(os.devnull if path is None else path), path is not None
        self.environment = json.loads(json.dumps(dict(environment))) if self._keeps else {}
        self._removable = f"the folder {folder}" if folder else "the file"
        self._sum = ""
        self._records: list[dict[str, Any]] = []
        if self._keeps and self.path.exists():
            self._read(resume)
        if self._keeps and not self._records:
            self._write([])

    def of(self, record: str) -> list[dict[str, Any]]:
        """Return the records of one name, each with its name as "record", in the order of writing."""
        return [found for found in self._records if found["record"] == record]

    def append(self, record: str, **facts: Any) -> None:
        """Write one more record at the end of the file; the facts are values that JSON can hold."""
        if not self._keeps:
            return
        line = {"record": record, **facts}
        text, known = signed(self._sum, line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
        self._sum = known
        self._records.append(line)

    def replace(self, record: str, **facts: Any) -> None:
        """Write a record in the place of all records of its name; the file is replaced as a whole."""
        kept = [found for found in self._records if found["record"] != record]
        self._write([*kept, {"record": record, **facts}])

    def fields(self) -> AbstractContextManager[None]:
        """Turn the errors of using a record that is damaged (KeyError and the like) into FileFormatError."""
        return JOURNAL.fields(self.path, passing=())

    def mismatch(self, what: str) -> ResumeMismatch:
        """Return the error that says why these records are of no use."""
        return ResumeMismatch(f"{self.path}: {what}, or remove {self._removable} to begin anew")

    def _write(self, records: Iterable[dict[str, Any]]) -> None:
        known = ""
        with replacing(self.path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for line in ({**JOURNAL.header, "environment": self.environment}, *records):
                text, known = signed(known, line)
                file.write(text)
        self._sum, self._records = known, list(records)

    def _read(self, resume: bool) -> None:
        header, records, length = JOURNAL.read_lines(self.path)
        known = ""
        with self.fields():
            for number, line in enumerate((header, *records), start=1):
                found = line.pop("sum")
                _, known = signed(known, line)
                if found != known:
                    raise FileFormatError(
                        f"{self.path}, line {number}: changed since it was written; restore the file, or "
                        f"remove {self._removable} to begin anew"
                    )
            before = header["environment"]
            if not all(isinstance(found["record"], str) for found in records):
                raise TypeError("the name of a record is not a string")
        if not records:
            return
        if not resume:
            raise self.mismatch(f"holds {len(records)} records of an earlier run; resume it")
        others = sorted(differing(before, self.environment))
        if others:
            raise self.mismatch(
                f"was begun with other arguments or on another machine: {'; '.join(others)}. "
                "Use the earlier ones"
            )
        os.truncate(self.path, length)
        self._sum, self._records = known, records


def signed(before: str, line: Facts) -> tuple[str, str]:
    """Return the text of a line with its checksum, and the checksum; `before` is that of the line before."""
    text = json.dumps(line)
    known = hashlib.sha256(f"{before} {text}".encode()).hexdigest()[:16]
    return f'{text[:-1]}, "sum": "{known}"}}\n', known


def differing(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield, for every fact that differs, its dotted name and both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {*before, *now}:
            yield from differing(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name} was {before!r:.60}, is {now!r:.60}"
