"""The first 24,000 requests of `benchmarks/soak.py`."""

from __future__ import annotations

from soak import soak


def test_every_request_of_a_faulty_day_gets_its_one_outcome() -> None:
    result = soak(24_000)
    counters, faults = result["counters"], result["faulty_runs"]
    assert set(faults) == {"raises", "slow", "hangs", "kills", "memory"}, "every fault was met"
    assert counters["hung"] >= 4
    assert counters["died"] >= 8
    assert counters["revived"] >= 1
    assert counters["bisected"] >= 10
    assert counters["cancelled"] >= 50
    assert counters["met"] > 10_000
