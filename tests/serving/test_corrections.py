"""Learned corrections of the latency table, alone and inside a batcher."""

from __future__ import annotations

import json
import logging
import math
import threading
from typing import Any

import numpy as np
import pytest

from subnetact.errors import FileFormatError, ProfileMismatch
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.live.corrections import Corrections
from subnetact.serving.policies import (
    CheapestFeasible,
    Fixed,
    HullFit,
    MaxAcc,
    MaxBatch,
    ModelSwitching,
    SlackFit,
)

TABLE = LatencyTable(["a", "b"], [70.0, 80.0], [1, 4], [[1.0, 2.0], [3.0, 6.0]])


def teach(corrections: Corrections, subnet: int, size: int, factor: float, spread: float, n: int) -> None:
    rng = np.random.default_rng(0)
    base = float(TABLE.latency_ms[subnet, TABLE.pad_index[size]])
    for noise in rng.normal(0.0, spread, n):
        corrections.observe(subnet, size, base * factor * math.exp(noise))


def test_nothing_learned_changes_nothing() -> None:
    now = Corrections(TABLE).snapshot()
    assert (now.mean == 1.0).all()
    assert (now.planned == 1.0).all()


def test_the_planned_latency_covers_about_the_97th_percentile_of_what_is_measured() -> None:
    corrections = Corrections(TABLE)
    teach(corrections, 0, 4, 1.7, 0.2, 3000)
    now = corrections.snapshot()
    rng = np.random.default_rng(1)
    fresh = 1.7 * np.exp(rng.normal(0.0, 0.2, 20_000))
    assert now.mean[0, 1] == pytest.approx(1.7, rel=0.1)
    assert 0.93 <= float((fresh <= now.planned[0, 1]).mean()) <= 0.999


def test_unseen_cells_follow_their_subnet_and_unseen_subnets_the_machine() -> None:
    corrections = Corrections(TABLE)
    teach(corrections, 0, 4, 2.0, 0.0, 200)
    mean = corrections.snapshot().mean
    assert mean[0, 1] == pytest.approx(2.0, rel=0.05)
    assert mean[0, 0] == pytest.approx(1.9, rel=0.08)
    assert 1.7 < mean[1, 0] < mean[0, 1]


def test_one_slow_batch_does_not_frighten() -> None:
    corrections = Corrections(TABLE)
    corrections.observe(0, 1, 50.0)
    assert corrections.snapshot().mean[0, 0] < 5.0
    teach(corrections, 0, 1, 1.0, 0.02, 200)
    now = corrections.snapshot()
    assert now.mean[0, 0] == pytest.approx(1.0, abs=0.1)
    assert now.planned[0, 0] < 1.5


def test_what_was_learned_fades() -> None:
    corrections = Corrections(TABLE)
    teach(corrections, 1, 1, 3.0, 0.05, 500)
    teach(corrections, 1, 1, 1.0, 0.05, 400)
    assert corrections.snapshot().mean[1, 0] == pytest.approx(1.0, abs=0.1)


def test_old_observations_count_less_until_the_subnet_runs_again() -> None:
    corrections = Corrections(TABLE)
    teach(corrections, 1, 4, 4.0, 0.0, 100)
    slow = corrections.snapshot().planned[1]
    teach(corrections, 0, 4, 1.0, 0.0, 8000)
    faded = corrections.snapshot().planned[1]
    assert slow[1] > 3.5
    assert (faded < 1.05).all()
    teach(corrections, 1, 4, 1.0, 0.0, 3)  # three batches say that it is no longer slow
    assert corrections.snapshot().planned[1, 1] < 1.3
    teach(corrections, 1, 4, 4.0, 0.0, 16)
    assert corrections.snapshot().planned[1, 1] > 2.0


