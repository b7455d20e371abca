"""Where tests, and programs that they start, find what they need; fixtures are in shared_fixtures.py."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

# Processes that tests start compile nothing again; a fifth of their imports was that.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
TESTS = Path(__file__).parent
PLACES = [str(TESTS.parent), str(TESTS / "started"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(PLACES)))
gc.set_threshold(10_000, 10, 10)  # with `frozen`: garbage collections were an eighth of the time
atexit.register(gc.freeze)


def pytest_configure(config: pytest.Config) -> None:
    """Import torch, but not into the process that only deals tests out to others, which wait for it."""
    deals = config.getoption("numprocesses", None) and not config.getoption("collectonly")
    if hasattr(config, "workerinput") or not deals:
        config.pluginmanager.import_plugin("shared_fixtures")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let neighbours run in one worker, which has what they share; `-n` alone deals the tests out."""
    scheduler = import_module("xdist.scheduler")
    return scheduler.WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None
