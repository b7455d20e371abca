"""`PeriodicCall`: a thread that calls a function again and again, and goes on when the function raises."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from subnetact.errors import failure_text

__all__ = ["PeriodicCall"]

_log = logging.getLogger(__name__)


class PeriodicCall:
    """Calls a function with a pause before every call, until `stop`.

    Args:
        function: the function. What it raises is counted, and logged unless it is what was logged last.
        pause_s: the pause, s.
        name: name of the thread.

    Attributes:
        errors: how often the function raised.
    """

    def __init__(self, function: Callable[[], object], pause_s: float, name: str) -> None:
        self.errors = 0
        self._function = function
        self._pause_s = pause_s
        self._logged = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait until it has ended; the function itself does not wait."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._pause_s):
            try:
                self._function()
            except Exception as error:
                self.errors += 1
                text = failure_text(error)
                if text != self._logged:
                    self._logged = text
                    _log.exception("%s goes on after an error", self._thread.name)