def test_relaxing_halves_only_what_is_slow() -> None:
    corrections = Corrections(TABLE)
    teach(corrections, 0, 1, 4.0, 0.0, 100)
    teach(corrections, 1, 1, 0.5, 0.0, 100)
    before = corrections.snapshot().mean
    corrections.relax()
    after = corrections.snapshot().mean
    assert after[0, 0] < 0.6 * before[0, 0]
    assert after[1, 0] == pytest.approx(before[1, 0], rel=0.05)


def test_relaxing_halves_mean_and_deviation_on_the_log_scale() -> None:
    corrections = Corrections(TABLE)
    teach(corrections, 0, 1, 4.0, 0.2, 100)
    before = corrections.snapshot()
    corrections.relax()
    after = corrections.snapshot()
    np.testing.assert_allclose(after.mean, before.mean**0.5)
    np.testing.assert_allclose(after.planned, before.planned**0.5)


def test_a_drift_is_logged_once_a_crossing(caplog: pytest.LogCaptureFixture) -> None:
    corrections = Corrections(TABLE)
    teach(corrections, 0, 1, 2.0, 0.0, 100)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            overall, drifted = corrections.drift()
    assert overall == pytest.approx(1.9, rel=0.1)
    assert drifted == {0: pytest.approx(2.0, rel=0.05)}
    assert len(caplog.records) == 1
    assert "subnet a takes 2.0" in caplog.text.replace("1.9", "2.0")
    teach(corrections, 0, 1, 1.0, 0.0, 500)
    assert corrections.drift()[1] == {}
    teach(corrections, 0, 1, 2.0, 0.0, 500)
    with caplog.at_level(logging.WARNING):
        corrections.drift()
    assert len(caplog.records) == 2


def test_what_was_learned_survives_a_restart(tmp_path: Any) -> None:
    corrections = Corrections(TABLE)
    teach(corrections, 0, 4, 1.7, 0.2, 300)
    teach(corrections, 1, 1, 1.2, 0.1, 5)
    corrections.save(tmp_path / "c.json")
    again = Corrections(TABLE)
    teach(again, 1, 4, 2.0, 0.0, 7)
    again.load(tmp_path / "c.json")
    for name in ("mean", "planned"):
        assert (getattr(again.snapshot(), name) == getattr(corrections.snapshot(), name)).all()


def test_files_of_something_else_are_refused(tmp_path: Any) -> None:
    corrections = Corrections(TABLE)
    teach(corrections, 0, 4, 1.7, 0.2, 30)
    path = tmp_path / "c.json"
    corrections.save(path)
    with pytest.raises(ProfileMismatch, match="learned on another latency table"):
        Corrections(TABLE.scaled(2.0)).load(path)
    document = json.loads(path.read_text())
    for change, match in (
        ({"schema": 4}, "schema 4, this version reads 3; update subnetact"),
        ({"averages": [[-1, -1, 1, 0.0, 0.0, 5]]}, "the average"),
        ({"averages": [[-1, -1, 1, 0.0, 0.0, 0.5]]}, "the average"),
        ({"kind": "x"}, "not corrections"),
        ({"averages": [[9, 0, 1, 0.0, 0.0, 0]]}, "the average"),
        ({"averages": [[0, -2, 1, 0.0, 0.0, 0]]}, "the average"),
        ({"averages": [[0, 0, 1, math.inf, 0.0, 0]]}, "the average"),
        ({"averages": [[1]]}, "field is missing"),
    ):
        path.write_text(json.dumps({**document, **change}))
        with pytest.raises(FileFormatError, match=match):
            corrections.load(path)
    path.write_text("{")
    with pytest.raises(FileFormatError, match="not readable"):
        corrections.load(path)


