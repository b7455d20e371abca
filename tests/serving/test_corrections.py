"""Learned corrections of the latency table, alone and inside a batcher."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import numpy as np
import pytest
from fake_runners import TABLE, Timed
from scheduled import Scheduled

from subnetact.errors import FileFormatError, ProfileMismatch
from subnetact.latency.table import LatencyTable
from subnetact.serving import CheapestFeasible, Fixed, HullFit, MaxAcc, MaxBatch, ModelSwitching, SlackFit
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.live.corrections import Corrections
from subnetact.serving.scheduling.context import Context


def teach(corrections: Corrections, subnet: int, size: int, factor: float, spread: float, n: int) -> None:
    rng = np.random.default_rng(0)
    base = float(TABLE.latency_ms[subnet, TABLE.pad_index[size]])
    for noise in rng.normal(0.0, spread, n):
        corrections.observe(subnet, size, base * factor * math.exp(noise))


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


def test_old_observations_count_less_until_the_subnet_runs_again() -> None:
    corrections = Corrections(TABLE)
    assert (corrections.snapshot().planned == 1.0).all(), "nothing learned changes nothing"
    teach(corrections, 1, 1, 3.0, 0.05, 500)
    teach(corrections, 1, 1, 1.0, 0.05, 400)
    assert corrections.snapshot().mean[1, 0] == pytest.approx(1.0, abs=0.1)
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
    for subnet, size, factor in ((0, 4, 3.0), (1, 1, 3.2), (1, 4, 3.0), (0, 1, 3.0)):
        teach(corrections, subnet, size, factor, 0.1, 300)
    corrections.save(tmp_path / "c.json")
    engine = Timed(factor=3.0)
    with Batcher(engine, policy=SlackFit(TABLE, slo_ms=12.0), clock_ms=engine.clock_ms) as batcher:
        teach(batcher.corrections, 1, 4, 2.0, 0.0, 7)
        batcher.corrections.load(tmp_path / "c.json")
        for name in ("mean", "planned"):
            now, saved = batcher.corrections.snapshot(), corrections.snapshot()
            assert (getattr(now, name) == getattr(saved, name)).all()
        batcher.replan()
        assert batcher.stats().replanned == 1
        assert batcher.submit(0, deadline_ms=8.0).result(20).met, "the first request already"


def test_files_of_something_else_are_refused(tmp_path: Any) -> None:
    corrections, path = Corrections(TABLE), tmp_path / "c.json"
    teach(corrections, 0, 4, 1.7, 0.2, 30)
    corrections.save(path)
    with pytest.raises(ProfileMismatch, match="learned on another latency table"):
        Corrections(TABLE.scaled(2.0)).load(path)
    document = json.loads(path.read_text())
    wrong = [(-1, -1, 1, 0.0, 0.0, 5), (-1, -1, 1, 0.0, 0.0, 0.5), (9, 0, 1, 0.0, 0.0, 0)]
    wrong += [(0, -2, 1, 0.0, 0.0, 0), (0, 0, 1, math.inf, 0.0, 0)]
    changes: list[tuple[Any, str]] = [({"averages": [row]}, "the average") for row in wrong]
    changes += [({"averages": [[1]]}, "field is missing"), ({"kind": "x"}, "not corrections")]
    changes += [({"schema": 4}, "schema 4, this version reads 3; update subnetact")]
    for text, match in [("{", "not readable"), *((json.dumps(document | c), m) for c, m in changes)]:
        path.write_text(text)
        with pytest.raises(FileFormatError, match=match):
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


@pytest.mark.parametrize("learn", [True, False])
def test_a_slow_machine_is_learned_and_deadlines_are_met_again(learn: bool) -> None:
    engine = Timed(factor=3.0)
    batcher = Batcher(
        engine, policy=SlackFit(TABLE, slo_ms=10.0, buckets=4), clock_ms=engine.clock_ms, learn=learn
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
    engine = Timed()
    with Batcher(engine, policy=Fixed(TABLE, 0), slo_ms=36.0, clock_ms=engine.clock_ms) as batcher:
        for _ in range(100):
            batcher.corrections.observe(0, 1, 100.0)
            batcher.corrections.observe(1, 1, 100.0)
        batcher.submit(0, deadline_ms=1e6).result(20)
        outcomes = []
        while len(outcomes) < 40 and None not in outcomes:
            engine.now += 1000.0
            batcher.replan()
            outcomes.append(batcher.submit(0, deadline_ms=5.0).exception(20))
        assert outcomes[-1] is None


def test_a_subnet_that_was_slow_for_a_while_is_chosen_again() -> None:
    engine = Timed()
    with Batcher(engine, policy=SlackFit(TABLE, slo_ms=10.0), clock_ms=engine.clock_ms) as batcher:
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


# -- a policy of other latencies -------------------------------------------------------------------


def serve(live: Scheduled, slower: float = 1.0) -> int:
    """Run every batch that there is, each `slower` times as long as planned; return how many."""
    batches = 0
    while (job := live.idle()) is not None:
        live.now += slower * job.expected_ms
        live.finish(job)
        batches += 1
    return batches


class Hears:
    """A policy that counts what it observes; `made` has every object of it."""

    made: list[Hears]

    def __init__(self, table: LatencyTable) -> None:
        self.table, self.slo_ms, self.heard = table, 100.0, 0
        Hears.made.append(self)

    def decide(self, context: Context) -> tuple[int, int]:
        return 0, 4

    def retabled(self, table: LatencyTable) -> Hears:
        return type(self)(table)

    def observe(self, *_: float) -> None:
        self.heard += 1


class Deaf(Hears):
    def observe(self, *_: float) -> None:
        super().observe()
        raise RuntimeError("no ears")


class Fails(Hears):
    def retabled(self, table: LatencyTable) -> Hears:
        raise ZeroDivisionError("in the user's policy")


@pytest.mark.parametrize(("policy", "heard"), [(Hears, [3, 3, 3]), (Deaf, [1, 0, 0])])
def test_the_policy_of_other_latencies_hears_what_follows_unless_it_raised(
    policy: type[Hears], heard: list[int]
) -> None:
    Hears.made = []
    live = Scheduled(policy(TABLE), slo_ms=100.0)
    for slower in (3.0, 6.0, 12.0):
        for _ in range(3):
            live.admit("x", 1e6)
            assert serve(live, slower) == 1
        assert live.learner.refresh(at_once=True)
    assert [policy.heard for policy in Hears.made] == [*heard, 0]
    warnings = [(text, type(error)) for text, _, error in live.scheduler.warnings]
    told = "the policy's observe(...) raised; it is not called again", RuntimeError
    assert warnings == [told] * (policy is Deaf)


def test_a_policy_that_fails_at_other_latencies_keeps_its_plan(caplog: Any) -> None:
    Hears.made = []
    policy = Fails(TABLE)
    live = Scheduled(policy, slo_ms=100.0)
    live.admit("x", 1e6)
    serve(live, slower=3.0)
    assert live.learner.refresh(at_once=True), "the dispatcher plans with what was learned all the same"
    assert live.scheduler.dispatcher.plans[-1].policy is policy
    assert live.scheduler.dispatcher.plans[0].batch(0, 1)[1] > 1.2 * TABLE.latency_ms[0, 0]
    assert "in the user's policy" in caplog.text
