"""Accuracy gives way first, replicas second."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from subnetact import LatencyTable
from subnetact.cluster.autoscaler import AccuracyFirst, AccuracyFirstPolicy, planned_rate
from subnetact.errors import PolicyError

TABLE = LatencyTable(["small", "large"], [70.0, 80.0], [1, 2, 4, 8], [[5, 6, 8, 12], [20, 30, 50, 90]])
SETTINGS = {"slo_ms": 200.0, "accuracy_floor": 75.0, "attainment": 0.99, "patience_s": 5.0, "most": 6}


@pytest.fixture(scope="module")
def rate():
    return planned_rate(TABLE, 200.0, 75.0, 0.99)


def run(rule, seconds, rate, accuracy=78.0, attainment=1.0, running=1, start=0.0):
    """Step once per second; the replicas that the rule asks for are there at once."""
    for second in range(seconds):
        running = rule.step(start + 1e3 * (second + 1), rate, accuracy, attainment, running)
    return running


def test_the_planned_rate_lies_between_the_subnets(rate):
    """The small subnet alone answers 667 inputs per second, the large one 89."""
    assert 60 < rate < 667
    assert planned_rate(TABLE, 200.0, 71.0, 0.99) > rate
    with pytest.raises(PolicyError, match="not reached"):
        planned_rate(TABLE, 200.0, 80.5, 0.99)


def test_while_the_floor_is_kept_load_costs_accuracy_only(rate):
    assert run(AccuracyFirst(TABLE, **SETTINGS), 30, 3 * rate, accuracy=75.5) == 1


def test_below_the_floor_the_envelopes_say_how_many(rate):
    rule = AccuracyFirst(TABLE, **SETTINGS)
    assert run(rule, 2, rate) == 1
    wanted = run(rule, 3, 3 * rate, accuracy=71.0, start=2e3)
    assert 3 <= wanted <= 4


def test_requests_that_are_late_add_a_replica_whatever_the_rate(rate):
    rule = AccuracyFirst(TABLE, **SETTINGS)
    assert run(rule, 2, rate / 4, attainment=0.9) == 2
    assert run(rule, 3, rate / 4, attainment=0.9, running=2, start=2e3) == 2  # the new one starts first
    assert run(rule, 3, rate / 4, attainment=0.9, running=2, start=7e3) == 3


def test_one_late_request_adds_no_replica():
    """At 10 requests per second, 90 % of one second are in time, but 98 % of the last five seconds."""
    rule = AccuracyFirst(TABLE, **{**SETTINGS, "attainment": 0.97})
    assert run(rule, 6, 10.0) == 1
    assert run(rule, 1, 10.0, attainment=0.9, start=6e3) == 1
    assert run(rule, 1, 10.0, attainment=0.8, start=7e3) == 2


def test_a_short_dip_below_the_floor_adds_no_replica(rate):
    rule = AccuracyFirst(TABLE, **SETTINGS)
    assert run(rule, 6, rate) == 1
    assert run(rule, 1, rate, accuracy=73.0, start=6e3) == 1
    assert run(rule, 5, rate, accuracy=73.0, start=7e3) == 2


def test_replicas_do_not_come_and_go_if_one_holds_less_than_planned(rate):
    """One replica keeps the floor up to half of the planned rate; the load is three quarters of it."""
    rule, running, changes = AccuracyFirst(TABLE, **SETTINGS), 1, []

    def live(seconds, load, start):
        nonlocal running
        for second in range(start, start + seconds):
            accuracy = 80.0 if load / running <= rate / 2 else 72.0
            wanted = rule.step(1e3 * second, load, accuracy, 1.0, running)
            changes.extend([second] if wanted != running else [])
            running = wanted
        return running

    assert live(5, rate / 4, 0) == 1
    assert live(40, 0.75 * rate, 5) == 2
    assert len(changes) == 1
    assert live(40, rate / 4, 45) == 1
    assert len(changes) == 2


def test_what_a_replica_could_not_hold_is_forgotten(rate):
    rule = AccuracyFirst(TABLE, **SETTINGS)
    assert run(rule, 4, rate / 4, attainment=0.5) == 2
    assert run(rule, 40, rate / 4, accuracy=80.0, running=2, start=4e3) == 2
    assert run(rule, 20, rate / 4, accuracy=80.0, running=2, start=44e3) == 1


def test_late_answers_after_the_load_fell_do_not_keep_replicas(rate):
    """The last inputs of a flood are late when none arrives any more; that says nothing of a low rate."""
    rule = AccuracyFirst(TABLE, **SETTINGS)
    assert run(rule, 4, rate, attainment=0.5) == 2
    assert rule.step(7.5e3, 0.0, 78.0, 0.5, 2) == 3
    assert run(rule, 20, rate / 4, accuracy=80.0, running=3, start=7.5e3) == 1


def test_replicas_are_removed_one_by_one_after_a_calm_time(rate):
    rule = AccuracyFirst(TABLE, **SETTINGS)
    assert run(rule, 4, rate / 10, accuracy=80.0, running=3) == 3
    assert run(rule, 5, rate / 10, accuracy=80.0, running=3, start=4e3) == 2
    assert run(rule, 20, rate / 10, accuracy=80.0, running=2, start=9e3) == 1


def test_at_the_floor_none_is_removed(rate):
    assert run(AccuracyFirst(TABLE, **SETTINGS), 30, rate / 10, accuracy=75.2, running=3) == 3


def test_there_is_a_greatest_number(rate):
    assert run(AccuracyFirst(TABLE, **SETTINGS), 60, 50 * rate, accuracy=60.0) == 6


def test_the_planned_rate_may_be_given(rate):
    """Ray's controller makes the rule, and has no time for the simulation."""
    rule = AccuracyFirst(TABLE, **SETTINGS)
    assert rule.planned_per_s == rate
    assert AccuracyFirst(TABLE, **SETTINGS, planned_per_s=2 * rate)._tuner.planned[-1] == pytest.approx(
        2 * rule._tuner.planned[-1], rel=0.05
    )


