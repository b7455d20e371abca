"""The decision log: every batch and every request that was not answered, as JSON lines."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from subnetact.errors import WriteError
from subnetact.files.documents import DocumentFormat, StrPath
from subnetact.serving.scheduling.request import Job, Request

_NEXT_STEP = "give a file that Batcher(decision_log=path) wrote"
DECISION_LOG = DocumentFormat("a decision log", "subnetact.decision_log", 1, _NEXT_STEP)
_log = logging.getLogger(__name__)


class DecisionLog:
    """Collects entries in memory while requests are served; another thread writes them by `flush`.

    The first line is a header with the table, the workers, the policy's name and the rule for expired
    requests. Every further line is one of two kinds; times are in ms since the log was opened.

    * A batch: start `t`, worker `w`, subnet `s`, planned batch size `b`, duration `ms`, number of requests
      answered in time `met`; what the policy saw: number of waiting requests `queued`, slack of the most
      urgent one `slack`; and its requests.
    * A request that was not answered: its outcome `o`, and the request.

    Requests are stored as lists: arrival `a`, time given `d`, and, if any request has one, minimum accuracy
    `f` and priority `p`. WriteError is raised if the file cannot be opened; an existing one is replaced.
    """

    def __init__(self, path: StrPath, header: Mapping[str, Any], start_ms: float) -> None:
        self._start_ms, self._path = start_ms, path
        self._entries: deque[dict[str, Any]] = deque()
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
        """Record a part of a job that ran, before the job advances, with the requests that it answered."""
        entry = {"t": job.started_ms - self._start_ms, "w": job.worker, "s": job.subnet, "b": job.size}
        entry |= {"ms": took_ms, "met": met, "queued": job.queued, "slack": job.slack_ms}
        self._entries.append({**entry, **self._described(requests)})

    def outcome(self, outcome: str, request: Request) -> None:
        """Record a request that was `dropped`, `failed`, `cancelled` or `closed`, or refused as `full`."""
        self._entries.append({"o": outcome, **self._described([request])})

    def flush(self) -> None:
        """Write the collected entries; if the disk is full or gone, the log ends there with a warning."""
        collected = self._entries  # other threads append meanwhile
        entries = [collected.popleft() for _ in range(len(collected))]
        if self._file is not None and entries:
            try:  # a clock may give numbers of numpy, which become floats
                self._file.writelines(json.dumps(entry, default=float) + "\n" for entry in entries)
                self._file.flush()
            except (OSError, ValueError) as error:
                _log.warning("the decision log %s ends here: %s", self._path, error)
                self._end()

    def close(self) -> None:
        """Write the remaining entries and close the file. This never raises; see `flush`."""
        self.flush()
        self._end()

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError, ValueError):
                file.close()

    def _described(self, requests: Sequence[Request]) -> dict[str, Any]:
        arrivals = [r.accepted_ms - self._start_ms for r in requests]
        optional: Any = {"f": [r.ask.floor for r in requests], "p": [r.ask.priority for r in requests]}
        given = {key: values for key, values in optional.items() if any(values)}
        return {"a": arrivals, "d": [r.deadline_ms - r.accepted_ms for r in requests], **given}
