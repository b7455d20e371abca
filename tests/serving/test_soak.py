"""The first 24,000 requests of `benchmarks/soak.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_request_of_a_faulty_day_gets_its_one_outcome() -> None:
    result = load().soak(24_000)
    counters, faults = result["counters"], result["faulty_runs"]
    assert set(faults) == {"raises", "slow", "hangs", "kills", "memory"}, "every fault was met"
    assert counters["hung"] >= 4
    assert counters["died"] >= 8
    assert counters["revived"] >= 1
    assert counters["bisected"] >= 10
    assert counters["cancelled"] >= 50
    assert counters["met"] > 10_000
