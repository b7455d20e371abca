"""A journal: the intermediate results of long work, so that the work can be killed and resumed at any time.

The file has one JSON object per line. The first line holds the environment in which the work is done. Every
record is one further line that is appended at once, so the cost of a record does not grow with their number.
A last line that was cut short counts as not written. Every record has a checksum of itself and of the records
before it, so that an edited journal is refused; checksums find accidents and edits, they are no signature.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from subnetact.errors import FileFormatError, ResumeMismatch
from subnetact.files.documents import DocumentFormat

__all__ = ["Journal"]

JOURNAL = DocumentFormat("a journal", "subnetact.journal", 1, "choose another file, or remove it")


class Journal:
    """Records in a file, in the order in which they were written.

    Iterating yields the records, as dictionaries; `len` counts them.

    Args:
        path: the file; it is created if it does not exist.
        environment: facts, of values that JSON can hold, that must be the same for records to be comparable.
        resume: whether the file may hold records of an earlier run.
        folder: the folder that a user has to remove to begin anew, for messages; if None, the file.

    Attributes:
        path: the file.
        environment: the facts, as JSON gives them back.

    Raises:
        MissingFile: the folder of the file does not exist.
        FileFormatError: the file is damaged, of another kind, or of a newer schema.
        ResumeMismatch: the file has records although `resume` is False, or records of another environment.

    Example:
        >>> journal = Journal("work.jsonl", {"threads": 1})
        >>> journal.append("window", cell=[0, 0, 1], ms=3.5)
        >>> [record["ms"] for record in journal.of("window")]
        [3.5]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        environment: Mapping[str, Any],
        resume: bool = True,
        folder: Path | None = None,
    ) -> None:
        self.path = Path(path)
        self._removable = f"the folder {folder}" if folder else "the file"
        self.environment = json.loads(json.dumps(dict(environment)))
        self._sum: str | None = _chained("", self.environment)
        self._records = self._read(resume) if self.path.exists() else []
        if not self._records:
            JOURNAL.write(self.path, {"environment": self.environment, "checksums": True})

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(list(self._records))

    def __len__(self) -> int:
        return len(self._records)

    def of(self, record: str) -> list[dict[str, Any]]:
        """Return the records of one name.

        Args:
            record: the name.

        Returns:
            Each record's name, as "record", and its facts, in the order of writing.
        """
        return [found for found in self._records if found["record"] == record]

    def append(self, record: str, **facts: Any) -> None:
        """Write one more record at the end of the file.

        Args:
            record: the name.
            **facts: of values that JSON can hold.

        Raises:
            OSError: the file cannot be written.
        """
        line = {"record": record, **facts}
        written = line
        if self._sum is not None:
            written = {**line, "sum": _chained(self._sum, line)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(written) + "\n")
        self._sum = written.get("sum")
        self._records.append(line)

    def _read(self, resume: bool) -> list[dict[str, Any]]:
        header, records, length = JOURNAL.read_lines(self.path)
        with JOURNAL.fields(self.path):
            before = header["environment"]
            if not all(isinstance(found["record"], str) for found in records):
                raise TypeError("the name of a record is not a string")
            if not records:
                return []
            self._sum = self._checked(before, records) if "checksums" in header else None
        if not resume:
            raise ResumeMismatch(
                f"{self.path}: holds {len(records)} records of an earlier run; resume it, or remove "
                f"{self._removable}"
            )
        differing = sorted(_differing(before, self.environment))
        if differing:
            raise ResumeMismatch(
                f"{self.path}: was begun with other arguments or on another machine: {'; '.join(differing)}. "
                f"Use the earlier ones, or remove {self._removable} to begin anew"
            )
        os.truncate(self.path, length)
        return records

    def _checked(self, environment: Mapping[str, Any], records: list[dict[str, Any]]) -> str:
        """Take the checksums out of the records, and return the last."""
        known = _chained("", environment)
        for number, record in enumerate(records, start=2):
            found = record.pop("sum", None)
            known = _chained(known, record)
            if found != known:
                raise FileFormatError(
                    f"{self.path}, line {number}: changed since it was written; restore the file, or remove "
                    f"{self._removable} to begin anew"
                )
        return known


def _chained(before: str, facts: Mapping[str, Any]) -> str:
    """Return the checksum of facts and of everything before them."""
    return hashlib.sha256(f"{before} {json.dumps(facts)}".encode()).hexdigest()[:16]


def _differing(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield, for every fact that differs, its dotted name and both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {*before, *now}:
            yield from _differing(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name} was {_short(before)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
