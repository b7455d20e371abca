"""Every HTTP answer is counted as the client got it, and every address keeps the rules of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_runners import Echo

pytest.importorskip("starlette", reason="serving needs the extra `serve`")
pytest.importorskip("uvicorn", reason="serving needs the extra `serve`")

from subnetact.latency.table import LatencyTable
from subnetact.serve import Limits, build_app
from subnetact.serving import Answer, Batcher, SlackFit

TOKEN = "a-token-of-the-tests"
KNOWN = [(b"authorization", f"Bearer {TOKEN}".encode())]
LINE = re.compile(r"subnetact_http_responses_total\{([^}]*)\} (\S+)")


async def counts(app, post):
    """The counter by (route, status, outcome), as Prometheus reads it."""
    text = (await post(app, None, path="/metrics", method="GET", headers=KNOWN))[2].decode()
    found = {}
    for labels, value in LINE.findall(text):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[named["route"], named["status"], named["outcome"]] = float(value)
    return {key: count for key, count in found.items() if key[0] != "/metrics"}


async def test_every_answer_is_counted_by_route_status_and_outcome(gated, post):
    with gated(limits=Limits(body_bytes=100), tokens={TOKEN: "tests"}, max_queue=9) as (app, runner, _):
        runner.gate.set()
        for _ in range(3):
            await post(app, [0, 0, 0, 1], headers=KNOWN)
        for _ in range(100):
            late = [*KNOWN, (b"x-deadline-ms", b"1e-9")]
            assert (await post(app, [0, 0, 0, 1], headers=late))[0] == 504
        await post(app, [0, 0, 0, 1])
        for raw in (b"{", b" " * 101):
            await post(app, None, raw=raw, headers=KNOWN)
        body = (await post(app, [-1, 0, 0, 0], headers=KNOWN))[2]
        assert (json.loads(body)["error"], b"passwd" in body) == ("BatchFailed", False)
        await post(app, None, method="GET", headers=KNOWN)
        for path in ("/any", "/other"):
            await post(app, None, path=path, headers=KNOWN)
        app.closing = True
        await post(app, None, path="/readyz", method="GET")
        once = dict.fromkeys((("/infer", status, "") for status in ("401", "400", "413", "500", "405")), 1)
        more = {("/infer", "200", "met"): 3, ("/infer", "504", ""): 100, ("", "404", ""): 2}
        assert await counts(app, post) == {**once, **more, ("/readyz", "503", ""): 1}


async def test_metrics_and_clients_agree_on_what_was_in_time(gated, post):
    with gated() as (app, _, batcher):

        async def infer(*_, **__):
            await asyncio.sleep(0.01)
            return Answer(torch.tensor([0.0, 1.0]), 0, 70.0, 1.0, True, 1)  # in time, says the batcher

        batcher.infer = infer
        told = []
        for deadline in (b"5", b"60000", b"5", b"60000", b"60000"):
            answer = await post(app, [0, 0, 0, 1], headers=[(b"x-deadline-ms", deadline)])
            told.append(json.loads(answer[2])["met"])
        assert told == [False, True, False, True, True]
        expected = {("/infer", "200", "met"): 3, ("/infer", "200", "late"): 2}
        assert await counts(app, post) == expected


async def test_the_default_limit_lets_all_rows_in(gated, post):
    rows = 50_000
    values = b"-0.12345678901234567890123456," * (rows * 4)
    raw = b'{"inputs": [{"name": "input", "shape": [%d, 4], "datatype": "FP32", "data": [' % rows
    raw += values[:-1] + b"]}]}"
    limits = Limits(rows=rows)

    with gated(max_queue=rows, limits=limits) as (app, _, _):

        async def all_rows(xs, *_, **__):
            return [Answer(x, 0, 70.0, 1.0, True, 1) for x in xs]

        app._infer_rows = all_rows
        assert len(raw) > 2 * app.body_bytes
        assert (await post(app, None, path="/v2/models/model/infer", raw=raw))[0] == 200
        assert (await post(app, None, raw=raw))[0] == 413  # /infer takes one input


async def test_head_is_answered_wherever_get_is(gated, post):
    with gated() as (app, _, _):
        for path, described in app.openapi()["paths"].items():
            expected = 200 if "get" in described else 405
            assert (await post(app, None, path=path, method="HEAD", raw=b""))[0] == expected


async def test_a_process_without_workers_lives_and_is_not_ready(gated, post):
    with gated(tokens={TOKEN: "tests"}) as (app, runner, _):
        app.unready = lambda: "no worker"
        for path, status in (
            *(("/livez", 200), ("/v2/health/live", 200)),
            *((path, 503) for path in ("/readyz", "/healthz", "/v2/health/ready")),
        ):
            assert (await post(app, None, path=path, method="GET"))[0] == status, path
        for path in ("/v2/models/model/ready", "/v2/models/model/versions/1/ready"):
            status, _, body = await post(app, None, path=path, method="GET", headers=KNOWN)
            assert (status, json.loads(body)) == (503, {"name": "model", "ready": False})
        runner.gate.set()
        for app.closing, connection in ((False, None), (True, "close")):  # while the server drains
            status, headers, _ = await post(app, [0, 0, 0, 1], headers=KNOWN)
            assert (status, headers.get("connection")) == (200, connection)


def test_health_waits_for_the_first_worker(post, wait_for):
    runner, may_start = Echo(LatencyTable(["one"], [70.0], [1], [[1.0]])), threading.Event()
    runner.sample = torch.zeros(4)
    runner.enter_worker = lambda threads: may_start.wait(60)
    with Batcher(runner, policy=SlackFit(runner.table, slo_ms=60_000)) as batcher:
        app = build_app(batcher, runner, slo_ms=60_000)

        def health():
            return asyncio.run(post(app, None, path="/healthz", method="GET"))[0]

        try:
            assert health() == 503
        finally:
            may_start.set()
        wait_for(lambda: health() == 200, 60)


@pytest.mark.parametrize("app", ["network", "text"])
def test_the_document_has_the_schema_of_every_answer_and_of_tokens(gated, app):
    from types import SimpleNamespace

    from subnetact.serve import build_text_app

    if app == "network":
        with gated(tokens={TOKEN: "tests"}) as (served, _, _):
            document = served.openapi()
    else:
        generator = SimpleNamespace(close=lambda wait=True: None)
        document = build_text_app(generator, SimpleNamespace(encode=list), tokens={TOKEN: "t"}).openapi()
    assert document["openapi"].startswith("3.1")
    infer = {"/infer", "/v2", "/v2/models/model/infer", "/"} if app == "network" else {"/v1/completions"}
    assert infer | {"/metrics", "/healthz", "/readyz"} <= set(document["paths"])
    for path, described in document["paths"].items():
        assert "{" not in path
        for operation in described.values():
            answers = {name: resolved(document, one) for name, one in operation["responses"].items()}
            assert operation["summary"]
            kinds = [kind for one in answers.values() for kind in one["content"].values()]
            assert all(resolved(document, kind["schema"])["type"] for kind in kinds)
    for part in re.findall(r'"\$ref": "#/([^"]*)"', json.dumps(document)):
        resolved(document, {"$ref": f"#/{part}"})
    assert set(document["components"]["securitySchemes"]) == {"bearer", "basic"}
    assert document["paths"]["/livez"]["get"]["security"] == []


def resolved(document, part):
    while "$ref" in part:
        names = part["$ref"].removeprefix("#/").split("/")
        part = document
        for name in names:
            part = part[name]
    return part


SLOW = """
import sys, threading, time
import torch
from subnetact import Batcher, LatencyTable, SlackFit
from subnetact.serve import build_app, run