def test_few_arrivals_per_step_are_counted_too(rate):
    """Ray asks ten times per second: at 4 requests per second, most steps have none."""
    rule = AccuracyFirst(TABLE, **SETTINGS)
    for step in range(101):
        rule.step(100.0 * step, 4.0, 80.0, 1.0, 1)
    assert len(rule._tuner._times) in (39, 40)


def test_replicas_are_removed_though_the_floor_is_close_to_the_best_subnet():
    rule = AccuracyFirst(TABLE, **{**SETTINGS, "accuracy_floor": 79.8})
    assert run(rule, 20, 0.0, accuracy=80.0, running=2) == 1


@pytest.mark.parametrize(
    "bad", [{"accuracy_floor": 80.0}, {"accuracy_floor": 90.0}, {"attainment": 0.0}, {"attainment": 1.5}]
)
def test_settings_that_no_replica_could_meet_are_refused(bad):
    with pytest.raises(PolicyError):
        AccuracyFirst(TABLE, **{**SETTINGS, **bad})


def test_rays_context_is_read(rate):
    """Two replicas, one of which gets three quarters of the requests."""
    policy = AccuracyFirstPolicy(TABLE.to_json(), **SETTINGS)
    context = SimpleNamespace(target_num_replicas=2, aggregated_metrics=None)
    assert policy(context) == (2, {})
    seen = []
    policy._rule = SimpleNamespace(step=lambda *figures: seen.append(figures) or 3)
    context.aggregated_metrics = {
        "arrivals_per_s": {"a": 30.0, "b": 10.0},
        "accuracy": {"a": 70.0, "b": 80.0},
        "attainment": {"a": 1.0, "b": 0.8},
    }
    assert policy(context) == (3, {})
    [(_, arrivals, accuracy, attainment, running)] = seen
    assert (arrivals, accuracy, running) == (40.0, 72.5, 2)
    assert attainment == pytest.approx(0.95)
