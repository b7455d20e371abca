"""The open-loop client of `examples/load_test.py`, its command line, and both against a server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from load_test import HttpClient, Refused, Reply, Sent, main, refusal, run_open_loop, summary, table

from subnetact.errors import ServeError


class Clock:
    """A clock that only sleeps and tests move, in s."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    async def sleep(self, seconds):
        self.now_s += seconds
        await asyncio.sleep(0)


def test_waiting_counts_from_when_a_request_was_due():
    clock = Clock()

    async def blocking(i, left_ms):
        clock.now_s += 0.03
        return Reply(i, 0, 70.0)

    arrivals = [0.0, 1.0, 2.0, 3.0]
    sent = asyncio.run(run_open_loop(arrivals, blocking, 1e4, clock_s=clock, sleep=clock.sleep))
    assert [s.reply.label for s in sent] == [0, 1, 2, 3]
    assert [s.latency_ms for s in sent] == pytest.approx([31.0, 60.0, 89.0, 118.0])
    assert [s.lag_ms for s in sent] == pytest.approx([0.0, 30.0, 29.0, 28.0])


def test_a_request_that_goes_out_too_late_is_not_sent():
    asked = []

    async def send(i, left_ms):
        asked.append((i, left_ms))
        return Reply(0, 0, 70.0)

    clock = Clock()
    sent = asyncio.run(run_open_loop([-50.0, -30.0, 0.0], send, 40.0, clock_s=clock, sleep=clock.sleep))
    assert [one.outcome for one in sent] == ["SentTooLate", "answered", "answered"]
    assert asked == [(1, pytest.approx(10.0)), (2, pytest.approx(40.0))]


def test_what_is_never_answered_is_counted():
    async def send(i, left_ms):
        if i == 0:
            await asyncio.Event().wait()
        if i == 1:
            raise Refused("QueueFull")
        if i == 2:
            raise ConnectionResetError
        return Reply(7, 2, 80.0)

    sent = asyncio.run(run_open_loop([0.0] * 5, send, 1e4, give_up_ms=200))
    found = summary(sent, [7, 7, 7, 7, 8], 1e4)
    assert found["outcomes"] == {"ConnectionResetError": 1, "QueueFull": 1, "met": 2, "unanswered": 1}
    assert (found["attainment"], found["measured_accuracy"], found["effective_accuracy"]) == (0.4, 50, 20)
    assert (found["profiled_accuracy"], found["subnets"]) == (80.0, {2: 2})
    reply = Reply(1, 0, 70.0)
    sent = [Sent("answered", 0.0, latency, reply) for latency in (10.0, 36.0, 36.1)]
    found = summary(sent, [1], 36.0)
    assert found["outcomes"] == {"late": 1, "met": 2}
    assert found["effective_accuracy"] == pytest.approx(200 / 3)
    lines = {"requests            3", "answered in time    66.67 %", "outcomes            late 1  met 2"}
    assert lines <= set(table(found).splitlines())
    assert table(summary([Sent("QueueFull", 0.1, 5.0, None)], [1], 50.0)).endswith("subnets in time     -")


def test_the_client_names_what_refused_it():
    assert refusal(502, b'{"error": "QueueFull"}') == "QueueFull"
    assert {refusal(502, answer) for answer in (b"<html>", b"[1]", b"")} == {"HTTP 502"}


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", b"x" * 100_000, b"\r\n\r\n"]
)
async def test_a_server_that_speaks_no_http_is_an_outcome_and_no_request_is_sent_twice(answer):
    heads = []

    async def speak(reader, writer):
        heads.append(await reader.readuntil(b"{}"))
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        with pytest.raises((Refused, ValueError)):
            await client.post(b"{}")
    server.close()
    assert len(heads) == 1


@pytest.mark.parametrize(
    "options",
    [
        *(["--slo-ms", "4"], ["--seconds", "-1"], ["--rate", "-1"], ["--labels", "x.npy"]),
        *(["--inputs", "one.npy"], ["--inputs", "bad.npy"], ["--inputs", "none.npy"]),
        ["--inputs", "good.npy", "--labels", "good.npy"],
    ],
)
def test_a_test_that_cannot_run_says_why(options, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("one.npy", np.zeros(3))
    np.save("good.npy", np.zeros((3, 4)))
    Path("bad.npy").write_bytes(b"\x93NUMPY")
    assert main(["http://127.0.0.1:9", *options]) == 2
    told = capsys.readouterr().err
    assert told.startswith("load_test: ")
    assert "--inputs" not in options or options[1].removesuffix(".npy") in told
    for url in ("localhost:8000", "ftp://localhost", "http://", "http://a:b", "http://a b/c"):
        with pytest.raises(ServeError, match="url"):
            HttpClient(url)


@pytest.mark.parametrize("body", ["npy", "json"])
def test_the_command_reports_what_came_of_a_trace(server, tmp_path, capsys, body, images):
    np.save(tmp_path / "inputs.npy", images.numpy())
    np.save(tmp_path / "labels.npy", np.zeros(len(images), int))
    out = tmp_path / "report.json"
    options = f"--trace servegen --rate 120 --seconds 0.5 --slo-ms 60000 --body {body} --out {out}"
    files = ["--inputs", str(tmp_path / "inputs.npy"), "--labels", str(tmp_path / "labels.npy")]
    assert main([server.url, *options.split(), *files]) == 0
    report = json.loads(out.read_text())
    assert report["outcomes"] == {"met": report["requests"]}
    assert report["requests"] > 20
    assert report["attainment"] == 1.0
    assert report["measured_accuracy"] == report["effective_accuracy"]
    assert report["latency_ms"]["p50"] <= report["latency_ms"]["p99"]
    assert "answered in time    100.00 %" in capsys.readouterr().out
