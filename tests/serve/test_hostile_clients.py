"""Clients that send too much, too slowly, or two requests as one harm nobody, some only behind nginx."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.serve.conftest import ROOT, Server

ZEROS = [0.0] * 256
LIMITS = "--name digits --max-body-mb 16 --body-s 1 --idle-s 1 --max-connections 400"
SHORT = {"client_header_timeout": "1s", "send_timeout": "1s", "keepalive_timeout": "1s"}
GOOD = json.dumps({"input": ZEROS, "deadline_ms": 60_000}).encode()


@pytest.fixture(scope="module")
def strict(start, digits):
    """A server with short limits, whose log has to stay empty."""
    server = start("--bundle", str(digits[1]), *LIMITS.split())
    yield server
    assert server.call("GET", "/healthz")[0] == 200
    assert server.stop() == ""


class Proxy(Server):
    """The nginx of the example, in front of a server, with shorter times."""

    def __init__(self, server, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = free.getsockname()
        text = (ROOT / "examples" / "proxy" / "nginx.conf").read_text()
        for name, value in SHORT.items():
            text, count = re.subn(rf"\b{name} \S+;", f"{name} {value};", text)
            assert count == 1
        text = text.replace("127.0.0.1:8000", ":".join(map(str, server.address)))
        text = text.replace("listen 8080;", f"listen 127.0.0.1:{self.address[1]};")
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        places = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        (folder / "nginx.conf").write_text(text.replace("http {", "http {" + places))
        command = ["nginx", "-p", str(folder), "-c", "nginx.conf", "-g", "daemon off; master_process off;"]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(self.address, timeout=1).close()
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < end
                time.sleep(0.05)

    def stop(self):
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture(scope="module")
def behind(strict, tmp_path_factory):
    """The strict server behind a proxy, as a pair."""
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx")
    proxy = Proxy(strict, tmp_path_factory.mktemp("nginx"))
    yield proxy, strict
    proxy.stop()


@pytest.fixture(scope="module", params=["httptools", "h11", "nginx"])
def parser(request, start, digits, strict):
    """Servers with short limits: one per parser of HTTP, of which an extra brings the first, and a proxy."""
    if request.param == "nginx":
        yield request.getfixturevalue("behind")[0]
    elif request.param == "httptools":
        pytest.importorskip("httptools")
        yield strict
    else:
        server = start("--bundle", str(digits[1]), *LIMITS.split(), without=("httptools",))
        yield server
        assert server.stop() == ""


@contextlib.contextmanager
def connected(server):
    with socket.create_connection(server.address, timeout=30) as connection:
        yield connection


def read_all(connection):
    """Everything until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            received += chunk
    return received


def statuses(received):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


def head(path, *headers, method="POST"):
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def memory_mb(server):
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


# -- too much ------------------------------------------------------------------------------------


def test_a_body_of_100_mb_is_refused_by_its_length(strict):
    with connected(strict) as connection:
        connection.sendall(head("/infer", "Content-Length: 104857600"))
        assert statuses(read_all(connection)) == [413]


def test_a_body_without_a_length_is_refused_once_it_is_too_long(strict):
    before = memory_mb(strict)
    with connected(strict) as connection:
        connection.sendall(head("/infer", "Transfer-Encoding: chunked"))
        piece = b"100000\r\n" + b"[" * 2**20 + b"\r\n"
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 100:
                connection.sendall(piece)
                sent += 1
        assert 16 <= sent < 100
        assert statuses(read_all(connection)) in ([413], [])  # the reset may overtake the answer
    assert memory_mb(strict) < before + 120


@pytest.mark.parametrize("size", [7_000, 34_000])
def test_a_whole_head_beyond_its_limit_is_refused(parser, size):
    with connected(parser) as connection:
        padding = f"x-padding: {'x' * size}"
        connection.sendall(
            head("/infer", padding, f"Content-Length: {len(GOOD)}", "Connection: close") + GOOD
        )
        assert statuses(read_all(connection))[0] in ([200] if size < 32_768 else [431, 400])


# -- two requests as one -------------------------------------------------------------------------

SMUGGLED = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


HEADS = [
    # What is behind such a head may be read as a body or not at all, but never as a request.
    (head("/nothing", f"Content-Length: {len(SMUGGLED)}"), [404]),
    (head("/infer", f"Content-Length: {len(SMUGGLED)}"), [400]),
    (head("/infer", f"Content-Length: {len(SMUGGLED)}", method="GET"), [405]),
    (head("/healthz", f"Content-Length: {len(SMUGGLED)}", method="GET"), [200]),
    (head("/infer", "Content-Length: 0", "Transfer-Encoding: chunked") + b"0\r\n\r\n", [400]),
    (head("/healthz", "Content-Length: 4", "Transfer-Encoding: chunked", method="GET") + b"0\r\n\r\n", [400]),
    (head("/infer", "Content-Length: 0", f"Content-Length: {len(SMUGGLED)}"), [400]),
    (head("/healthz", "Content-Length: 0", f"Content-Length: {len(SMUGGLED)}", method="GET"), [400]),
    (head("/infer", "Content-Length: +0"), [400]),
    (head("/infer", "Content-Length : 0"), [400]),
    (head("/infer", "Transfer-Encoding: xchunked"), [400, 501]),
    (head("/infer", "Transfer-Encoding: chunked", "Transfer-Encoding: identity"), [400, 501]),
    (head("/infer", "Transfer-Encoding:\x0bchunked"), [400, 501]),
]
"""The first of two requests in one, and the statuses that it may have."""


