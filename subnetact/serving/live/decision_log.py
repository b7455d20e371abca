"""The decision log: every batch and every request that was not answered, as JSON lines."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

from subnetact.errors import WriteError
from subnetact.files.documents import DocumentFormat
from subnetact.serving.scheduling.request import Job, Request

__all__ = ["DECISION_LOG", "DecisionLog"]

DECISION_LOG = DocumentFormat(
    "a decision log", "subnetact.decision_log", 1, "give a file that Batcher(decision_log=path) wrote"
)


_log = logging.getLogger(__name__)


def _line(entry: Mapping[str, Any]) -> str | None:
    """Return an entry as a line of JSON. If a policy or a client made it impossible, that is logged."""
    try:
        return json.dumps(entry, separators=(",", ":")) + "\n"
    except (TypeError, ValueError, OverflowError) as error:
        _log.warning("an entry of the decision log is left out: %s", error)
        return None


class DecisionLog:
    """Collects entries in memory while requests are served; `flush` writes them, from another thread.

    The first line is a header with the table, the number of workers, the policy's name and the rule for
    expired requests. Every further line is one of two kinds; times are in ms since the log was opened.

    * A batch: start `t`, worker `w`, subnet `s`, planned batch size `b`, duration `ms`, number of requests
      answered in time `met`; what the policy saw: number of waiting requests `queued`, slack of the most
      urgent one `slack`; and its requests.
    * A request that was not answered: its outcome `o`, and the request.

    Requests are stored as lists: arrival `a`, time given `d`, and, if any request has one, minimum accuracy
    `f` and priority `p`.

    Args:
        path: the file; an existing file is replaced.
        header: facts for the first line.
        start_ms: current time of the batcher's clock, in ms.

    Raises:
        WriteError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any], start_ms: float) -> None:
        self._start_ms = start_ms
        self._path = path
        self._entries: deque[dict[str, Any]] = deque()
        self._writing = Lock()
        self._file: TextIO | None = None
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
            self._file.write(json.dumps({**DECISION_LOG.header, **header}, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            self._end()
            raise WriteError(
                f"decision_log: {path} cannot be written ({error}); give another file"
            ) from error

    def batch(self, job: Job, requests: Sequence[Request], took_ms: float, met: int) -> None:
        """Record a part of a job that ran.

        Args:
            job: the job, not yet advanced to its next part.
            requests: the requests of the part that were answered.
            took_ms: time that the part took, in ms.
            met: number of requests answered in time.
        """
        entry = {
            "t": job.started_ms - self._start_ms,
            "w": job.worker,
            "queued": job.queued,
            "slack": job.slack_ms,
            "s": job.subnet,
            "b": job.size,
            "ms": took_ms,
            "met": met,
        }
        self._entries.append({**entry, **self._described(requests)})

    def outcome(self, outcome: str, request: Request) -> None:
        """Record a request that was not answered.

        Args:
            outcome: why: `dropped`, `failed`, `cancelled`, `closed`, or `full` if it was refused.
            request: the request.
        """
        self._entries.append({"o": outcome, **self._described([request])})

    def flush(self) -> None:
        """Write the collected entries.

        If the file cannot be written, because the disk is full for example, that is logged once and the log
        ends there. The batcher goes on.
        """
        with self._writing:
            collected = self._entries  # other threads append meanwhile
            entries = [collected.popleft() for _ in range(len(collected))]
            if self._file is not None and entries:
                lines = [line for entry in entries if (line := _line(entry)) is not None]
                try:
                    self._file.write("".join(lines))
                    self._file.flush()
                except (OSError, ValueError) as error:
                    _log.warning("the decision log %s ends here: %s", self._path, error)
                    self._end()

    def close(self) -> None:
        """Write the remaining entries and close the file. This never raises; see `flush`."""
        self.flush()
        with self._writing:
            self._end()

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError, ValueError):
                file.close()

    def _described(self, requests: Sequence[Request]) -> dict[str, Any]:
        start_ms = self._start_ms
        described: dict[str, Any] = {
            "a": [r.accepted_ms - start_ms for r in requests],
            "d": [r.deadline_ms - r.accepted_ms for r in requests],
        }
        if any(r.ask.floor for r in requests):
            described["f"] = [r.ask.floor for r in requests]
        if any(r.ask.priority for r in requests):
            described["p"] = [r.ask.priority for r in requests]
        return described
