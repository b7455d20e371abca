"""The example servers and their client, started as a user starts them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from subnetact import Batcher, LatencyTable, SlackFit
from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    InvalidRequest,
    QueueFull,
    TraceError,
)

pytest.importorskip("fastapi", reason="the FastAPI example needs the extra `serve`")

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))  # the examples import one another by name
digits_engine, fastapi_server, load_generator, open_loop, service = (
    importlib.import_module(name)
    for name in ("digits_engine", "fastapi_server", "load_generator", "open_loop", "service")
)
FOREVER_MS = 60_000
SERVERS = ("fastapi_server.py", "threaded_server.py")


def start(script, *options):
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), "--port", "0", "--grace-s", "1.5", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def end(process):
    process.kill()
    process.wait(20)
    process.stdout.close()


def address(process):
    line = process.stdout.readline()
    found = re.fullmatch(r"listening on http://([\d.]+):(\d+)\n", line)
    assert found, f"the server said {line!r}"
    return found[1], int(found[2])


@pytest.fixture(scope="module")
def fastapi_process():
    """The FastAPI server as it starts by default; it builds and profiles its engine meanwhile."""
    process = start("fastapi_server.py")
    yield process
    end(process)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The engine of the servers, and a bundle of it."""
    engine = digits_engine.digits_engine()
    engine.tables["cpu"] = LatencyTable.from_arrays(
        engine.keys, engine.accuracy, [1, 8], [[1.0 + s, 2.0 + s] for s in range(len(engine))]
    )
    bundle = tmp_path_factory.mktemp("served") / "bundle"
    engine.save(bundle)
    return engine, bundle


@pytest.fixture(scope="module")
def running(fastapi_process, saved):
    """The engine, and the addresses of both servers; the threaded one serves the bundle."""
    engine, bundle = saved
    threaded = start("threaded_server.py", "--bundle", str(bundle), "--policy", "hullfit")
    try:
        processes = zip(SERVERS, (fastapi_process, threaded), strict=True)
        yield engine, {name: address(process) for name, process in processes}
    finally:
        end(threaded)


@pytest.fixture(params=SERVERS)
def server(request, running):
    return running[1][request.param]


