"""The engine, one measurement, and profiles."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import subnetact
from subnetact.device import machine, measure
from subnetact.errors import (
    InvalidRequest,
    NotCalibrated,
    SpecError,
    TableError,
)
from subnetact.supernet.supernet import Supernet

EXAMPLE = torch.zeros(1, 16, 16)
X = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def engine(digits: Supernet) -> subnetact.Engine:
    specs = [digits.space.smallest(), digits.space.sample(0), digits.space.largest()]
    subnetact.calibrate(digits, specs, [torch.randn(8, 1, 16, 16)], progress=False)
    return subnetact.Engine(digits, specs, example=EXAMPLE)


def test_ids_run_their_subnets(engine: subnetact.Engine) -> None:
    assert len(engine) == 3
    for i, spec in enumerate(engine.specs):
        expected = engine.supernet(X, subnet=spec)
        assert engine.keys[i] == spec.key
        torch.testing.assert_close(engine(X, subnet=i), expected, rtol=5e-5, atol=5e-5)
        torch.testing.assert_close(engine.ready(i)(X), expected, rtol=5e-5, atol=5e-5)
        outputs = engine.run(i, list(X), 8)
        assert len(outputs) == 5
        torch.testing.assert_close(torch.stack(list(outputs)), expected, rtol=5e-5, atol=5e-5)


def test_unknown_ids_are_refused(engine: subnetact.Engine) -> None:
    for wrong in (-1, 3):
        with pytest.raises(SpecError, match=rf"no subnet {wrong}; this engine has 0\.\.2"):
            engine(X, subnet=wrong)


def test_inputs_are_checked(engine: subnetact.Engine) -> None:
    engine.check(X[0])
    for wrong in (X, X[0].double(), X[0, 0], "digit", None):
        with pytest.raises(InvalidRequest, match="input: "):
            engine.check(wrong)


def test_uncalibrated_and_repeated_subnets_are_refused(digits: Supernet) -> None:
    specs = [digits.space.smallest(), digits.space.largest()]
    with pytest.raises(NotCalibrated, match=r"2 of 2 subnets .* allow_uncalibrated"):
        subnetact.Engine(digits, specs, example=EXAMPLE)
    with pytest.warns(subnetact.errors.UncalibratedSubnetWarning):
        assert len(subnetact.Engine(digits, specs, example=EXAMPLE, allow_uncalibrated=True)) == 2
    for wrong in ([], [specs[0]] * 2):
        with pytest.raises(SpecError, match="distinct"):
            subnetact.Engine(digits, wrong, example=EXAMPLE)


def test_a_measurement_runs_as_often_as_asked() -> None:
    calls = []
    taken = measure(lambda: calls.append(1), torch.device("cpu"), warmup_ms=0, min_time_ms=0, min_runs=7)
    assert list(taken) == ["host_ms"]
    assert taken["host_ms"].shape == (7,)
    assert len(calls) >= 8
    assert (taken["host_ms"] >= 0).all()
    assert machine(torch.device("cpu"))["torch"] == torch.__version__


def test_a_profile_is_complete_stamped_and_round_trips(engine: subnetact.Engine, tmp_path: Path) -> None:
    table = subnetact.profile_latency(
        engine, [1, 3], [50.0, 60.0, 70.0], statistic="p90", warmup_ms=0, min_time_ms=2, progress=False
    )
    assert table.subnets == engine.keys
    assert table.accuracy == (50.0, 60.0, 70.0)
    assert table.latency_ms.shape == (3, 2)
    assert np.array_equal(table.latency_ms, table.statistics["p90"])
    for low, high in (("min", "p50"), ("p50", "p90"), ("p90", "p95"), ("p95", "p99")):
        assert (table.statistics[low] <= table.statistics[high]).all()
    assert table.stamp["supernet"] == engine.supernet.fingerprint()
    assert table.stamp["space"] == engine.supernet.space.id
    assert table.statistics["runs"].min() >= 15
    table.save(tmp_path / "t.json")
    assert subnetact.LatencyTable.load(tmp_path / "t.json") == table


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_progress_bars_are_shown_on_terminals_only(
    engine: subnetact.Engine, monkeypatch: pytest.MonkeyPatch, progress: bool, terminal: bool
) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(errors, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    subnetact.profile_latency(engine, [1], warmup_ms=0, min_time_ms=1, progress=progress)
    assert ("profiling" in errors.getvalue()) == (progress and terminal)


def test_profile_arguments_are_checked(engine: subnetact.Engine) -> None:
    with pytest.raises(TableError, match="p42"):
        subnetact.profile_latency(engine, [1], statistic="p42")
    for batch_sizes, more in (
        ([0], {}),
        ([4, 1], {}),
        ([1], {"accuracy": [1.0]}),
        ([1], {"warmup_ms": np.inf}),
    ):
        with pytest.raises(TableError):
            subnetact.profile_latency(engine, batch_sizes, **more)


def test_unknown_accuracy_survives_on_disk_and_is_refused_by_schedulers(tmp_path: Path) -> None:
    table = subnetact.LatencyTable.from_arrays(["a", "b"], [float("nan"), 70.0], [1, 2], [[1, 2], [3, 4]])
    table.save(tmp_path / "t.json")
    loaded = subnetact.LatencyTable.load(tmp_path / "t.json")
    assert loaded == table
    for use in (
        lambda t: subnetact.SlackFit(t, slo_ms=36.0),
        lambda t: subnetact.simulate([0.0], t, subnetact.Fixed(t, 0), slo_ms=36.0),
    ):
        with pytest.raises(TableError, match="accuracy of 'a' is not known"):
            use(loaded)
    known = loaded.with_accuracy([60.0, 70.0])
    assert (
        subnetact.simulate([0.0], known, subnetact.SlackFit(known, slo_ms=36.0), slo_ms=36.0).attainment
        == 1.0
    )


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


def test_cells_that_run_out_of_memory_are_left_out(
    engine: subnetact.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(x: torch.Tensor, subnet: int) -> None:
        if len(x) == 4 and subnet == 2:
            raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(subnetact.Engine, "ready", lambda self, subnet: lambda x: run(x, subnet))
    table = subnetact.profile_latency(
        engine, [1, 4], [1.0, 2.0, 3.0], warmup_ms=0, min_time_ms=1, progress=False
    )
    assert np.isnan(table.latency_ms).tolist() == [[False, False], [False, False], [False, True]]
    assert table.statistics["runs"][2, 1] == 0
