"""`RateLimitedLog`: repeated lines of a log, one in a while and with the number of the others."""

from __future__ import annotations

import logging
import math
import threading
import time

PERIOD_S = 10.0


class RateLimitedLog:
    """Logs lines of one text and one class of error at most once in ten seconds, from any thread."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._logged: dict[tuple[str, type], tuple[float, int]] = {}

    def log(self, level: int, text: str, *arguments: object, error: BaseException | None = None) -> None:
        """Log a line, with the traceback of an error, or count it for the next such line to tell."""
        kind, now = (text, type(error)), time.monotonic()
        with self._lock:
            at_s, left_out = self._logged.get(kind, (-math.inf, 0))
            if now < at_s + PERIOD_S:
                self._logged[kind] = at_s, left_out + 1
                return
            self._logged[kind] = now, 0
        more = f" ({left_out} more since the last such line)" if left_out else ""
        self._log.log(level, text + more, *arguments, exc_info=error, stacklevel=2)
