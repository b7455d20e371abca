"""What a replica holds and when it would answer one more request, from old reports."""

from __future__ import annotations

import math
import random

import pytest

from subnetact.cluster.forecast import ReplicaForecast, ReplicaReport, ranking, work

IDLE = ReplicaReport(1, 0, 0, 0.0, 2.0, 10.0, {}, {})


def test_reports_travel_as_dictionaries():
    assert ReplicaReport.read(IDLE._asdict()) == IDLE
    assert ReplicaReport.read({}) is None
    assert ReplicaReport.read(None) is None
    assert ReplicaReport.read({"number": 1}) is None  # of another version


@pytest.mark.parametrize("field", ReplicaReport._fields)
@pytest.mark.parametrize("value", [None, "1", math.nan, math.inf, -1, {"me": math.nan}, {"me": -1}, [1]])
def test_a_report_that_makes_no_sense_is_none(field, value):
    assert ReplicaReport.read({**IDLE._asdict(), field: value}) is None


def test_queue_free_time_and_latency_add_up():
    forecast = ReplicaForecast("me")
    forecast.learn(IDLE._replace(queued=5, running=2, free_ms=30.0), now_ms=0.0)
    assert forecast.finish_ms(0.0) == 30.0 + 5 * 2.0 + 10.0
    assert forecast.finish_ms(20.0, inputs=4) == 10.0 + (5 + 3) * 2.0 + 10.0
    assert forecast.finish_ms(1e4) == 5 * 2.0 + 10.0


def test_what_a_sender_sent_is_counted_once_however_old_the_report_is():
    """One sender; requests of several inputs arrive at the replica, are answered and reported with delays."""
    rng = random.Random(0)
    forecast = ReplicaForecast("me")
    on_the_way, held, answers, reports = [], [], [], []
    received = finished = 0
    for step in range(3000):
        if rng.random() < 0.5:
            inputs = rng.choice([1, 4, 16])
            forecast.outstanding += inputs
            on_the_way.append((step + rng.randrange(5), inputs))
        for due, inputs in [one for one in on_the_way if one[0] <= step]:
            on_the_way.remove((due, inputs))
            held.append(inputs)
            received += inputs
        if held and rng.random() < 0.5:
            done = held.pop(0)
            finished += done
            answers.append((step + rng.randrange(5), done))
        for due, inputs in [one for one in answers if one[0] <= step]:
            answers.remove((due, inputs))
            forecast.outstanding -= inputs
        if step % 20 == 0:
            counts = {"queued": sum(held), "received": {"me": received}, "finished": {"me": finished}}
            reports.append((step + 30, IDLE._replace(number=step, **counts)))
        if reports and reports[0][0] <= step:
            forecast.learn(reports.pop(0)[1], float(step))
        on_both_ways = sum(inputs for _, inputs in on_the_way + answers)
        assert forecast.held() == sum(held) + on_both_ways
        assert forecast.senders == 1.0


def test_a_report_adds_what_others_have_sent():
    forecast = ReplicaForecast("me")
    forecast.outstanding = 7
    counts = {"received": {"me": 4, "other": 9}, "finished": {"other": 3}}
    forecast.learn(IDLE._replace(queued=8, running=2, **counts), now_ms=0.0)
    assert forecast.held() == 7 + 6  # three of the seven are on their way
    forecast.outstanding = 0
    assert forecast.held() == 6


def test_the_same_report_changes_nothing():
    forecast = ReplicaForecast("me")
    forecast.learn(IDLE._replace(free_ms=50.0), now_ms=0.0)
    forecast.learn(IDLE._replace(free_ms=50.0), now_ms=40.0)  # read again, 40 ms later
    assert forecast.finish_ms(40.0) == 20.0


def test_without_a_report_the_shortest_queue_is_first():
    busy, idle = ReplicaForecast("me"), ReplicaForecast("me")
    busy.outstanding = 3
    assert not busy.reported
    assert idle.finish_ms(0.0) < busy.finish_ms(0.0)
    assert work([busy, idle], 2) == [5.0, 2.0]


def test_a_burst_between_two_reports_is_spread():
    """40 requests arrive before the next report of two idle replicas, one of which seems a little faster."""
    replicas = [ReplicaForecast("me"), ReplicaForecast("me")]
    replicas[0].learn(IDLE, 0.0)
    replicas[1].learn(IDLE._replace(per_input_ms=2.8, one_ms=14.0), 0.0)
    for _ in range(40):
        amounts = work(replicas, 16)
        replicas[amounts.index(min(amounts))].outstanding += 16
    assert [replica.outstanding for replica in replicas] == [320, 320]


def test_a_replica_of_a_third_of_the_speed_gets_a_third_of_the_requests():
    replicas = [ReplicaForecast("me"), ReplicaForecast("me"), ReplicaForecast("me")]
    for replica, input_ms in zip(replicas, (2.0, 6.0, 2.0), strict=True):
        replica.learn(IDLE._replace(per_input_ms=input_ms), 0.0)
    for _ in range(70):
        amounts = work(replicas)
        replicas[amounts.index(min(amounts))].outstanding += 1
    assert [replica.outstanding for replica in replicas] == [30, 10, 30]


def test_other_senders_have_the_same_old_report():
    """One of ten equal senders: what it has sent since a report, the others have sent too."""
    forecast = ReplicaForecast("me")
    received = {"me": 0, **{f"other {i}": 0 for i in range(9)}}
    forecast.learn(IDLE._replace(received=dict(received)), 0.0)
    for number in range(2, 30):
        received = {sender: count + 5 for sender, count in received.items()}
        report = IDLE._replace(number=number, received=dict(received), finished=dict(received))
        forecast.learn(report, 0.0)
    assert forecast.senders == pytest.approx(10.0)
    before = forecast.held()
    forecast.outstanding += 1
    assert forecast.held() - before == pytest.approx(10.0)
    assert ReplicaForecast("alone").senders == 1.0


def test_the_better_of_two_replicas_is_first_and_the_others_follow_by_their_work():
    rng = random.Random(0)
    best = 0
    for _ in range(200):
        entries = [(float(rank), rng.random(), f"replica {rank}") for rank in range(8)]
        found = ranking(entries)
        assert sorted(found) == sorted(entries)
        assert found[0] < found[1]
        assert found[2:] == sorted(found[2:])
        best += found[0][0] == 0.0
    assert 30 < best < 70  # it is one of the two in a quarter of the cases
    assert ranking(entries[:2]) == sorted(entries[:2])
    assert ranking([]) == []
