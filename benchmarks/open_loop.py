"""The open-loop client of `examples/load_test.py`, for other benchmarks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from load_test import (
    HttpClient,
    Refused,
    Reply,
    Sent,
    ask_server,
    run_open_loop,
    summary,
    trace,
)

__all__ = ["HttpClient", "Refused", "Reply", "Sent", "ask_server", "run_open_loop", "summary", "trace"]
