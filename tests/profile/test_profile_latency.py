"""`profile_latency`: the table it returns, its arguments and its progress bar."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from short_windows import SHORT

from subnetact import Batcher, Engine, LatencyTable, calibrate, profile_latency
from subnetact.errors import LatencyTableWarning, TableError
from subnetact.latency.origin import run_otherwise
from subnetact.profile import modes
from subnetact.profile.modes import TimedRunner
from subnetact.supernet.supernet import Supernet

EXAMPLE = torch.zeros(1, 16, 16)


@pytest.fixture
def engine(digits: Supernet) -> Engine:
    specs = [digits.space.smallest(), digits.space.sample(0), digits.space.largest()]
    calibrate(digits, specs, [torch.randn(8, 1, 16, 16)], progress=False)
    return Engine(digits, specs, example=EXAMPLE[None])


def test_a_profile_is_complete_stamped_and_round_trips(engine: Engine, tmp_path: Path) -> None:
    table = profile_latency(
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
    assert LatencyTable.load(tmp_path / "t.json") == table


def test_accuracies_are_those_of_the_engine_if_none_are_given(digits: Supernet) -> None:
    specs = [digits.space.smallest(), digits.space.largest()]
    calibrate(digits, specs, [torch.randn(8, 1, 16, 16)], progress=False)
    engine = Engine(digits, specs, example=EXAMPLE[None], accuracy=[50.0, None])
    quick = {"warmup_ms": 0.0, "min_time_ms": 1.0, "progress": False}
    known = profile_latency(engine, [1], **quick).accuracy  # type: ignore[arg-type]
    assert known[0] == 50.0
    assert np.isnan(known[1])
    assert profile_latency(engine, [1], [70.0, 80.0], **quick).accuracy == (70.0, 80.0)  # type: ignore[arg-type]


def mixed(digits: Supernet) -> Engine:
    """Return an engine of four subnets that has room for the programs of some only."""
    specs = digits.space.sample(0, 4)
    calibrate(digits, specs, [torch.randn(8, 1, 16, 16)], progress=False)
    alone = Engine(digits, [digits.space.largest()], example=EXAMPLE[None])
    room = 1.01 * alone.stats().fused_bytes / 2**20
    engine = Engine(digits, specs, example=EXAMPLE[None], memory_budget_mb=room)
    assert 0 < sum(map(engine.is_fused, engine.ids)) < 4
    return engine


def test_a_table_is_of_one_mode_or_says_so(digits: Supernet, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ran = mixed(digits), list[tuple[str, bool]]()
    prepared = TimedRunner.prepared

    @contextmanager
    def noted(runner: TimedRunner, subnet: int, batch_size: int) -> Iterator[Any]:
        with prepared(runner, subnet, batch_size) as call:
            ran.append((runner.mode, runner.engine.is_fused(subnet)))
            yield call

    monkeypatch.setattr(TimedRunner, "prepared", noted)
    before = [engine.mode_of(i) for i in engine.ids]

    def profile(*modes: str) -> tuple[LatencyTable, set[bool]]:
        ran.clear()
        quick = SHORT | {"accuracy": [1.0, 4.0, 2.0, 3.0], "mode": modes[0] if modes else None}
        table = profile_latency(engine, [1, 2], **quick)
        assert [engine.mode_of(i) for i in engine.ids] == before  # what is served is left alone
        return table, {fused for _, fused in ran}

    table, fused = profile()
    assert (set(table.modes), fused) == ({"zero-copy"}, {False})
    assert "zero-copy, batch sizes 1, 2, " in repr(table)
    assert table.front(1)[-1] == 1  # the most accurate one is on every front
    table, fused = profile("fused")
    assert (set(table.modes), fused) == ({"fused"}, {True})
    served, fused = profile("as served")
    assert (list(served.modes), fused) == (before, {True, False})
    assert served.statistics["fused"].tolist() == [[mode == "fused"] * 2 for mode in before]
    assert served.select([1, 2, 3]).modes == served.modes[1:]
    assert run_otherwise(served, engine) == ""
    other = mixed(digits)
    other.remove(0)  # the rows of a table are those of ids, also without this one
    assert run_otherwise(served, other) == ""
    with pytest.raises(TableError, match=r"mixes modes \(fused and zero-copy, .*profile_latency\(engine\)"):
        served.front(1)
    unknown = dataclasses.replace(served, statistics={})
    assert set(unknown.modes) == {"as served"}
    with pytest.raises(TableError, match="mixes modes"):
        unknown.front(1)
    with pytest.raises(TableError, match="mode: 'fast' is none of Engine; choose from zero-copy, fused"):
        profile("fast")
    stamp, fused_cells = {"program": "engine", "mode": "as served", "unfused": "graphs"}, [[1.0], [0.0]]
    facts: Any = {"statistics": {"fused": fused_cells}, "stamp": stamp}
    two = LatencyTable(["a", "b"], [1.0, 2.0], [1], [[1.0], [2.0]], **facts)
    assert two.modes == ("fused", "graphs")
    for wrong in ({"statistic": "p42"}, {"accuracy": [1.0]}, {"warmup_ms": np.inf}):
        with pytest.raises(TableError):
            profile_latency(engine, [1], **wrong)  # type: ignore[arg-type]
    for sizes in ([0], [4, 1]):
        with pytest.raises(TableError):
            profile_latency(engine, sizes)


@pytest.mark.parametrize("mode", [None, "fused", "as served", "extract"])
def test_a_table_has_empty_cells_for_a_subnet_that_was_removed(digits: Supernet, mode: str | None) -> None:
    engine = mixed(digits)
    engine.remove(1)
    table = profile_latency(engine, [1, 2], **SHORT, mode=mode, beside=["view"])
    for name in ("p50", "p50_of_view"):
        empty = np.isnan(table.statistics[name]).all(axis=1).tolist()
        assert empty == [False, True, False, False], name
    assert run_otherwise(profile_latency(engine, [1], **SHORT, mode="as served"), engine) == ""


def test_a_batcher_warns_of_a_table_of_another_mode_than_runs(digits: Supernet) -> None:
    engine = mixed(digits)
    quick: Any = {"warmup_ms": 0, "min_time_ms": 1, "tolerance": 1e9, "accuracy": [1.0, 2.0, 3.0, 4.0]}
    with pytest.warns(
        LatencyTableWarning, match=r"of 4 subnets were measured zero-copy, which run fused.*as serv"
    ):
        Batcher(engine, table=profile_latency(engine, [1], **quick), slo_ms=500).close()
    views = Engine(digits, engine.specs, example=EXAMPLE[None], backend="views")
    for mode, of in (("as served", engine), (None, views)):
        table = profile_latency(engine, [1], **quick, mode=mode)
        Batcher(of, table=table, slo_ms=500).close()  # warnings are errors


def test_views_and_extracted_networks_are_measured_beside_an_engine(digits: Supernet, tmp_path: Path) -> None:
    engine, kinds = mixed(digits), set[str]()
    call_with = modes.call_with
    with pytest.MonkeyPatch.context() as patch:

        def noted(network: Any, x: Any) -> Any:
            weights = next(network.parameters())
            kinds.add("view" if shares(weights, digits) else "extract")
            return call_with(network, x)

        patch.setattr(modes, "call_with", noted)
        quick: Any = {"warmup_ms": 0, "min_time_ms": 1, "windows": 2, "max_windows": 2}
        alone, quick = quick, quick | {"resume": tmp_path / "j"}
        table = profile_latency(engine, [1, 2], **quick, beside=("view", "extract"))
    assert kinds == {"view", "extract"}
    names = {"p50", "p50_of_view", "p50_of_extract", "stable_of_view", "busy_of_extract"}
    assert names <= set(table.statistics)
    assert table.statistics["windows_of_extract"].tolist() == [[2.0] * 2] * 4
    again = profile_latency(engine, [1, 2], **quick, beside=("view", "extract"))
    assert again.statistics["p50_of_view"].tolist() == table.statistics["p50_of_view"].tolist()
    assert "p50_of_view" in profile_latency(engine, [1], **alone, beside="view").statistics
    assert "p50_of_view" in profile_latency(engine, [1], **alone, beside=iter(["view"])).statistics
    with pytest.raises(TableError, match="choose from view, extract"):
        profile_latency(engine, [1], beside=("fused",))


def shares(tensor: torch.Tensor, supernet: Supernet) -> bool:
    storages = {parameter.untyped_storage().data_ptr() for parameter in supernet.parameters()}
    return tensor.untyped_storage().data_ptr() in storages
