"""The application of a front, without Ray: time in the proxy counts, and counters are of all processes."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from subnetact.cluster.client import ReplicaClient
from subnetact.cluster.front import FrontApp, Share
from subnetact.serve.base_app import ARRIVED, unix_ms
from subnetact.serving import Answer

LATER_MS = 10.0**6


class Engine:
    """Doubles vectors of two values."""

    sample = torch.zeros(2)
    fingerprint = None

    def run(self, subnet, rows, size):
        return [2.0 * row for row in rows]


async def answer(xs, left_ms, **ask):
    lefts.append(left_ms)
    return [Answer(2.0 * x, 1, 70.0, 1.0, True, 1) for x in xs]


lefts: list[float] = []


def fronts_of(count):
    """Return fronts whose counters are gathered as those of the processes of one application."""
    clients = {f"front{i}": ReplicaClient(answer, {1: 70.0}) for i in range(count)}

    async def gather():
        shares = {
            name: Share(client.accuracy, client.stats(), dict(front.responses))
            for (name, client), front in zip(clients.items(), fronts, strict=True)
        }
        return shares, {"replica0": Share({1: 70.0}, clients["front0"].stats())}

    fronts = [FrontApp(gather, client, Engine(), slo_ms=LATER_MS) for client in clients.values()]
    return fronts


def exchange(front, method="POST", path="/infer", body=None, headers=(), **scope):
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
    sent = []

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    pairs = [(name.encode(), str(value).encode()) for name, value in dict(headers).items()]
    facts = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": pairs, **scope}
    asyncio.run(front(facts, receive, send))
    return sent[0]["status"], b"".join(part.get("body", b"") for part in sent[1:]).decode()


def ask(front, deadline_ms=None, waited_ms=0.0, **headers):
    body = {"input": [1.0, 2.0]} if deadline_ms is None else {"input": [1.0, 2.0], "deadline_ms": deadline_ms}
    return exchange(front, body=body, headers=headers, **{ARRIVED: unix_ms() - waited_ms})


def test_the_time_in_the_proxy_counts():
    [front] = fronts_of(1)
    status, text = ask(front, deadline_ms=LATER_MS, waited_ms=0.9 * LATER_MS)
    answer = json.loads(text)
    assert (status, answer["met"]) == (200, True)
    assert answer["latency_ms"] >= 0.9 * LATER_MS
    assert lefts[-1] <= 0.1 * LATER_MS
    assert ask(front, deadline_ms=LATER_MS, waited_ms=1.1 * LATER_MS)[0] == 504
    assert ask(front, deadline_ms=LATER_MS, waited_ms=-LATER_MS)[0] == 200  # the proxy's clock is ahead
    assert lefts[-1] <= LATER_MS


@pytest.mark.parametrize(
    ("due", "status"),
    [
        (lambda: int(unix_ms() + LATER_MS / 2), 200),
        (lambda: int(unix_ms()) - 1, 504),
        (lambda: int(unix_ms() + 1e12), 400),  # beyond the limit of deadlines
        *((lambda text=text: text, 400) for text in ("", "-1", "1e12", "nan", "1" * 30)),
    ],
)
def test_a_deadline_may_be_a_time_of_day(due, status):
    [front] = fronts_of(1)
    assert ask(front, **{"x-deadline-unix-ms": due()})[0] == status
    if status == 200:
        assert lefts[-1] <= LATER_MS / 2
        assert ask(front, LATER_MS / 4, **{"x-deadline-unix-ms": due()})[0] == status
        assert lefts[-1] <= LATER_MS / 4, "that of the body counts before that of the header"


def series(front):
    """Return the values of one scrape by the name and the labels of their series."""
    status, text = exchange(front, "GET", "/metrics")
    assert status == 200
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_no_series_falls_whichever_front_is_scraped():
    fronts, last = fronts_of(2), {}
    rising = ("_total", "_bucket", "_count", "_sum")
    for turn in range(6):
        ask(fronts[turn % 3 % 2])
        values = series(fronts[turn % 2])
        assert not last or values.keys() >= last.keys()
        for name, value in values.items():
            if name.partition("{")[0].endswith(rising):
                assert value >= last.get(name, 0.0), name
        last = values
    submitted = [last[f'subnetact_submitted_total{{front="front{i}"}}'] for i in range(2)]
    assert submitted == [4.0, 2.0]
    answer = 'subnetact_http_responses_total{{front="front{}",outcome="met",route="/infer",status="200"}}'
    assert [last[answer.format(i)] for i in range(2)] == submitted
    assert last['subnetact_replica_submitted_total{replica="replica0"}'] == 4.0


def test_the_status_page_sums_over_the_fronts():
    fronts = fronts_of(2)
    for front in (*fronts, fronts[0]):
        ask(front)
        for one in fronts:
            status = json.loads(exchange(one, "GET", "/status")[1])
    assert (status["submitted"], status["met"], status["workers"]) == (3, 3, 1)
    assert status["served_by"] == {"1": 3}
