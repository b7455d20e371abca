"""The LitServe example, started as a user starts it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("litserve", reason="needs litserve")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def port(digits, tmp_path_factory):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    options = ["examples/litserve_batcher.py", "--bundle", str(digits[1]), "--port", str(port)]
    log = tmp_path_factory.mktemp("litserve") / "log"
    with log.open("w") as file:
        places = {"cwd": ROOT, "start_new_session": True}
        process = subprocess.Popen([sys.executable, *options], stdout=file, stderr=file, **places)
    try:
        end, up = time.monotonic() + 120, False
        while not up:
            with contextlib.suppress(OSError):
                up = call(port, "GET", "/health")[0] == 200
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end
            time.sleep(0.1)
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def call(port, method, path, body=None):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        headers = {"content-type": "application/json"}
        connection.request(method, path, body and json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()


def ask(port, image, **parameters):
    status, text = call(port, "POST", "/infer", {"input": image.flatten().tolist(), **parameters})
    return status, json.loads(text)


def test_every_answer_belongs_to_its_input(port, digits, images):
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda image: ask(port, image, deadline_ms=60_000), images))
    assert {status for status, _ in found} == {200}
    engine = digits[0]
    for image, (_, answer) in zip(images, found, strict=True):
        scores = engine(image[None], subnet=answer["subnet"])[0]
        assert scores.max() - scores[answer["class"]] < 1e-3


def test_deadlines_and_minimum_accuracies_hold(port, images):
    status, answer = ask(port, images[0], deadline_ms=60_000, min_accuracy=82)
    assert (status, answer["subnet"]) == (200, 2)
    assert ask(port, images[0], deadline_ms=1e-3)[0] == 504
    assert ask(port, images[0], deadline_ms=60_000, min_accuracy=99)[0] == 400
