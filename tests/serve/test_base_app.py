"""What the servers of networks and of texts have in common: tokens, names, and errors without secrets."""

import asyncio
import json
import re
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason="serving needs the extra `serve`")
pytest.importorskip("uvicorn", reason="serving needs the extra `serve`")

import logging

from starlette.responses import StreamingResponse

from subnetact.errors import BatchFailed
from subnetact.serve import build_text_app
from subnetact.serve.base_app import BaseApp
from subnetact.serve.logs import request_id, setup

TOKEN = "a-token-of-the-tests"
KNOWN = [(b"authorization", f"Bearer {TOKEN}".encode()), (b"host", b"tiny.example:80")]
GUARDS = {"tokens": {TOKEN: "tests"}, "allowed_hosts": ["Tiny.Example"]}


def broken(*_, **__):
    raise KeyError("/etc/passwd")


def broken_text_app(encode, decode=None, **options):
    """An application of texts whose generator raises."""
    stats, closes = (lambda: SimpleNamespace(up=True)), (lambda wait=True: None)
    generator = SimpleNamespace(submit=broken, stats=stats, close=closes)
    return build_text_app(generator, SimpleNamespace(encode=encode, decode=decode), **options)


@pytest.fixture(params=["network", "text"])
def guarded(request, gated):
    """An application with a token and a name, and an address of it that infers."""
    if request.param == "network":
        with gated(**GUARDS) as (app, _, batcher):
            batcher.submit = app.collect = app._infer_rows = broken
            yield app, "/infer"
    else:
        yield broken_text_app(encode=list, decode=broken, **GUARDS), "/v1/completions"


def test_every_application_asks_for_a_token_and_its_own_name(guarded, post):
    app, infer = guarded

    def ask(path, headers, method="GET", body=None):
        status, found, raw = asyncio.run(post(app, None, path=path, headers=headers, method=method, raw=body))
        return status, found, json.loads(raw) if raw.startswith(b"{") else raw

    for path in ("/healthz", "/readyz", "/livez"):
        assert ask(path, KNOWN[1:])[0] == 200
    closed = ("/", "/metrics", "/openapi.json", "/status", "/none")
    for path, method in (*((path, "GET") for path in closed), (infer, "POST")):
        status, headers, _ = ask(path, KNOWN[1:], method, b"{}")
        assert (status, headers["www-authenticate"], headers["connection"]) == (
            401,
            'Bearer, Basic realm="subnetact"',
            "close",
        )
        assert ask(path, [KNOWN[0], (b"host", b"evil.example")], method, b"{}")[0] == 400
        assert ask(path, [*KNOWN, (b"host", b"tiny.example")], method, b"{}")[0] == 400
        length = [(b"content-length", b"1e3")]
        assert ask(path, KNOWN + length, method, b"{}")[0] == 400
    assert "error" in ask("/none", KNOWN)[2]
    assert ask("/none", KNOWN)[0] == 404
    status, headers, document = ask(infer, KNOWN)
    assert (status, headers["allow"], "error" in document) == (405, "POST", True)


def test_no_application_tells_why_it_failed(guarded, post, caplog):
    app, infer = guarded
    raw = json.dumps({"input": [0.0] * 4} if infer == "/infer" else {"prompt": "a"}).encode()
    for path, method in (("/metrics", "GET"), (infer, "POST")):
        caplog.clear()
        status, _, body = asyncio.run(post(app, None, path=path, headers=KNOWN, method=method, raw=raw))
        assert status == 500
        assert b"passwd" not in body
        assert json.loads(body)["error"]  # in the form of all errors
        assert len(caplog.records) == 1


def test_an_error_in_the_middle_of_an_answer_begins_no_second_answer(post, caplog):
    app = BaseApp()
    sent = []

    async def pieces():
        yield b"a"
        raise KeyError("/etc/passwd")

    async def begin(_):
        return StreamingResponse(pieces())

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message["type"])

    app.add("POST", "/infer", begin)
    scope = {"type": "http", "method": "POST", "path": "/infer", "headers": []}
    asyncio.run(app(scope, receive, send))
    assert sent == ["http.response.start", "http.response.body"]
    assert len(caplog.records) == 1


