"""A journal: what long work has found so far, so that it can be killed at any moment and go on later.

One JSON object a line. The first line says in which environment the work is done; a record is one further
line, written at once, so a record costs the same however many there are. A last line that was cut short is
as if it had not been written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from subnetact.documents import replacing
from subnetact.errors import FileFormatError, ResumeMismatch

__all__ = ["Journal"]

KIND, SCHEMA = "subnetact.journal", 1


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
            with replacing(self.path) as temporary:
                header = {"kind": KIND, "schema": SCHEMA, "environment": self.environment}
                temporary.write_text(json.dumps(header) + "\n", encoding="utf-8")

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
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        try:
            header, *records = [json.loads(line) for line in whole.decode("utf-8").splitlines()]
            if header["kind"] != KIND or not all(isinstance(found["record"], str) for found in records):
                raise KeyError("kind")
            schema, before = header["schema"], header["environment"]
        except (ValueError, KeyError, TypeError) as error:
            raise FileFormatError(
                f"{self.path}: not a journal of a sweep ({error!r}); choose another file, or remove it"
            ) from error
        if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
            raise FileFormatError(
                f"{self.path}: schema {schema!r}, this version reads 1 to {SCHEMA}; update subnetact"
            )
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
        if len(whole) < len(raw):
            os.truncate(self.path, len(whole))
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