@pytest.mark.parametrize(
    "policy",
    [
        SlackFit(TABLE, 36.0, 5, 0.5, 0.1),
        HullFit(TABLE, 36.0, 0.2),
        Fixed(TABLE, 1),
        CheapestFeasible(TABLE),
        MaxAcc(TABLE),
        MaxBatch(TABLE),
        ModelSwitching(TABLE, 36.0),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_every_policy_goes_on_with_other_latencies(policy: Any) -> None:
    slower = policy.retabled(TABLE.scaled(3.0))
    assert (slower.table.latency_ms == 3.0 * TABLE.latency_ms).all()
    for name in ("slo_ms", "buckets", "margin", "margin_ms", "subnet", "factor", "switch_ms", "period_ms"):
        assert getattr(slower, name, None) == getattr(policy, name, None)


class Slow:
    """A runner that takes `factor` times the latency of the table on its own clock."""

    keys = TABLE.subnets

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.now = 0.0
        self.sizes: list[tuple[int, int]] = []

    def check(self, x: Any) -> None:
        pass

    def run(self, subnet: int, inputs: Any, batch_size: int) -> Any:
        self.sizes.append((subnet, batch_size))
        self.now += self.factor * float(TABLE.latency_ms[subnet, TABLE.pad_index[batch_size]])
        return list(inputs)


@pytest.mark.parametrize("learn", [True, False])
def test_a_slow_machine_is_learned_and_deadlines_are_met_again(learn: bool) -> None:
    engine = Slow(3.0)
    batcher = Batcher(
        engine, policy=SlackFit(TABLE, slo_ms=10.0, buckets=4), clock_ms=lambda: engine.now, learn=learn
    )
    with batcher:

        def met(n: int) -> int:
            return sum(batcher.submit(0, deadline_ms=8.0).result(20).met for _ in range(n))

        met(60)
        batcher.replan()
        assert met(20) == (20 if learn else 0)
        assert (batcher.stats().replanned > 0) == learn
        assert batcher.stats().correction == pytest.approx(3.0, rel=0.2)


def test_a_batcher_that_drops_everything_tries_again() -> None:
    """Latencies learned under a past load must not make every later request expire."""
    engine = Slow(1.0)
    with Batcher(engine, policy=Fixed(TABLE, 0), slo_ms=36.0, clock_ms=lambda: engine.now) as batcher:
        for _ in range(100):
            batcher.corrections.observe(0, 1, 100.0)
            batcher.corrections.observe(1, 1, 100.0)
        batcher.submit(0, deadline_ms=1e6).result(20)
        done = threading.Event()
        for _ in range(40):
            engine.now += 1000.0
            batcher.replan()
            if batcher.submit(0, deadline_ms=5.0).exception(20) is None:
                done.set()
                break
        assert done.is_set()


def test_a_subnet_that_was_slow_for_a_while_is_chosen_again() -> None:
    engine = Slow(1.0)
    with Batcher(engine, policy=SlackFit(TABLE, slo_ms=10.0), clock_ms=lambda: engine.now) as batcher:
        assert batcher.submit(0, deadline_ms=8.0).result(20).subnet == 1
        teach(batcher.corrections, 0, 1, 1.0, 0.0, 100)
        teach(batcher.corrections, 1, 1, 3.0, 0.0, 100)  # something else disturbs the large subnet
        batcher.replan()
        assert batcher.submit(0, deadline_ms=8.0).result(20).subnet == 0
        for count in range(8000):
            batcher.submit(0, deadline_ms=8.0).result(20)
            if count % 500 == 0:
                batcher.replan()
        for _ in range(20):  # and it stays chosen
            batcher.replan()
            assert batcher.submit(0, deadline_ms=8.0).result(20).subnet == 1


def test_a_restarted_batcher_plans_with_what_the_last_one_learned(tmp_path: Any) -> None:
    old = Corrections(TABLE)
    for subnet in (0, 1):
        for size in (1, 4):
            teach(old, subnet, size, 3.0, 0.0, 200)
    old.save(tmp_path / "c.json")
    engine = Slow(3.0)
    with Batcher(engine, policy=SlackFit(TABLE, slo_ms=10.0), clock_ms=lambda: engine.now) as batcher:
        batcher.corrections.load(tmp_path / "c.json")
        batcher.replan()
        assert batcher.stats().replanned == 1
        assert batcher.submit(0, deadline_ms=8.0).result(20).met, "the first request already"
