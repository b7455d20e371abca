"""A server as a user starts it: answers, errors, metrics, and its end."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from process_runners import shared_memory_of

from subnetact import Engine
from subnetact.serve.cli import main
from subnetact.serve.server import check_address

ZEROS = [0.0] * 256


def test_every_answer_belongs_to_its_input(server, digits, images):
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(server.infer, images))
    assert {status for status, _ in answers} == {200}
    engine = digits[0]
    outputs = [engine(images, subnet=i) for i in range(len(engine))]
    for i, (_, answer) in enumerate(answers):
        scores = outputs[answer["subnet"]][i]
        # Batches of other sizes round differently: accept the runner-up of a tie.
        assert scores.max() - scores[answer["class"]] < 1e-3
        assert answer["accuracy"] == pytest.approx(engine.accuracy[answer["subnet"]], abs=0.01)
        assert answer["met"]
    assert set(answers[0][1]) == {"class", "subnet", "accuracy", "latency_ms", "met"}


def test_parameters_come_from_the_body_the_query_or_headers(server, images):
    pixels = images[0].flatten().tolist()
    status, answer = server.infer(images[0], min_accuracy=82, priority=1)
    assert (status, answer["subnet"]) == (200, 2)
    for path, headers in (
        ("/infer?min_accuracy=82&deadline_ms=60000", {}),
        ("/infer", {"x-min-accuracy": "82", "x-deadline-ms": "60000"}),
    ):
        status, _, text = server.call("POST", path, {"input": pixels}, headers)
        assert (status, json.loads(text)["subnet"]) == (200, 2)
    body = {"input": pixels, "deadline_ms": 1e-3}
    assert server.call("POST", "/infer?deadline_ms=60000", body)[0] == 504


def test_numpy_files_in_and_out(server, digits, images, numpy_file):
    array, path = images[0].numpy(), "/infer?deadline_ms=60000&output="
    for same in (array, array.astype(">f8"), np.asfortranarray(array)):
        status, _, text = server.call("POST", f"{path}values", numpy_file(same))
        answer = json.loads(text)
        assert status == 200
        expected = digits[0](images[:1], subnet=answer["subnet"])[0]
        assert torch.allclose(torch.tensor(answer["output"]), expected, atol=1e-3)
    with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=60)) as connection:
        connection.request("POST", f"{path}npy", numpy_file(array))
        response = connection.getresponse()
        output = torch.from_numpy(np.load(io.BytesIO(response.read())))
    expected = digits[0](images[:1], int(response.headers["x-subnet"]))[0]
    assert torch.allclose(output, expected, atol=1e-3)


BAD = {
    "empty": b"",
    "not JSON": b"{",
    "deep": b"[" * 100_000,
    "deep and short": b"[" * 10_000,
    "a list": [1],
    "no input": {"deadline_ms": 50},
    "one field more": {"input": ZEROS, "deadline_ms": 50, "subnet": 1},
    "not finite": {"input": [float("nan"), *ZEROS[1:]], "deadline_ms": 50},
    "a number of 5000 digits": b'{"input": [' + b"9" * 5000 + b"]}",
    "negative deadline": {"input": ZEROS, "deadline_ms": -1},
    "a deadline that sums up to infinity": {"input": ZEROS, "deadline_ms": 1e308},
    "endless deadline": {"input": ZEROS, "deadline_ms": float("inf")},
    "a floor above all": {"input": ZEROS, "deadline_ms": 50, "min_accuracy": 99},
    "an astronomic priority": {"input": ZEROS, "deadline_ms": 50, "priority": 10**400},
    "another output": {"input": ZEROS, "deadline_ms": 50, "output": "everything"},
}


def test_bad_requests_are_told_so(server):
    for name, body in BAD.items():
        status, _, text = server.call("POST", "/infer", body)
        answer = json.loads(text)
        assert (status, answer["error"]) == (400, "InvalidRequest"), name
        assert 10 < len(answer["message"]) < 400, name
        assert "/" not in answer["message"].replace("/2", ""), name
    for query in ("deadline_ms=soon", "deadline_ms=", "deadline_ms=nan", "subnet=1", "a", "%ff=1"):
        status, _, text = server.call("POST", f"/infer?{query}", {"input": ZEROS})
        assert (status, json.loads(text)["error"]) == (400, "InvalidRequest"), query


def test_bad_numpy_files_are_told_so(server, numpy_file):
    good = numpy_file(np.zeros((1, 16, 16), np.float32))
    bad = [
        good[:-1],
        good + b"x",
        good[:20],
        good[:8],
        good[:6],
        numpy_file(np.zeros(256, np.float32)),
        numpy_file(np.zeros((1, 16, 16), object)),
        numpy_file(np.zeros((1, 16, 16), complex)),
        numpy_file(np.zeros((1, 16, 16), "U3")),
        numpy_file(np.full((1, 16, 16), np.nan)),
        good.replace(b"(1, 16, 16)", b"(10**9,)   "),
        good.replace(b"'shape': (1, 16, 16)", b"'shape': (-1,-16,16)"),
        good.replace(b"False", b"print"),
    ]
    for body in bad:
        status, _, text = server.call("POST", "/infer", body)
        assert (status, json.loads(text)["error"]) == (400, "InvalidRequest"), body[:80]


def test_the_status_page_gets_the_counts_of_the_batcher(server):
    def status():
        return json.loads(server.call("GET", "/status")[2])

    assert server.call("GET", "/", headers={"Host": "evil.example"})[0] == 400
    state, headers, page = server.call("GET", "/")
    assert (state, headers["Content-Type"].split(";")[0]) == (200, "text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not re.search(r"https?://|//[a-z]", page.replace("http://www.w3.org", "")), "no other server"
    before = status()
    assert server.infer(torch.zeros(256), min_accuracy=82)[0] == 200
    now = status()
    assert set(re.findall(r"\bnow\.(\w+)", page)) <= set(now)
    assert set(re.findall(r'since\("(\w+)"\)', page)) <= set(now)
    assert now["accuracy"] == {"0": 60.0, "1": 72.0, "2": 82.0}
    assert now["names"] == {"0": "subnet-0", "1": "subnet-1", "2": "subnet-2"}
    assert (now["model"], now["slo_ms"], now["workers"], now["workers_up"]) == ("digits", 36.0, 1, 1)
    assert now["time_s"] > before["time_s"]
    assert {name: now[name] - before[name] for name in ("submitted", "met", "late", "full")} == {
        "submitted": 1,
        "met": 1,
        "late": 0,
        "full": 0,
    }
    assert now["accuracy_sum"] - before["accuracy_sum"] == 82
    assert now["served_by"]["2"] == before["served_by"].get("2", 0) + 1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_worker_processes_and_their_memory_end_with_the_server(start, digits, images, wait_for):
    """All requests are answered after SIGTERM; health is 503 meanwhile; a second one ends all."""
    engine, bundle = digits
    server = start("--bundle", str(bundle), "--worker-processes", "--grace-s", "10000")
    status, answer = server.infer(images[0], min_accuracy=82, output="values")
    assert status == 200
    assert torch.allclose(torch.tensor(answer["output"]), engine(images[:1], subnet=2)[0], atol=1e-3)
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    workers = [int(pid) for path in children for pid in path.read_text().split()]
    assert workers
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(server.infer, image) for image in images[:40]]
        asked[8].result(60)
        held = shared_memory_of([server.process.pid, *workers])
        server.process.send_signal(signal.SIGTERM)
        assert {one.result(60)[0] for one in asked} == {200}
    wait_for(lambda: server.call("GET", "/healthz")[0] != 200)
    for path in ("/healthz", "/readyz", "/v2/health/ready"):
        assert server.call("GET", path)[0] == 503
    assert server.infer(torch.zeros(256))[0] == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == -signal.SIGTERM
    with pytest.raises(ConnectionRefusedError):
        server.call("GET", "/healthz")
    assert "Traceback" not in server.stop()
    wait_for(lambda: not [pid for pid in workers if Path(f"/proc/{pid}").exists()])
    wait_for(lambda: not [path for path in held if path.exists()])


def test_a_server_that_cannot_start_says_why(digits, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Engine, "load", cache(Engine.load))
    bundle = str(digits[1])
    tokens = tmp_path / "tokens"
    tokens.write_text("short")
    for name, value, reason in (
        ("bundle", tmp_path / "none", "none"),
        ("policy", "best", "'best' is not known"),
        ("token-file", tokens, "16 characters"),
        ("token-file", tmp_path / "none", "token file"),
        ("token-file", "/dev/zero", "device"),
        ("body-s", "nan", "body_s"),
        ("model", "nowhere:factory", "PYTHONPATH"),
        *(("max-body-mb", size, "max-body-mb") for size in ("nan", "inf")),
        ("host", "a" * 100, "host"),
        ("port", "65536", "port"),
        *(("grace-s", seconds, "grace_s") for seconds in ("nan", "-1")),
    ):
        assert main(["--bundle", bundle, f"--{name}", str(value)]) == 2
        assert reason in capsys.readouterr().err
    left = {thread.name for thread in threading.enumerate()}
    assert not [name for name in left if name.startswith("subnetact-batcher")], "its workers have ended"
    assert main([]) == 2
    assert "--demo" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "\n    python -m subnetact.serve --demo\n" in capsys.readouterr().out, "lines are kept"


def test_which_names_a_server_has_by_default():
    from subnetact.serve.cli import _hosts, options

    def of(*more):
        return _hosts(options().parse_args(["--demo", *more]))

    assert {"localhost", "127.0.0.1", "::1"} <= set(of())
    assert "127.0.0.5" in of("--host", "127.0.0.5")
    assert of("--host", "0.0.0.0") == ["*"]
    assert of("--host", "0.0.0.0", "--allowed-hosts", "api.example") == ["api.example"]
    assert of("--allowed-hosts", "*") == ["*"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no addresses of version 6")
def test_a_name_that_has_addresses_of_version_6_alone_is_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *how, **flags: addresses("::1", *how, **flags))
    check_address("six", 0)