def call(address, method, path, body=None):
    """Status, headers and body of one request."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()
    finally:
        connection.close()


def infer(address, image, deadline_ms=FOREVER_MS, **more):
    body = {"pixels": image.flatten().tolist(), "deadline_ms": deadline_ms, **more}
    status, _, answer = call(address, "POST", "/infer", body)
    return status, json.loads(answer)


def test_the_table_for_schedulers_is_preferred(saved):
    engine = saved[0]
    cpu = engine.tables["cpu"]
    assert service._table(engine, None) is cpu
    engine.tables["scheduler"] = cpu.monotone()
    try:
        assert service._table(engine, None) is engine.tables["scheduler"]
    finally:
        del engine.tables["scheduler"]


def test_every_answer_belongs_to_its_input(server, running):
    images = digits_engine.unseen_digits(1).images[:64]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda image: infer(server, image), images))
    assert {status for status, _ in answers} == {200}
    outputs = [running[0](images, subnet=i) for i in range(len(running[0]))]
    for i, (_, answer) in enumerate(answers):
        scores = outputs[answer["subnet"]][i]
        # batches of other sizes round differently: accept the runner-up of a tie
        assert scores.max() - scores[answer["class"]] < 1e-3
        assert answer["accuracy"] == pytest.approx(running[0].accuracy[answer["subnet"]], abs=0.01)
        assert answer["met"]
    assert len({answer["class"] for _, answer in answers}) > 5


def test_floors_priorities_and_nested_pixels(server, running):
    image = digits_engine.unseen_digits(1).images[0]
    floor = sorted(running[0].accuracy)[-2]
    status, answer = infer(server, image, min_accuracy=floor, priority=1)
    assert (status, answer["accuracy"] >= floor - 0.01) == (200, True)
    status, _, text = call(server, "POST", "/infer", {"pixels": image.tolist(), "deadline_ms": FOREVER_MS})
    assert (status, set(json.loads(text))) == (200, {"class", "subnet", "accuracy", "latency_ms", "met"})


ZEROS = [0.0] * 256
BAD = {
    "not JSON": b"{",
    "deep": b"[" * 100_000,
    "a list": [1],
    "no deadline": {"pixels": ZEROS},
    "one field more": {"pixels": ZEROS, "deadline_ms": 50, "subnet": 1},
    "too few pixels": {"pixels": ZEROS[1:], "deadline_ms": 50},
    "wrong shape": {"pixels": [ZEROS, ZEROS], "deadline_ms": 50},
    "words": {"pixels": ["zero"] * 256, "deadline_ms": 50},
    "not finite": {"pixels": [float("nan"), *ZEROS[1:]], "deadline_ms": 50},
    "negative deadline": {"pixels": ZEROS, "deadline_ms": -1},
    "deadline of words": {"pixels": ZEROS, "deadline_ms": "soon"},
    "an astronomic deadline": {"pixels": ZEROS, "deadline_ms": 10**400},
    "an astronomic floor": {"pixels": ZEROS, "deadline_ms": 50, "min_accuracy": 10**400},
    "endless deadline": {"pixels": ZEROS, "deadline_ms": float("inf")},
    "a floor above all": {"pixels": ZEROS, "deadline_ms": 50, "min_accuracy": 101},
    "half a priority": {"pixels": ZEROS, "deadline_ms": 50, "priority": 0.5},
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_bad_requests_are_told_so(server, body):
    status, _, text = call(server, "POST", "/infer", body)
    answer = json.loads(text)
    assert (status, answer["error"]) == (400, "InvalidRequest")
    assert len(answer["message"]) > 10
    assert call(server, "GET", "/healthz")[0] == 200


def test_late_requests_are_told_so(server):
    status, answer = infer(server, torch.zeros(256), deadline_ms=1e-3)
    assert (status, answer["error"]) == (504, "DeadlinePassed")


def test_metrics_are_prometheus_text(server):
    before = samples(server)
    assert infer(server, torch.zeros(256))[0] == 200
    after = samples(server)
    assert sum(after.values()) > sum(before.values())
    met = 'subnetact_requests_total{outcome="met"}'
    assert after[met] == before[met] + 1


def samples(server):
    status, headers, text = call(server, "GET", "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    found = {}
    for line in text.splitlines():
        if not line.startswith(("# HELP ", "# TYPE ")):
            name, value = re.fullmatch(r"([a-z_]+(?:\{[^}]*\})?) (\S+)", line).groups()
            found[name] = float(value)
    assert found
    return found


def test_other_addresses_do_not_exist(server):
    assert call(server, "GET", "/nothing")[0] == 404
    assert call(server, "POST", "/nothing", {})[0] in (404, 405)


def test_the_load_generator_reports_over_http(running, tmp_path):
    host, port = running[1]["fastapi_server.py"]
    out = tmp_path / "report.json"
    command = f"load_generator.py --url http://{host}:{port}/infer --trace servegen --slo-ms 20000"
    command += " --qps 60 --seconds 2"
    subprocess.run(
        [sys.executable, *command.split(), "--out", str(out)],
        cwd=EXAMPLES,
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        timeout=60,
    )
    report = json.loads(out.read_text())
    assert report["requests"] == len(load_generator.trace("servegen", 60, 2.0))
    assert report["outcomes"] == {"met": report["requests"]}
    assert report["attainment"] == 1.0
    assert 60 < report["measured_accuracy"] == report["effective_accuracy"] <= 100
    assert report["latency_ms"]["p50"] <= report["latency_ms"]["p99"]


@pytest.mark.parametrize("name", SERVERS)
def test_shutting_down_finishes_what_was_accepted(saved, name, wait_for):
    """Health turns to 503 while answers still come, then the process ends."""
    process = start(name, "--bundle", str(saved[1]))
    try:
        server = address(process)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: call(server, "GET", "/healthz")[0] != 200)
        status, _, text = call(server, "GET", "/healthz")
        assert (status, json.loads(text)) == (503, {"status": "closing"})
        assert infer(server, torch.zeros(256))[0] == 200
        assert process.wait(30) in (0, -signal.SIGTERM)
        with pytest.raises(ConnectionRefusedError):
            call(server, "GET", "/healthz")
    finally:
        end(process)


# -- parts of the servers, without a process -----------------------------------------------------


class Gated:
    """A runner that waits until it is let go on."""

    keys = ("one",)
    example = torch.zeros(4)

    def __init__(self):
        self.gate, self.entered = threading.Event(), threading.Semaphore(0)

    def check(self, x, finite=False):
        pass

    def run(self, subnet, inputs, batch_size):
        self.entered.release()
        assert self.gate.wait(20)
        if any(x[0] < 0 for x in inputs):
            raise RuntimeError("negative")
        return [x.clone() for x in inputs]


@contextlib.contextmanager
def gated_app():
    runner = Gated()
    table = LatencyTable.from_arrays(["one"], [70.0], [1], [[1.0]])
    with Batcher(runner, policy=SlackFit(table, slo_ms=FOREVER_MS), max_queue=1) as batcher:
        app = fastapi_server.make_app(service.Service(runner, batcher, "", 0, 0.0))
        try:
            yield app, runner, batcher
        finally:
            runner.gate.set()


async def post(app, pixels, leave=None):
    """Send a request as uvicorn does; the client goes away when `leave` is set. Status, headers, body."""
    body = json.dumps({"pixels": pixels, "deadline_ms": FOREVER_MS}).encode()
    scope = {"type": "http", "method": "POST", "path": "/infer", "headers": [], "query_string": b""}
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent = []

    async def receive():
        if messages:
            return messages.pop()
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(m.get("body", b"") for m in sent[1:])


def test_a_full_queue_says_when_to_come_back(wait_for):
    async def main():
        with gated_app() as (app, runner, batcher):
            first = asyncio.create_task(post(app, [1, 0, 0, 0]))
            assert await asyncio.to_thread(runner.entered.acquire, timeout=20)
            second = asyncio.create_task(post(app, [0, 1, 0, 0]))
            await asyncio.to_thread(wait_for, lambda: batcher.stats().queued)
            status, headers, body = await post(app, [0, 0, 1, 0])
            assert (status, headers["retry-after"]) == (429, "1")
            assert json.loads(body)["error"] == "QueueFull"
            runner.gate.set()
            answers = [json.loads((await task)[2])["class"] for task in (first, second)]
            assert answers == [0, 1]

    asyncio.run(main())


def test_a_client_that_goes_away_takes_its_request_along(wait_for):
    async def main():
        with gated_app() as (app, runner, batcher):
            first = asyncio.create_task(post(app, [1, 0, 0, 0]))
            assert await asyncio.to_thread(runner.entered.acquire, timeout=20)
            leave = asyncio.Event()
            second = asyncio.create_task(post(app, [0, 1, 0, 0], leave))
            await asyncio.to_thread(wait_for, lambda: batcher.stats().queued)
            leave.set()
            assert (await second)[0] == fastapi_server.CLIENT_CLOSED
            assert batcher.stats().queued == 0
            assert batcher.stats().cancelled == 1
            runner.gate.set()
            assert (await first)[0] == 200

    asyncio.run(main())


def test_without_a_worker_the_service_is_not_healthy():
    batcher = types.SimpleNamespace(stats=lambda: types.SimpleNamespace(workers_up=0))
    here = service.Service(None, batcher, "127.0.0.1", 0, 0.0)
    assert service.health(here, closing=False) == (503, {"status": "no worker"})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b'{"error": "QueueFull"}', "QueueFull"),
        (b"<html>", "HTTP 502"),
        (b"[1]", "HTTP 502"),
        (b"", "HTTP 502"),
    ],
)
def test_the_load_generator_names_what_refused_it(answer, reason):
    assert load_generator.refusal(502, answer) == reason


def test_a_batch_that_fails_is_a_server_error():
    async def main():
        with gated_app() as (app, runner, _):
            runner.gate.set()
            status, _, body = await post(app, [-1, 0, 0, 0])
            assert (status, json.loads(body)["error"]) == (500, "BatchFailed")

    asyncio.run(main())


def test_the_application_finishes_what_is_queued_when_it_shuts_down():
    async def main():
        with gated_app() as (app, runner, batcher):
            async with app.router.lifespan_context(app):
                task = asyncio.create_task(post(app, [0, 0, 0, 1]))
                assert await asyncio.to_thread(runner.entered.acquire, timeout=20)
                runner.gate.set()
            assert json.loads((await task)[2])["class"] == 3
            with pytest.raises(BatcherClosed):
                batcher.submit(torch.zeros(4), 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (InvalidRequest("x"), 400, False),
        (QueueFull("x"), 429, True),
        (BatcherClosed("x"), 503, True),
        (DeadlinePassed("x"), 504, False),
        (BatchFailed("x"), 500, False),
    ],
)
def test_every_error_has_its_status(error, status, retry):
    got, body, headers = service.error_reply(error)
    assert (got, body) == (status, {"error": type(error).__name__, "message": "x"})
    assert ("Retry-After" in headers) == retry


def test_help_keeps_the_lines_of_the_description(capsys):
    with pytest.raises(SystemExit):
        service.options(fastapi_server.__doc__).parse_args(["--help"])
    printed = capsys.readouterr().out
    assert "\n    pip install 'subnetact[demo,serve]'\n    python examples/fastapi_server.py\n" in printed
    assert "(default: slackfit:4)" in " ".join(printed.split())


def test_a_server_that_cannot_start_says_why(tmp_path):
    args = service.options("").parse_args(["--bundle", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="none"):
        service.open_service(args)


# -- the client ----------------------------------------------------------------------------------


def test_waiting_counts_from_when_a_request_was_due():
    async def blocking(i, left_ms):
        time.sleep(0.03)
        return open_loop.Reply(i, 0, 70.0)

    sent = asyncio.run(open_loop.run_open_loop([0.0, 1.0, 2.0, 3.0], blocking, 1e4))
    assert [s.reply.label for s in sent] == [0, 1, 2, 3]
    assert sent[3].latency_ms >= 4 * 30 - 3
    assert all(s.latency_ms >= 30 for s in sent)


def test_a_request_that_goes_out_too_late_is_not_sent():
    asked = []

    async def send(i, left_ms):
        asked.append((i, left_ms))
        return open_loop.Reply(0, 0, 70.0)

    sent = asyncio.run(open_loop.run_open_loop([-50.0, 0.0], send, 40.0))
    assert sent[0].outcome == "SentTooLate"
    assert [i for i, _ in asked] in ([1], [])
    assert all(left_ms < 40.0 for _, left_ms in asked)


def test_what_is_never_answered_is_counted():
    async def send(i, left_ms):
        if i == 0:
            await asyncio.Event().wait()
        if i == 1:
            raise open_loop.Refused("QueueFull")
        if i == 2:
            raise ConnectionResetError
        return open_loop.Reply(7, 2, 80.0)

    sent = asyncio.run(open_loop.run_open_loop([0.0] * 5, send, 1e4, give_up_ms=200))
    found = open_loop.summary(sent, [7, 7, 7, 7, 8], 1e4)
    assert found["outcomes"] == {"ConnectionResetError": 1, "QueueFull": 1, "met": 2, "unanswered": 1}
    assert (found["attainment"], found["measured_accuracy"], found["effective_accuracy"]) == (0.4, 50, 20)
    assert (found["profiled_accuracy"], found["subnets"]) == (80.0, {2: 2})


def test_an_answer_after_its_time_is_not_in_time():
    reply = open_loop.Reply(1, 0, 70.0)
    sent = [open_loop.Sent("answered", 0.0, latency, reply) for latency in (10.0, 36.0, 36.1)]
    found = open_loop.summary(sent, [1], 36.0)
    assert found["outcomes"] == {"late": 1, "met": 2}
    assert found["effective_accuracy"] == pytest.approx(200 / 3)


def test_every_kind_of_trace(tmp_path):
    np.save(tmp_path / "stamps.npy", np.arange(1000) * 3.0)
    np.savetxt(tmp_path / "stamps.txt", np.arange(1000) * 3.0)
    names = ["poisson", "bursty", "time_varying", "maf", "azure_llm", "servegen"]
    for name in [*names, str(tmp_path / "stamps.npy"), str(tmp_path / "stamps.txt")]:
        arrivals = load_generator.trace(name, 500, 2.0, seed=1)
        assert 300 < len(arrivals) < 1600, name
        assert (np.diff(arrivals) >= 0).all()
        assert 0 <= arrivals[0] < arrivals[-1] < 2000
    with pytest.raises(TraceError):
        load_generator.trace("poisson", -1, 2.0)
    with pytest.raises(OSError, match="nothing"):
        load_generator.trace("nothing", 10, 2.0)
