"""The time at which a replica would answer one more request, from old reports."""

from __future__ import annotations

import random

import pytest

from subnetact.cluster.forecast import QUIET_MS, ReplicaForecast, ReplicaReport, ranking

IDLE = ReplicaReport(1, 0, 0, 0.0, 2.0, 10.0, {}, {})


def test_reports_travel_as_dictionaries():
    assert ReplicaReport.read(IDLE._asdict()) == IDLE
    assert ReplicaReport.read({}) is None
    assert ReplicaReport.read(None) is None
    assert ReplicaReport.read({"number": 1}) is None  # of another version


def test_queue_free_time_and_latency_add_up():
    forecast = ReplicaForecast("me")
    forecast.learn(IDLE._replace(queued=5, running=2, free_ms=30.0), now_ms=0.0)
    assert forecast.finish_ms(0.0) == 30.0 + 5 * 2.0 + 10.0
    assert forecast.finish_ms(20.0, inputs=4) == 10.0 + (5 + 3) * 2.0 + 10.0
    assert forecast.finish_ms(1e4) == 5 * 2.0 + 10.0


def test_inputs_that_the_report_does_not_contain_are_added():
    """7 sent, of which the replica had received 4 when it reported: 3 are on their way."""
    forecast = ReplicaForecast("me")
    forecast.sent(7, 0.0)
    forecast.learn(IDLE._replace(queued=2, running=2, received={"me": 4, "other": 9}), now_ms=0.0)
    assert forecast.waiting() == 5
    forecast.chosen(2)
    assert forecast.waiting() == 7
    forecast.chosen(-2)
    forecast.sent(1, 0.0)
    assert forecast.waiting() == 6


def test_answers_since_the_report_are_taken_off():
    forecast = ReplicaForecast("me")
    forecast.sent(8, 0.0)
    forecast.completed(1, 0.0)
    report = IDLE._replace(queued=5, running=2, received={"me": 8}, finished={"me": 1})
    forecast.learn(report, now_ms=0.0)
    assert forecast.waiting() == 5
    forecast.completed(2, 0.0)  # those that ran
    assert forecast.waiting() == 5
    forecast.completed(3, 0.0)
    assert forecast.waiting() == 2


def test_the_same_report_changes_nothing():
    forecast = ReplicaForecast("me")
    forecast.learn(IDLE._replace(free_ms=50.0), now_ms=0.0)
    forecast.learn(IDLE._replace(free_ms=50.0), now_ms=40.0)  # read again, 40 ms later
    assert forecast.finish_ms(40.0) == 20.0


def test_without_a_report_the_shortest_queue_is_first():
    busy, idle = ReplicaForecast("me"), ReplicaForecast("me")
    busy.sent(3, 0.0)
    assert not busy.reported
    assert idle.finish_ms(0.0) < busy.finish_ms(0.0)
    busy.completed(5, 0.0)
    assert busy.outstanding == 0


def test_inputs_that_were_lost_on_the_way_do_not_count_for_ever():
    """Two were sent and cancelled before the replica took them: its counts never show them."""
    forecast = ReplicaForecast("me")
    forecast.learn(IDLE, 0.0)
    forecast.sent(2, 0.0)
    assert forecast.waiting() == 2
    forecast.completed(2, 0.0)
    assert forecast.waiting() == 0
    later = 2 * QUIET_MS
    forecast.learn(IDLE._replace(number=2), later)
    forecast.sent(4, later)
    forecast.learn(IDLE._replace(number=3, queued=4, received={"me": 4}), later)
    forecast.completed(0, later)
    assert forecast.waiting() == 4


@pytest.mark.parametrize("spread", [False, True])
def test_a_burst_between_two_reports_is_spread(spread):
    """40 requests arrive before the next report of two idle replicas."""
    replicas = [ReplicaForecast("me"), ReplicaForecast("me")]
    for forecast in replicas:
        forecast.learn(IDLE, 0.0)
    sent = [0, 0]
    for _ in range(40):
        best = min((0, 1), key=lambda i: replicas[i].rank_ms(0.0))
        sent[best] += 1
        if spread:
            replicas[best].sent(1, 0.0)
    assert sent == ([20, 20] if spread else [40, 0])


def test_the_rank_is_the_work_that_a_replica_holds():
    forecast = ReplicaForecast("me")
    assert forecast.rank_ms(0.0, inputs=3) == 3
    forecast.learn(IDLE._replace(queued=5, running=2, free_ms=30.0), 0.0)
    assert forecast.rank_ms(0.0) == 7 * 2.0 + 10.0
    assert forecast.rank_ms(1e4, inputs=4) == 10 * 2.0 + 10.0
    forecast.sent(2, 0.0)
    assert forecast.rank_ms(0.0) == 9 * 2.0 + 10.0
    forecast.completed(1, 0.0)
    assert forecast.rank_ms(0.0) == 7 * 2.0 + 10.0  # one is on its way; the answered one was held
    slow = ReplicaForecast("me")
    slow.learn(IDLE._replace(queued=5, per_input_ms=20.0), 0.0)
    assert slow.rank_ms(0.0) > forecast.rank_ms(0.0)


def test_other_senders_have_the_same_old_report():
    """One of ten equal senders: what it has sent since a report, the others have sent too."""
    forecast = ReplicaForecast("me")
    received = {"me": 0, **{f"other {i}": 0 for i in range(9)}}
    forecast.learn(IDLE._replace(received=dict(received)), 0.0)
    for number in range(2, 30):
        received = {sender: count + 5 for sender, count in received.items()}
        forecast.sent(5, 0.0)
        forecast.completed(5, 0.0)
        report = IDLE._replace(number=number, received=dict(received), finished=dict(received))
        forecast.learn(report, 0.0)
    assert forecast.senders == pytest.approx(10.0)
    before = forecast.rank_ms(0.0)
    forecast.sent(1, 0.0)
    assert forecast.rank_ms(0.0) - before == pytest.approx(10 * 2.0)
    assert ReplicaForecast("alone").senders == 1.0


def test_of_many_routers_each_looks_at_a_part_of_the_replicas_first():
    rng = random.Random(0)
    entries = [(float(rank), rng.random(), f"replica {rank}") for rank in range(64)]
    assert ranking(entries, 1.0) == sorted(entries)
    for senders, first in ((4.0, 16), (64.0, 2), (100.0, 2)):
        found = ranking(entries, senders)
        assert sorted(found) == sorted(entries)
        assert found[:first] == sorted(found[:first])
        assert found[first:] == sorted(found[first:])
        assert found != sorted(entries)
    assert ranking(entries[:2], 50.0) == sorted(entries[:2])
    assert ranking([], 1.0) == []