async def test_long_prompts_keep_nobody_waiting(post):
    begun, go_on = threading.Event(), threading.Event()

    def encode(text):
        begun.set()
        assert go_on.wait(60)
        return [len(text)]

    app = broken_text_app(encode)
    prompt = json.dumps({"prompt": "a" * 100_000}).encode()
    waiting = asyncio.create_task(post(app, None, path="/v1/completions", raw=prompt))
    assert await asyncio.to_thread(begun.wait, 60)
    assert (await post(app, None, path="/healthz", method="GET"))[0] == 200
    assert not waiting.done()
    go_on.set()
    assert (await waiting)[0] == 500  # the generator of this test is broken


@pytest.fixture
def app(gated):
    with gated() as (app, *_):
        yield app


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("path", ["/infer", "/livez", "/nowhere"])
def test_every_answer_has_the_id_of_its_request(app, post, path):
    wrong = ("two words", "x" * 129, None)
    for sent, name in (("order-7", "order-7"), *((one, r"[0-9a-f]{16}") for one in wrong)):
        for parent in (None, TRACE, "nonsense"):
            headers = {b"x-request-id": sent, b"traceparent": parent}
            pairs = [(key, value.encode()) for key, value in headers.items() if value is not None]
            _, told, _ = asyncio.run(post(app, [0], path=path, headers=pairs))
            assert re.fullmatch(name, told["x-request-id"])


@pytest.mark.parametrize(
    ("parent", "trace"),
    [(TRACE, TRACE[3:35]), ("00-" + "0" * 32 + TRACE[35:], None), ("ff" + TRACE[2:], None), ("", None)],
)
def test_the_log_of_a_request_that_fails_has_its_ids(app, post, monkeypatch, capsys, parent, trace):
    setup("info", as_json=True)

    async def fail(*_, **__):
        raise BatchFailed("the network raised")

    monkeypatch.setattr(app, "_infer_rows", fail)
    sent = [(b"x-request-id", b"order-7"), (b"traceparent", parent.encode())]
    assert asyncio.run(post(app, [1, 0, 0, 0], headers=sent))[0] == 500
    [line] = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["request_id"], line.get("trace_id")) == ("order-7", trace)


def test_times_of_answers_are_a_histogram_by_route(app, post):
    for path in ("/livez", "/livez", "/nowhere"):
        asyncio.run(post(app, None, method="GET", path=path))
    text = app.prometheus()
    assert 'subnetact_http_latency_seconds_count{route="/livez"} 2.0' in text
    assert 'subnetact_http_latency_seconds_bucket{le="+Inf",route=""} 1.0' in text


def fail(log):
    try:
        raise KeyError("lost")
    except KeyError as error:
        log.error("a request of %s failed", "alice", exc_info=error)


def test_a_line_for_people_begins_with_time_level_and_logger_and_names_the_request(capsys):
    setup()
    log = logging.getLogger("subnetact.serving.test")
    log.info("ready")
    token = request_id.set("r-17")
    fail(log)
    request_id.reset(token)
    first, second, *trace = capsys.readouterr().err.splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(time + " INFO subnetact.serving.test: ready", first)
    assert re.fullmatch(time + r" ERROR subnetact.serving.test: \[r-17\] a request of alice failed", second)
    assert trace[0].startswith("Traceback")
    assert trace[-1] == "KeyError: 'lost'"


def test_a_line_for_programs_is_one_object_with_the_traceback(capsys):
    setup("debug", as_json=True)
    log, words = logging.getLogger("subnetact.workers"), 'a "quoted"\nline'
    log.debug(words)
    token = request_id.set("r-18")
    fail(log)
    request_id.reset(token)
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.items() >= {"level": "debug", "logger": "subnetact.workers", "message": words}.items()
    assert "request_id" not in first
    assert second["request_id"] == "r-18"
    assert second["exception"].endswith("KeyError: 'lost'")
    assert second["time"].endswith("Z")


def test_levels_are_those_of_the_package_and_lines_appear_once(capsys):
    for level in ("info", "warning"):
        setup(level)
    logging.getLogger("subnetact.serve").info("left out")
    logging.getLogger("another").info("left out")
    logging.getLogger("subnetact.serve").warning("one")
    logging.getLogger("another").warning("two")
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()] == ["one", "two"]
