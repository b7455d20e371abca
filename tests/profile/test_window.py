"""How one call is timed on a device: the window of a measurement."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from subnetact.device import machine
from subnetact.profile.window import FEWEST_RUNS, _waited_s, measure


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


def test_work_that_takes_the_cpu_is_seen_and_waiting_for_a_device_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that sleeps has no CPU, as one whose CPU does other work."""
    cpu = torch.device("cpu")
    assert measure(lambda: time.sleep(0.005), cpu, 0, 0)["busy"][0] > 0.5
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))  # a system without /proc
    assert measure(lambda: time.sleep(0.005), cpu, 0, 0)["busy"][0] > 0.5
    assert _waited_s(torch.device("cuda")).tolist() == [0.0, 0.0]


def test_the_kernel_says_how_long_threads_waited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number, waited_ns in enumerate((1_500_000_000, 500_000_000)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "schedstat").write_text(f"7000000000 {waited_ns} 12\n")
    (tmp_path / "ended").mkdir()
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda _, pattern: glob(tmp_path, pattern))
    assert _waited_s(torch.device("cuda")).tolist() == [0.0, 2.0]
