"""Servers in processes of their own, as a user starts them, and applications without a process."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import inspect
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_runners import Echo

from subnetact import Batcher, Engine, LatencyTable, SlackFit, calibrate
from subnetact.digits import load_digits_supernet

pytest.importorskip("starlette", reason="serving needs the extra `serve`")
pytest.importorskip("uvicorn", reason="serving needs the extra `serve`")

from subnetact.serve import build_app
from subnetact.serving.live import rate_limited_log

ROOT = Path(__file__).parents[2]
FOREVER_MS = 60_000


@pytest.fixture(autouse=True)
def _own_log(monkeypatch):
    """The log of a test is its own: the commands set it up. No line is left out because it repeats."""
    root = logging.getLogger()
    monkeypatch.setattr(rate_limited_log, "PERIOD_S", 0.0)
    level, handlers = logging.getLogger("subnetact").level, root.handlers[:]
    yield
    logging.getLogger("subnetact").setLevel(level)
    root.handlers[:] = [handler for handler in root.handlers if handler in handlers]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run the tests that are coroutines."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


class Server:
    """A server in a process of its own."""

    def __init__(self, *options, environment=None, without=()):
        program = ["-m", "subnetact.serve"]
        if without:
            missing = f"sys.modules.update(dict.fromkeys({without!r}))"
            program = ["-c", f"import sys; {missing}; from subnetact.serve.cli import main; main()"]
        self.process = subprocess.Popen(
            [sys.executable, *program, "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        line = self.process.stdout.readline()
        found = re.fullmatch(r"listening on http://([\d.]+):(\d+)\n", line)
        if not found:
            self.process.kill()
            raise AssertionError(f"the server said {line!r}; {self.process.stderr.read()}")
        self.address = found[1], int(found[2])
        self.url = f"http://{found[1]}:{found[2]}"

    def call(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            sent = body if isinstance(body, bytes | None) else json.dumps(body)
            connection.request(method, path, sent, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read().decode()
        finally:
            connection.close()

    def infer(self, image, deadline_ms=FOREVER_MS, **more):
        body = {"input": image.flatten().tolist(), "deadline_ms": deadline_ms, **more}
        status, _, answer = self.call("POST", "/infer", body)
        return status, json.loads(answer)

    def stop(self):
        """End the server as a service manager does; return its log without what every server says."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(60)
        if self.process.stdout.closed:
            return ""
        self.process.stdout.close()
        with self.process.stderr:
            lines = self.process.stderr.readlines()
        usual = (
            "; latencies: ",
            "times the latency of its table",
            "subnetact.serve.cli: subnetact",
            ": stopped",
        )
        return "".join(line for line in lines if not any(words in line for words in usual))


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """An engine of three subnets for digits, and a bundle of it."""
    supernet = load_digits_supernet()
    space = supernet.space
    middle = space.parse({"depth": [1, 2, 2], "expand": [0.5, 0.5, 0.25], "width": [0.5]})
    specs = [space.smallest(), middle, space.largest()]
    torch.manual_seed(0)
    calibrate(supernet, specs, [torch.rand(64, 1, 16, 16)])
    engine = Engine(supernet, specs, example=torch.zeros(1, 1, 16, 16), accuracy=[60.0, 72.0, 82.0])
    engine.tables["cpu"] = LatencyTable(
        engine.keys, engine.accuracy, [1, 8], [[1.0 + s, 2.0 + s] for s in range(3)]
    )
    bundle = tmp_path_factory.mktemp("served") / "bundle"
    engine.save(bundle)
    return engine, bundle


@pytest.fixture(scope="session")
def start():
    """Starts servers with short limits, and ends those that a test leaves."""
    servers = []

    def begin(*options, **settings):
        servers.append(Server(*options, **settings))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(start, digits):
    """A server of the bundle that most tests share."""
    return start("--bundle", str(digits[1]), "--name", "digits", "--max-body-mb", "16")


@pytest.fixture
def images():
    return torch.rand(64, 1, 16, 16)


class Gated(Echo):
    """Answers with copies, and fails for what is negative."""

    sample = torch.zeros(4)

    def run(self, subnet, inputs, batch_size):
        outputs = super().run(subnet, inputs, batch_size)
        if any(x[0] < 0 for x in inputs):
            raise RuntimeError("the file /etc/passwd is negative")
        return [x.clone() for x in outputs]


@pytest.fixture
def gated():
    """Opens an application whose runner waits: (application, runner, batcher)."""

    @contextlib.contextmanager
    def opened(max_queue=1, check_outputs=True, **settings):
        table = LatencyTable(["one"], [70.0], [1], [[1.0]])
        runner = Gated(table)
        policy, options = SlackFit(table, slo_ms=FOREVER_MS), {"max_queue": max_queue}
        with Batcher(runner, policy=policy, check_outputs=check_outputs, **options) as batcher:
            app = build_app(batcher, runner, slo_ms=FOREVER_MS, **settings)
            assert runner.entered.acquire(timeout=60)  # the run that finds out what the outputs are
            runner.gate.clear()
            try:
                yield app, runner, batcher
            finally:
                runner.gate.set()

    return opened


@pytest.fixture
def post():
    """Sends a request as uvicorn does, its body at once or byte by byte: (status, headers, body)."""

    async def send_one(
        app,
        values,
        leave=None,
        path="/infer",
        headers=(),
        method="POST",
        raw=None,
        query=b"",
        delay_s=0.0,
        **more,
    ):
        body = json.dumps({"input": values}).encode() if raw is None else raw
        pieces = [body[i : i + 1] for i in range(len(body))] if delay_s else [body]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": list(headers),
            "query_string": query,
            "client": ("127.0.0.1", 1),
            **more,
        }
        sent = []

        async def receive():
            if pieces:
                await asyncio.sleep(delay_s)
                return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
            await (leave or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await app(scope, receive, send)
        if not sent:
            return None, {}, b""
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], found, b"".join(m.get("body", b"") for m in sent[1:])

    return send_one


@pytest.fixture
def numpy_file():
    def written(array):
        file = io.BytesIO()
        np.save(file, array, allow_pickle=True)
        return file.getvalue()

    return written
