"""The application without a process: outcomes, tokens, limits, and other applications that mount it."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from subnetact.errors import BatcherClosed, InvalidRequest, MissingFile, QueueFull, ServeError
from subnetact.serve import Limits, exchange, read_tokens
from subnetact.serve.access import Access
from subnetact.serve.base_app import SHORT
from subnetact.serve.exchange import Refusal, read_json

TOKEN = "a-token-of-many-characters"


async def test_a_full_queue_says_when_to_come_back_and_rows_wait_together_or_not_at_all(
    gated, post, wait_for
):
    tensor = {"name": "input", "shape": [3, 4], "datatype": "FP32", "data": [0.0] * 12}

    with gated(max_queue=3) as (app, runner, batcher):
        running, waiting = (asyncio.create_task(post(app, [1, 0, 0, 0])) for _ in range(2))
        assert await asyncio.to_thread(runner.entered.acquire, timeout=60)
        await asyncio.to_thread(wait_for, lambda: batcher.stats().queued == 1)
        raw = json.dumps({"inputs": [tensor]}).encode()
        status, headers, _ = await post(app, None, path="/v2/models/model/infer", raw=raw)
        stats = batcher.stats()
        assert (status, headers["retry-after"]) == (429, "1")
        assert (stats.queued, stats.submitted, stats.refused, stats.full) == (1, 2, 1, 1)
        more = [asyncio.create_task(post(app, [0, 0, 1, 0])) for _ in range(2)]
        await asyncio.to_thread(wait_for, lambda: batcher.stats().queued == 3)
        status, headers, body = await post(app, [0, 0, 1, 0])
        assert (status, headers["retry-after"], json.loads(body)["error"]) == (429, "1", "QueueFull")
        runner.gate.set()
        assert [json.loads((await task)[2])["class"] for task in (running, waiting, *more)] == [0, 0, 2, 2]


@pytest.mark.parametrize("path", ["/infer", "/v2/models/model/infer"])
def test_a_client_that_goes_away_takes_its_request_along(gated, post, wait_for, caplog, path):
    tensor = {"name": "input", "shape": [2, 4], "datatype": "FP32", "data": [0.0] * 8}
    raw = None if path == "/infer" else json.dumps({"inputs": [tensor]}).encode()

    async def main():
        with gated(max_queue=9) as (app, runner, batcher):
            first = asyncio.create_task(post(app, [1, 0, 0, 0]))
            assert await asyncio.to_thread(runner.entered.acquire, timeout=60)
            leave = asyncio.Event()
            second = asyncio.create_task(post(app, [0, 1, 0, 0], leave, path, raw=raw))
            rows = 1 if path == "/infer" else 2
            await asyncio.to_thread(wait_for, lambda: batcher.stats().queued == rows)
            leave.set()
            assert (await second)[0] is None
            assert batcher.stats().queued == 0
            assert batcher.stats().cancelled == rows
            counted = {key: count for key, count in app.responses.items() if key[1] == "499"}
            assert counted == {(path, "499", ""): 1}
            assert app.held_bytes == len(json.dumps({"input": [1, 0, 0, 0]}))
            runner.gate.set()
            assert (await first)[0] == 200
            assert app.held_bytes == 0

    with caplog.at_level(logging.INFO, "subnetact"):
        asyncio.run(main())
    assert not caplog.records


async def test_the_application_finishes_what_is_queued_when_it_shuts_down(gated, post):
    with gated() as (app, runner, batcher):
        async with app.router.lifespan_context(app):
            task = asyncio.create_task(post(app, [0, 0, 0, 1]))
            assert await asyncio.to_thread(runner.entered.acquire, timeout=60)
            runner.gate.set()
        assert json.loads((await task)[2])["class"] == 3
        with pytest.raises(BatcherClosed):
            batcher.submit(torch.zeros(4), 1)


async def test_the_batcher_learns_whose_request_it_is_and_its_usual_time_has_no_limit(gated, post):
    with gated(tokens={TOKEN: "alice"}, limits=Limits(deadline_ms=1000.0)) as (app, _, batcher):
        asked = []

        async def infer(*_, **options):
            asked.append(options["client"])
            raise QueueFull("x")

        batcher.infer = infer
        known = (b"authorization", f"Bearer {TOKEN}".encode())
        for deadline, status in ((b"50", 429), (b"2000", 400)):
            headers = [known, (b"x-deadline-ms", deadline)]
            assert (await post(app, [0, 0, 0, 1], headers=headers))[0] == status
        app.access = Access({})
        assert (await post(app, [0, 0, 0, 1]))[0] == 429, "longer than what clients may ask for"
        assert asked == ["alice", "127.0.0.1"]


def test_tokens_of_several_clients_come_from_a_file_and_limits_are_positive(tmp_path):
    file = tmp_path / "tokens"
    file.write_text(f"alice {TOKEN}1\n\n{TOKEN}2\n")
    access = Access(read_tokens(file))
    assert access.client(f"Bearer {TOKEN}1", "") == "alice"
    assert access.client(f"Bearer {TOKEN}2", "") == "token 3"
    with pytest.raises(Refusal, match="token"):
        access.client(f"Bearer {TOKEN}", "")
    basic = "Basic " + base64.b64encode(f"me:{TOKEN}1".encode()).decode()
    for good in (f"bearer {TOKEN}1", basic):
        assert access.client(good, "") == "alice"
    for wrong in ("Bearer", "Basic !!", f"Basic {TOKEN}1", "Digest x", f"Bearer  {TOKEN}1é"):
        with pytest.raises(Refusal, match="token"):
            access.client(wrong, "")
    assert Access({}).client(None, "10.0.0.1") == "10.0.0.1"
    for text in ("", "a b c", f"a {TOKEN}\nb {TOKEN}"):
        file.write_text(text)
        with pytest.raises(ServeError, match="token file"):
            read_tokens(file)
    wrong = {"body_s": 0, "idle_s": float("nan"), "rows": 1.5, "connections": -1}
    for name, value in wrong.items():
        with pytest.raises(ServeError, match=name):
            Limits(**{name: value})
    with pytest.raises(ServeError, match="16"):
        Access({"short": "someone"})
    with pytest.raises(MissingFile):
        read_tokens(tmp_path / "none")


async def test_the_server_holds_no_more_bodies_than_it_may(gated, post, wait_for):
    limits = Limits(body_bytes=100, bodies_bytes=100)
    with gated(max_queue=9, limits=limits) as (app, runner, _):
        body = json.dumps({"input": [0, 0, 0, 1]}).encode().ljust(60)
        first = asyncio.create_task(post(app, None, raw=body))
        assert await asyncio.to_thread(runner.entered.acquire, timeout=60)
        status, headers, _ = await post(app, None, raw=body)
        assert (status, headers["retry-after"]) == (503, "1")
        runner.gate.set()
        assert (await first)[0] == 200
        assert (await post(app, None, raw=body))[0] == 200
        assert (await post(app, None, raw=b" " * 101))[0] == 413
        assert app.held_bytes == 0


LENGTH = b"content-length"
HEADERS = [
    *(({LENGTH: length}, 400) for length in (b"-5", b"9" * 30)),
    *(({name: b"x"}, 400) for name in (b"x-deadline-ms", b"x-min-accuracy", b"x-priority")),
    *(({b"x-deadline-ms": ms}, 400) for ms in (b"nan", b"1e308", b"-1")),
    ({b"x-priority": b"1.5"}, 400),
    ({LENGTH: b"1" + b"0" * 15}, 413),
    ({b"content-encoding": b"gzip"}, 415),
    ({b"x-padding": b"x" * 40_000}, 431),
]


async def test_headers_that_cannot_be_are_refused(gated, post):
    with gated() as (app, runner, _):
        runner.gate.set()
        others = [(LENGTH, b"6"), (b"transfer-encoding", b"chunked")]
        twice = [([(LENGTH, b"5"), other], 400) for other in others]
        for headers, status in [*twice, *((list(one.items()), status) for one, status in HEADERS)]:
            answer = await post(app, [0, 0, 0, 1], headers=headers)
            assert (answer[0], answer[1]["connection"]) == (status, "close"), headers


async def test_a_slow_body_ends(gated, post):
    with gated(limits=Limits(body_s=0.05)) as (app, _, _):
        assert (await post(app, [0, 0, 0, 1], delay_s=0.02))[0] == 408
        assert app.held_bytes == 0


async def test_a_client_with_a_slow_body_may_leave_after_it(gated, post):
    with gated(limits=Limits(body_s=60.0)) as (app, runner, batcher):
        gone = asyncio.Event()
        task = asyncio.create_task(post(app, [0, 0, 0, 1], gone, delay_s=0.004))
        assert await asyncio.to_thread(runner.entered.acquire, timeout=60)
        gone.set()
        assert (await asyncio.wait_for(task, 60))[0] is None
        assert batcher.stats().cancelled == 1


async def test_a_body_that_takes_long_to_read_keeps_nobody_waiting(gated, post, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_):
        begun.set()
        assert go_on.wait(60)
        raise InvalidRequest("body: it took long")

    with gated() as (app, runner, _):
        runner.gate.set()
        long = b"[" + b" " * SHORT + b"]"
        monkeypatch.setattr(exchange, "read_json", lambda body: slow() if body == long else read_json(body))
        waiting = asyncio.create_task(post(app, None, raw=long))
        assert await asyncio.to_thread(begun.wait, 60)
        assert (await post(app, [0, 0, 1, 0]))[0] == 200
        assert not waiting.done()
        go_on.set()
        assert (await waiting)[0] == 400


async def test_an_output_that_is_no_number_has_no_class(gated, post, numpy_file):
    nothing = numpy_file(np.array([0, np.nan, 1, 0], np.float32))

    with gated() as (app, runner, _):
        runner.gate.set()
        status, _, body = await post(app, None, raw=nothing)
        assert (status, json.loads(body)["error"]) == (500, "OutputNotFinite")
    with gated(check_outputs=False) as (app, runner, _):
        runner.gate.set()
        status, _, body = await post(app, None, raw=nothing)
        assert (status, json.loads(body)["class"]) == (200, None)
        status, _, body = await post(app, None, raw=nothing, query=b"output=values")
        assert (status, json.loads(body)["output"]) == (200, [0, None, 1, 0])  # JSON has no NaN


async def test_the_application_can_be_mounted(gated, post):
    from starlette.applications import Starlette

    with gated() as (app, runner, _):
        runner.gate.set()
        outer = Starlette()
        outer.mount("/digits", app)
        status, _, body = await post(outer, [0, 0, 1, 0], path="/digits/infer")
        assert (status, json.loads(body)["class"]) == (200, 2)
        assert (await post(outer, None, path="/digits/healthz", method="GET"))[0] == 200
        assert (await post(outer, None, path="/infer"))[0] == 404
        status, _, body = await post(outer, None, path="/digits/v2/nothing", method="GET")
        assert (status, list(json.loads(body))) == (404, ["error"])  # the form of the protocol


MISSING = """
import os, sys
import subnetact.engine.engine  # once for all of the processes
for missing in sys.argv[1:]:
    assert missing not in sys.modules
    process = os.fork()
    if not process:
        sys.modules[missing] = None
        from subnetact.serve.cli import main
        status = main(["--demo"])
        sys.stderr.flush()
        os._exit(status)
    print("status", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), file=sys.stderr, flush=True)
"""


def test_a_missing_extra_is_named():
    missing = ["uvicorn", "starlette", "orjson", "pydantic"]
    command = [sys.executable, "-c", MISSING, *missing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    *told, end = done.stderr.split("status 2\n")
    assert (len(told), end) == (len(missing), "")
    assert all("pip install 'subnetact[serve]'" in one for one in told)


async def test_foreign_names_are_refused(gated, post):
    """A page of evil.example cannot use a browser on this machine to read answers (DNS rebinding)."""
    own = dict.fromkeys((b"localhost:8000", b"127.0.0.1", b"LOCALHOST", b"[::1]:80"), 200)
    foreign = dict.fromkeys((b"evil.example:8000", b"localhost.evil.example", b"", None), 400)
    with gated(allowed_hosts=["localhost", "127.0.0.1", "::1"]) as (app, runner, _):
        runner.gate.set()
        for host, status in {**own, **foreign}.items():
            headers = [] if host is None else [(b"host", host)]  # HTTP/1.1 demands the header
            found, _, body = await post(app, [1.0, 2.0, 3.0, 4.0], headers=headers)
            assert (found, b"class" in body) == (status, status == 200), host
            assert (await post(app, [], path="/", method="GET", headers=headers))[0] == status
