"""How one call is timed on a device."""

from __future__ import annotations

import pytest
import torch

from subnetact.device import machine, measure


def test_a_measurement_runs_as_often_as_asked() -> None:
    calls = []
    taken = measure(lambda: calls.append(1), torch.device("cpu"), warmup_ms=0, min_time_ms=0, min_runs=7)
    assert list(taken) == ["host_ms"]
    assert taken["host_ms"].shape == (7,)
    assert len(calls) >= 8
    assert (taken["host_ms"] >= 0).all()
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
    taken = measure(lambda: order.append("call"), torch.device("cuda"), 0, 0, min_runs=2)
    assert order == ["call", "wait"] + 2 * ["event", "call", "event", "wait"]
    assert taken["device_ms"].tolist() == [1.5, 1.5]
    assert taken["host_ms"].shape == (2,)
