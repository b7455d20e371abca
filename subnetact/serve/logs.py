"""What the commands log, and how: lines with times for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the HTTP request that is handled, which its lines show."""
trace_id: ContextVar[str] = ContextVar("trace_id", default="")
"""The id of the trace that it belongs to, if its client names one."""
LEVELS = ("debug", "info", "warning", "error")


class _Lines(logging.Formatter):
    """Time in UTC, level, logger, id of the request, message."""

    converter = time.gmtime  # type: ignore[assignment]
    default_time_format, default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the first line; a traceback follows."""
        ids = [name for name in (request_id.get(), trace_id.get()) if name]
        request = f"[{' '.join(ids)}] " if ids else ""
        return f"{record.asctime} {record.levelname} {record.name}: {request}{record.message}"


class _Objects(_Lines):
    """The same, and the traceback, as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        facts = {"time": self.formatTime(record), "level": record.levelname.lower(), "logger": record.name}
        facts |= {"message": record.getMessage(), "thread": record.threadName or ""}
        facts |= {one.name: name for one in (request_id, trace_id) if (name := one.get())}
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler that `setup` put on the root logger."""


def setup(level: str = "info", as_json: bool = False) -> None:
    """Log to standard error: the package from a level on, other libraries from warnings on.

    A process that imports the package configures its own logging; the commands call this.

    Args:
        level: one of `LEVELS`.
        as_json: whether each line is a JSON object.
    """
    root, handler = logging.getLogger(), _Handler(sys.stderr)
    handler.setFormatter((_Objects if as_json else _Lines)("%(asctime)s"))
    root.handlers[:] = [one for one in root.handlers if not isinstance(one, _Handler)] + [handler]
    logging.getLogger("subnetact").setLevel(level.upper())
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}"