class Runner:
    keys, sample = ("one",), torch.zeros(4)
    def check(self, x, finite=False): pass
    def run(self, subnet, inputs, batch_size):
        if inputs[0].sum():
            print("begun", flush=True)
            time.sleep(float(sys.argv[1]))
        return list(inputs)

runner = Runner()
batcher = Batcher(runner, policy=SlackFit(LatencyTable(["one"], [70.0], [1], [[1.0]]), slo_ms=60000.0))
run(build_app(batcher, runner, slo_ms=60000.0), port=0)
print("returned", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGTERM, None), (signal.SIGINT, None), (signal.SIGTERM, signal.SIGINT)],
)
def test_a_clean_drain_exits_with_0_and_a_second_signal_ends_at_once(first, second):
    def asked(path, body=None):
        """The status and the text, or that it does not listen any more: both follow the first signal."""
        with contextlib.closing(http.client.HTTPConnection(host, timeout=60)) as connection:
            try:
                connection.request("GET" if body is None else "POST", path, body)
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (http.client.HTTPException, OSError):
                return None, b"closing"

    command = [sys.executable, "-c", SLOW, "0.5" if second is None else "600"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        ThreadPoolExecutor(1) as pool,
    ):
        host = process.stdout.readline().removeprefix("listening on http://").strip()
        seen = pool.submit(asked, "/infer", json.dumps({"input": [1, 2, 3, 4]}).encode())
        assert process.stdout.readline() == "begun\n"
        process.send_signal(first)
        if second is None:
            assert process.wait(60) == 0
            assert process.stdout.read() == "returned\n"
        else:
            while b"closing" not in asked("/readyz")[1]:
                pass
            process.send_signal(second)
            assert process.wait(60) == -second
        assert seen.result()[0] == (200 if second is None else None)