def test_no_request_is_smuggled(parser):
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connected(parser)) for _ in HEADS]  # all wait at the same time
        for connection, (first, _) in zip(connections, HEADS, strict=True):
            connection.sendall(first + SMUGGLED)
        for connection, (first, allowed) in zip(connections, HEADS, strict=True):
            received = read_all(connection)
            found = statuses(received)
            assert len(found) == 1, first
            assert found[0] in allowed, first
            assert received.count(b'"status":"ok"') == (found == [200]), first


def test_pipelined_requests_are_answered_in_order(parser):
    with connected(parser) as connection:
        one = head("/infer", f"Content-Length: {len(GOOD)}") + GOOD
        connection.sendall(one + SMUGGLED + one + head("/nothing", "Connection: close", method="GET"))
        assert statuses(read_all(connection)) == [200, 200, 200, 404]


def test_malformed_heads_are_refused(parser):
    rng = random.Random(0)
    good = head("/infer", f"Content-Length: {len(GOOD)}", "Content-Type: application/json")
    for _ in range(100):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        with connected(parser) as connection:
            connection.sendall(bytes(bad) + GOOD)
            connection.shutdown(socket.SHUT_WR)
            found = statuses(read_all(connection))
        assert {*found} <= {200, 400, 404, 405, 408, 411, 413, 415, 431, 501}, bytes(bad)


# -- too slow ------------------------------------------------------------------------------------


def cut_off(server, count, clients, seconds):
    """Open connections, send a first part and then bytes now and then; how many the server left open."""
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        drips = {}
        for first, drip in clients * count:
            connection = stack.enter_context(connected(server))
            with contextlib.suppress(OSError):
                connection.sendall(first)
            connection.setblocking(False)
            drips[connection] = drip
        open_ = set(drips)
        while open_ and time.monotonic() < end:
            time.sleep(0.1)
            for connection in list(open_):
                try:
                    if drips[connection]:
                        connection.send(drips[connection])
                    if connection.recv(65536) == b"":
                        open_.discard(connection)
                except BlockingIOError:
                    pass
                except OSError:
                    open_.discard(connection)
        return len(open_)


IDLE_AFTER_AN_ANSWER = SMUGGLED, b""
SLOW = {
    "strict": [
        (head("/infer", "Content-Length: 1000"), b"x"),
        (head("/infer", "Transfer-Encoding: chunked"), b"1\r\nx\r\n"),
    ],
    "behind": [(b"", b""), (b"POST /infer HTTP/1.1\r\n", b"x: y\r\n")],  # whom the server waits for
}


@pytest.mark.parametrize("name", SLOW)
def test_slow_and_idle_clients_are_cut_off(name, request):
    server = request.getfixturevalue(name)
    server = server if name == "strict" else server[0]
    assert cut_off(server, 30, [*SLOW[name], IDLE_AFTER_AN_ANSWER], 60) == 0


def test_a_thousand_slow_clients_do_not_lock_others_out_of_the_proxy(behind):
    proxy, answered = behind[0], 0
    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(cut_off, proxy, 1000, [(b"POST /infer HTTP/1.1\r\n", b"")], 120)
        while not attack.done():
            assert proxy.call("POST", "/infer", GOOD)[0] == 200
            answered += 1
    assert attack.result() == 0
    assert answered


def test_connections_beyond_the_limit_are_refused_and_later_ones_answered(strict, wait_for):
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(connected(strict))
        wait_for(lambda: strict.call("GET", "/healthz")[0] == 503, 60)
    wait_for(lambda: strict.call("GET", "/healthz")[0] == 200, 60)


def test_a_client_that_never_reads_is_cut_off_by_the_proxy(behind):
    with connected(behind[0]) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.5)

        def ask_on():
            end = time.monotonic() + 60
            while time.monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    connection.sendall(head("/openapi.json", method="GET"))

        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            ask_on()


def test_clients_that_leave_make_no_noise(strict):
    body = head("/infer", f"Content-Length: {len(GOOD)}") + GOOD
    for cut in (0, 10, len(body) - 700, len(body)):
        for _ in range(10):
            with connected(strict) as connection:
                connection.sendall(body[:cut])
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    for _ in range(5):
        with connected(strict) as connection:
            connection.sendall(head("/status", method="GET"))
            assert statuses(connection.recv(65536)) == [200]
    assert strict.infer(torch.zeros(256))[0] == 200
    # The fixture looks at the log.
