"""`profile_latency`: the table it returns, its arguments and its progress bar."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import subnetact
from subnetact.errors import TableError
from subnetact.supernet.supernet import Supernet

EXAMPLE = torch.zeros(1, 16, 16)


@pytest.fixture
def engine(digits: Supernet) -> subnetact.Engine:
    specs = [digits.space.smallest(), digits.space.sample(0), digits.space.largest()]
    subnetact.calibrate(digits, specs, [torch.randn(8, 1, 16, 16)], progress=False)
    return subnetact.Engine(digits, specs, example=EXAMPLE[None])


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


def test_accuracies_are_those_of_the_engine_if_none_are_given(digits: Supernet) -> None:
    specs = [digits.space.smallest(), digits.space.largest()]
    subnetact.calibrate(digits, specs, [torch.randn(8, 1, 16, 16)], progress=False)
    engine = subnetact.Engine(digits, specs, example=EXAMPLE[None], accuracy=[50.0, None])
    quick = {"warmup_ms": 0.0, "min_time_ms": 1.0, "progress": False}
    known = subnetact.profile_latency(engine, [1], **quick).accuracy  # type: ignore[arg-type]
    assert known[0] == 50.0
    assert np.isnan(known[1])
    assert subnetact.profile_latency(engine, [1], [70.0, 80.0], **quick).accuracy == (70.0, 80.0)  # type: ignore[arg-type]
