"""How one call is timed on a device: the window of a measurement."""

from __future__ import annotations

import pytest
import torch

from subnetact.device import machine
from subnetact.profile.window import FEWEST_RUNS, measure


def test_a_window_has_a_few_runs_however_long_they_take() -> None:
    calls = []
    taken = measure(lambda: calls.append(1), torch.device("cpu"), warmup_ms=0, min_time_ms=0)
    assert list(taken) == ["host_ms", "busy"]
    assert taken["host_ms"].shape == (FEWEST_RUNS,)
    assert len(calls) == 1 + FEWEST_RUNS
    assert (taken["host_ms"] >= 0).all()
    longer = measure(lambda: calls.append(1), torch.device("cpu"), warmup_ms=1, min_time_ms=5)
    assert longer["host_ms"].sum() <= 5 + longer["host_ms"].max()
    assert len(longer["host_ms"]) > FEWEST_RUNS
    assert machine(torch.device("cpu"))["torch"] == torch.__version__


def test_cuda_is_timed_by_events_around_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def elapsed_time(self, other: object) -> float:
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    taken = measure(lambda: order.append("call"), torch.device("cuda"), 0, 0)
    assert order == ["call", "wait"] + FEWEST_RUNS * ["event", "call", "event", "wait"]
    assert taken["device_ms"].tolist() == [1.5] * FEWEST_RUNS
    assert taken["host_ms"].shape == (FEWEST_RUNS,)
