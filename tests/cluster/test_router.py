"""What the router counts, without a cluster: choices, acceptances, answers, and replicas that are gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from subnetact.cluster.deadline import Deadline
from subnetact.cluster.forecast import ReplicaReport
from subnetact.errors import MissingExtra, QueueFull

slack_router = pytest.importorskip(
    "subnetact.cluster.slack_router", reason="needs Ray Serve: the extra `ray`", exc_type=MissingExtra
)
pytestmark = pytest.mark.ray
REPORT = ReplicaReport(1, 0, 0, 0.0, 2.0, 10.0, {}, {})


@pytest.fixture
def router(monkeypatch):
    """A router that is connected to nothing."""
    base = slack_router.RequestRouter
    monkeypatch.setattr(base, "__init__", lambda self: None)
    for name in (
        "on_request_routed",
        "on_request_completed",
        "update_replicas",
        "_remove_pending_request_from_indices",
    ):
        monkeypatch.setattr(base, name, lambda self, *_: None)
    return slack_router.SlackRouter()


def replica(name, **facts):
    return SimpleNamespace(replica_id=name, routing_stats=REPORT._replace(**facts)._asdict())


def request(name, inputs=1, left_ms=1e4):
    errors = []
    return SimpleNamespace(
        kwargs={"sender": "me", "xs": [0] * inputs, "deadline": tuple(Deadline.after(left_ms))},
        metadata=SimpleNamespace(internal_request_id=name),
        routing_context=SimpleNamespace(should_backoff=False),
        future=SimpleNamespace(done=lambda: bool(errors), set_exception=errors.append),
        errors=errors,
    )


def choose(router, replicas, pending):
    return [group[0].replica_id for group in asyncio.run(router.choose_replicas(replicas, pending))]


def outstanding(router):
    return {name: forecast.outstanding for name, forecast in router._forecasts.items()}


def test_every_request_counts_from_its_choice_to_its_answer(router):
    pair = [replica("a"), replica("b")]
    first, second = request("1", 3), request("2", 2)
    [one, other] = choose(router, pair, first)
    assert outstanding(router) == {one: 3, other: 0}
    assert choose(router, pair, second) == [other, one]
    router.on_request_routed(first, one, None)
    router.on_request_routed(second, one, None)  # the other one did not accept it
    assert outstanding(router) == {one: 5, other: 0}
    router.on_request_completed(one, "1")
    router.on_request_completed(one, "1")
    router.on_request_completed(one, "unknown")
    assert outstanding(router) == {one: 2, other: 0}
    router.on_request_completed(one, "2")
    assert outstanding(router) == {one: 0, other: 0}


def test_an_answer_may_come_before_the_news_that_the_replica_accepted(router):
    pending = request("1", 4)
    [one, _] = choose(router, [replica("a"), replica("b")], pending)
    router.on_request_completed(one, "1")
    router.on_request_routed(pending, one, None)
    assert set(outstanding(router).values()) == {0}


def test_a_request_that_is_sent_again_counts_once(router):
    pair, pending = [replica("a"), replica("b", queued=100)], request("1", 4)
    assert choose(router, pair, pending)[0] == "a"
    router.update_replicas(pair[1:])
    assert choose(router, pair[1:], pending) == ["b"]
    router.on_request_completed("a", "1")  # the end of the first attempt
    assert outstanding(router) == {"b": 4}
    router.on_request_completed("b", "1")
    assert outstanding(router) == {"b": 0}


def test_requests_that_nobody_accepted_are_forgotten(router, monkeypatch):
    [one] = choose(router, [replica("a")], request("1", 4))
    now = slack_router.time.monotonic()
    monkeypatch.setattr(slack_router.time, "monotonic", lambda: now + 6.0)
    choose(router, [replica("a")], request("2", 1))
    assert outstanding(router) == {one: 1}


def test_a_request_that_is_accepted_late_counts_until_its_answer(router, monkeypatch):
    late = request("1", 4)
    choose(router, [replica("a")], late)
    now = slack_router.time.monotonic()
    monkeypatch.setattr(slack_router.time, "monotonic", lambda: now + 6.0)
    choose(router, [replica("a")], request("2", 1))
    assert outstanding(router) == {"a": 1}  # the first one may have been cancelled
    router.on_request_routed(late, "a", None)
    assert outstanding(router) == {"a": 5}
    router.on_request_completed("a", "1")
    assert outstanding(router) == {"a": 1}


def test_an_early_answer_of_another_replica_than_the_first_choice_is_no_work(router):
    pending = request("1", 4)
    _, other = choose(router, [replica("a"), replica("b")], pending)
    router.on_request_completed(other, "1")
    router.on_request_routed(pending, other, None)
    assert set(outstanding(router).values()) == {0}


def test_the_end_of_a_refused_attempt_is_not_the_answer(router):
    pair, pending = [replica("a"), replica("b", queued=100)], request("1", 4)
    assert choose(router, pair, pending)[0] == "a"
    assert choose(router, pair[1:], pending) == ["b"]
    router.on_request_completed("a", "1")
    router.on_request_routed(pending, "b", None)
    assert outstanding(router) == {"a": 0, "b": 4}


def test_what_no_replica_can_answer_in_time_is_refused_and_not_counted(router):
    pair = [replica("a", queued=400), replica("b", queued=300)]
    pending = request("1", left_ms=500.0)
    choose(router, pair, pending)
    assert [type(error) for error in pending.errors] == [QueueFull]
    assert outstanding(router) == {"a": 0, "b": 0}
    unknown = [pair[0], SimpleNamespace(replica_id="new", routing_stats={})]
    pending = request("2", left_ms=500.0)
    assert choose(router, unknown, pending)[0] == "new"
    assert pending.errors == []
