"""A journal: the intermediate results of long work, so that the work can be killed and resumed at any time.

The file has one JSON object per line. The first line holds the environment in which the work is done. Every
record is one further line that is appended at once, so the cost of a record does not grow with their number.
A last line that was cut short counts as not written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from subnetact.documents import DocumentFormat
from subnetact.errors import ResumeMismatch

__all__ = ["Journal"]

JOURNAL = DocumentFormat("a journal", "subnetact.journal", 1, "choose another file, or remove it")


class Journal:
    """Records on disk, in the order they were written.

    Args:
        path: the file; made where there is none.
        environment: JSON facts under which records are comparable.
        resume: whether records of an earlier run may be there.
        folder: what to remove to begin afresh, for messages; None = the file.

    Attributes:
        path: the file.
        environment: what was given.

    Raises:
        FileFormatError: the file is something else, or of a newer schema.
        ResumeMismatch: it has records and `resume` is False, or of another environment.
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
        self._records = self._read(resume) if self.path.exists() else []
        if not self._records:
            JOURNAL.write(self.path, {"environment": self.environment})

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(list(self._records))

    def __len__(self) -> int:
        return len(self._records)

    def of(self, record: str) -> list[dict[str, Any]]:
        """The records of one name."""
        return [found for found in self._records if found["record"] == record]

    def append(self, record: str, **facts: Any) -> None:
        """Write one more record."""
        line = {"record": record, **facts}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._records.append(line)

    def _read(self, resume: bool) -> list[dict[str, Any]]:
        header, records, length = JOURNAL.read_lines(self.path)
        with JOURNAL.fields(self.path):
            before = header["environment"]
            if not all(isinstance(found["record"], str) for found in records):
                raise TypeError("the name of a record is not a string")
        if not records:
            return []
        if not resume:
            raise ResumeMismatch(
                f"{self.path}: holds {len(records)} records of an earlier run; resume it, or remove "
                f"{self._removable}"
            )
        differing = sorted(_differing(before, self.environment))
        if differing:
            raise ResumeMismatch(
                f"{self.path}: was begun in another environment; then and now: {'; '.join(differing)}. "
                f"Restore it, or remove {self._removable} to begin afresh"
            )
        os.truncate(self.path, length)
        return records


def _differing(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {*before, *now}:
            yield from _differing(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name} {_short(before)} and {_short(now)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
