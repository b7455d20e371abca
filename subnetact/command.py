"""How the commands of this package end: quietly, if the user or the reader of their output has had enough."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

__all__ = ["INTERRUPTED", "NOBODY_READS", "TERMINATED", "run_command"]

INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 and the number of SIGINT."""
TERMINATED = 143
"""The exit status after SIGTERM, if there is something to clean up: 128 and the number of SIGTERM."""
NOBODY_READS = 141
"""The exit status if the output goes to a program that has ended: 128 and the number of SIGPIPE."""


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run the main function of a command, and end the process with its exit status.

    Ctrl-C ends the process with status 130, and `command | head -1` with status 141, both without a
    traceback.

    Args:
        main: returns the exit status.

    Raises:
        SystemExit: always.
    """
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        status = NOBODY_READS
        # Python writes what is left when it ends, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
