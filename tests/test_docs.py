"""The API reference builds from the docstrings without a warning, and holds every public name."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOMS = (
    "subnetact",
    "subnetact.space",
    "subnetact.operators",
    "subnetact.supernet",
    "subnetact.calibration",
    "subnetact.latency",
    "subnetact.engine",
    "subnetact.costs",
    "subnetact.nas",
    "subnetact.profile",
    "subnetact.serving",
    "subnetact.export",
    "ofa_adapters",
)
"""What a user imports from; `subnetact.errors` is a part of the first."""


@pytest.mark.slow
def test_the_api_reference_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pdoc", "-d", "google", "-o", str(tmp_path), *ROOMS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    for room in ROOMS:
        page = (tmp_path / (room.replace(".", "/") + ".html")).read_text()
        for name in getattr(import_module(room), "__all__", ()):
            assert f'id="{name}"' in page or f"{name}.html" in page, f"{room}.{name}"
