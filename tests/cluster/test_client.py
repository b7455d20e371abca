"""The client of the replicas, without Ray: outcomes, retries, and requests that are refused."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from subnetact.cluster.client import ReplicaClient
from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    InvalidRequest,
    QueueFull,
    RequestError,
    WorkerHung,
)
from subnetact.serve.base_app import unix_ms
from subnetact.serving import Answer

ANSWER = Answer(output=None, subnet=1, accuracy=70.0, latency_ms=5.0, met=True, batch_size=8)


LONG_MS = 1e7


class Lost(Exception):
    pass


class Full(Exception):
    pass


class Replicas:
    """Answers with the next of several outcomes: a reply, an exception, or what to wait for."""

    def __init__(self, *outcomes, clock=None):
        self.outcomes, self.calls, self.clock = iter(outcomes), [], clock

    async def __call__(self, **request):
        self.calls.append(request)
        outcome = next(self.outcomes, None)
        if isinstance(outcome, float):
            self.clock.now += outcome  # of the test
            outcome = next(self.outcomes, None)
        if isinstance(outcome, threading.Event):
            await asyncio.to_thread(outcome.wait, 60)
            outcome = None
        if isinstance(outcome, BaseException) and not isinstance(outcome, RequestError):
            raise outcome
        return outcome or [ANSWER._replace(output=x + 1) for x in request["xs"]]


class Clock:
    """A clock that the test moves, in s."""

    now = 1000.0

    def __call__(self):
        return self.now * 1e3


@pytest.fixture
def clock():
    return Clock()


def client_of(call, **settings):
    return ReplicaClient(call, {0: 60.0, 1: 70.0}, died=(Lost,), full=(Full,), **settings)


def ask(to, rows=1, deadline_ms=LONG_MS, **more):
    return asyncio.run(to.infer_rows([torch.zeros(2)] * rows, deadline_ms, **more))


def ended(client):
    stats = client.stats().to_dict()
    names = ("met", "late", "dropped", "failed", "refused", "cancelled", "closed", "retried")
    return {name: stats[name] for name in names if stats[name]}


def test_rows_are_answered_in_order_and_counted(clock):
    replicas = Replicas()
    client = client_of(replicas, clock_ms=clock)
    before_ms = unix_ms()
    answers = ask(client, rows=3, deadline_ms=5000.0, min_accuracy=65.0, priority=2, client="someone")
    assert [answer.output.tolist() for answer in answers] == [[1.0, 1.0]] * 3
    assert {(a.subnet, a.accuracy, a.met, a.batch_size) for a in answers} == {(1, 70.0, True, 8)}
    [call] = replicas.calls
    assert (call["min_accuracy"], call["priority"], call["client"]) == (65.0, 2, "someone")
    assert call["left_ms"] == pytest.approx(5000.0)
    assert before_ms <= call["due_ms"] - 5000.0 <= unix_ms()
    stats = client.stats()
    assert (stats.met, stats.served_by, stats.mean_accuracy) == (3, {1: 3}, 70.0)


def test_a_request_whose_replica_died_is_sent_once_more_with_the_time_that_is_left(clock):
    replicas = Replicas(0.1, Lost(), clock=clock)
    client = client_of(replicas, clock_ms=clock)
    assert ask(client, deadline_ms=5000.0)[0].met
    assert [call["left_ms"] for call in replicas.calls] == pytest.approx([5000.0, 4900.0])
    assert ended(client) == {"met": 1, "retried": 1}
    replicas = Replicas(0.1, Lost(), clock=clock)
    client = client_of(replicas, clock_ms=clock)
    with pytest.raises(DeadlinePassed, match="died"):
        ask(client, deadline_ms=50.0)
    assert (len(replicas.calls), ended(client)) == (1, {"dropped": 1, "retried": 1}), "no time is left"
    client = client_of(Replicas(Lost(), Lost()))
    with pytest.raises(BatchFailed, match="two replicas died"):
        ask(client)
    assert ended(client) == {"failed": 1, "retried": 1}


@pytest.mark.parametrize(
    ("outcome", "error", "counted"),
    [
        (QueueFull("full"), QueueFull, {"refused": 1}),
        (DeadlinePassed("late"), DeadlinePassed, {"dropped": 1}),
        (InvalidRequest("bad"), InvalidRequest, {"refused": 1}),
        (BatcherClosed("the replica ends"), BatcherClosed, {"closed": 1}),
        (WorkerHung("hung"), BatchFailed, {"failed": 1}),
        (Full(), QueueFull, {"refused": 1}),
        (KeyError("a bug"), BatchFailed, {"failed": 1}),
    ],
)
def test_every_error_is_typed_and_counted_once(outcome, error, counted):
    client = client_of(Replicas(outcome))
    with pytest.raises(error):
        ask(client)
    assert ended(client) == counted
    stats = client.stats()
    assert stats.queued == 0
    assert stats.submitted + stats.refused == 1


def test_a_replica_that_never_answers_does_not_hold_the_request(monkeypatch):
    monkeypatch.setattr("subnetact.cluster.client.LATE_MS", 20.0)
    never = threading.Event()
    client = client_of(Replicas(never))

    async def wait():
        try:
            await client.infer_rows([torch.zeros(2)], 50.0)
        finally:
            never.set()  # the thread that stands for the replica must end for the loop to end

    with pytest.raises(DeadlinePassed):
        asyncio.run(wait())


def test_requests_beyond_the_limit_are_refused_at_the_door():
    def check(x):
        if x.sum():
            raise InvalidRequest("too long")

    async def several():
        tasks = [asyncio.ensure_future(client.infer_rows([torch.zeros(2)] * 2, LONG_MS)) for _ in range(3)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # the one that is refused
        go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    go = threading.Event()
    replicas = Replicas(go, go)
    client = client_of(replicas, check=check, max_queue=2, replicas=lambda: (2, 2))
    with pytest.raises(InvalidRequest):
        asyncio.run(client.infer_rows([torch.ones(2)], LONG_MS))
    found = asyncio.run(several())
    assert sorted(type(one).__name__ for one in found) == ["QueueFull", "list", "list"]
    assert client.stats().full == 2
    client.close()
    with pytest.raises(BatcherClosed):
        ask(client)
    assert len(replicas.calls) == 2


def test_a_request_that_is_cancelled_is_counted():
    async def leave(client):
        task = asyncio.ensure_future(client.infer_rows([torch.zeros(2)], LONG_MS))
        while not client.stats().queued:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        never.set()

    never = threading.Event()
    client = client_of(Replicas(never))
    asyncio.run(leave(client))
    assert ended(client) == {"cancelled": 1}
