"""The addresses of OpenAI's interface, asked by its own client and by clients that send nonsense."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("starlette", reason="serving needs the extra `serve`")
pytest.importorskip("uvicorn", reason="serving needs the extra `serve`")

import uvicorn
from held_steps import Clock, Gate

from subnetact.generation import Completion, Generator, StepTable
from subnetact.serve.text_app import build_text_app
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

LONG = {"slo_ttft_ms": 60_000.0}
Alone = Callable[..., list[int]]
WaitFor = Callable[..., None]


class Characters:
    """A tokenizer with a token per character; token 0 is no whole character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 97 for character in text]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return "".join("�" if token == 0 else chr(32 + token) for token in tokens)


class Served:
    """A text server on a free port."""

    def __init__(self, generator: Generator, wait_for: WaitFor, **options: Any) -> None:
        self.generator = generator
        app = build_text_app(generator, Characters(), name="tiny", **options)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]})
        self.thread.start()
        wait_for(lambda: self.server.started, 60)

    def asked(self, path: str, body: Any = None, **headers: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, sent, headers)
        return connection

    def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        with contextlib.closing(self.asked(path, body, **headers)) as connection:
            response = connection.getresponse()
            text = response.read().decode()
            return response.status, json.loads(text) if text.startswith("{") else text

    def choices(self, **body: Any) -> list[dict[str, Any]]:
        """Return the first choice of an answer, or of every piece of one that is streamed."""
        status, answer = self.call("/v1/completions", body)
        assert status == 200, answer
        pieces = [answer]
        if body["stream"]:
            assert answer.endswith("data: [DONE]\n\n")
            lines = [line[6:] for line in answer.split("\n\n") if line.startswith("data: {")]
            pieces = [json.loads(line) for line in lines]
        return [piece["choices"][0] for piece in pieces]

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.generator.close(drain=False)


@pytest.fixture(scope="module")
def make(llama: Supernet, widths: list[SubnetSpec], wait_for: WaitFor) -> Iterator[Callable[..., Served]]:
    """Return a function that makes a server of the widest subnet, which is closed at the end."""
    from generation_tables import step_table

    table: StepTable = step_table([spec.key for spec in widths])
    made: list[Served] = []

    def serve(**options: Any) -> Served:
        generator = Generator(llama, widths, table, token_ms=1000.0, allow_approximate=True, **options)
        made.append(Served(generator, wait_for))
        return made[-1]

    yield serve
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def served(make: Callable[..., Served]) -> Served:
    return make()


def expected(alone: Alone, prompt: str, tokens: int) -> str:
    tokenizer = Characters()
    return tokenizer.decode(alone(tokenizer.encode(prompt), (2,) * tokens), skip_special_tokens=True)


@pytest.mark.parametrize("stream", [False, True])
def test_phases_of_a_body_choose_the_subnets(served: Served, alone: Alone, stream: bool) -> None:
    tokenizer = Characters()
    prompt = tokenizer.encode("Hello")
    small = alone(prompt, (0,) * 4)
    approximate = alone(prompt, (0,) * 4 + (2,) * 8)
    exact = small + alone(prompt + small, (2,) * 8)
    for cache, tokens in (("approximate", approximate), ("exact", exact)):
        phases = [{"tokens": 4, "subnets": 0}, {"subnets": [2], "recompute": cache == "exact"}]
        choices = served.choices(prompt="Hello", max_tokens=12, phases=phases, stream=stream, **LONG)
        assert "".join(one["text"] for one in choices) == tokenizer.decode(tokens, skip_special_tokens=True)
        assert choices[-1]["cache"] == cache
    for wrong, words in (([], "at least one Phase"), ([{"end": 97}, {}], "from 0 to 96"), ([{"a": 1}], "a")):
        status, answer = served.call("/v1/completions", {"prompt": "Hello", "phases": wrong})
        assert (status, words in answer["error"]["message"]) == (400, True), answer
        assert answer["error"]["param"] in ("phases", None)


@pytest.mark.parametrize("stream", [False, True])
def test_texts_that_end_an_answer_are_not_shown(served: Served, alone: Alone, stream: bool) -> None:
    text = expected(alone, "Hello", 20)
    stop = text[6:9]
    choices = served.choices(prompt="Hello", max_tokens=20, stop=[stop, "never seen"], stream=stream)
    assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(("stream", "steps"), [(False, 0), (True, 0), (True, 1)])
def test_a_client_that_leaves_ends_its_request(
    make: Callable[..., Served], wait_for: WaitFor, monkeypatch: pytest.MonkeyPatch, stream: bool, steps: int
) -> None:
    served = make()
    gate = Gate(served.generator, monkeypatch)
    body = {"prompt": "Hello", "max_tokens": 110, "stream": stream, **LONG}
    with contextlib.closing(served.asked("/v1/completions", body)) as connection:
        for _ in range(steps):
            gate.free.release()
        gate.wait(steps + 1)
        cancelled, cancel = threading.Event(), Completion.cancel
        monkeypatch.setattr(Completion, "cancel", lambda self: (cancel(self), cancelled.set()))
        if steps:
            response = connection.getresponse()
            assert response.read(6) == b"data: "
            response.close()
    assert cancelled.wait(60)  # while the next step runs
    gate.free.release(1000)
    wait_for(lambda: not served.generator.stats().active, 60)
    assert served.generator.stats().cancelled == 1
    assert gate.entered == steps + 1


def test_a_server_without_steps_is_not_healthy(
    make: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    served = make(clock_ms=clock)
    gate = Gate(served.generator, monkeypatch)
    running = served.generator.submit([1, 2], max_new_tokens=5, first_ms=1e6, token_ms=1e6)
    gate.wait()
    assert served.call("/healthz")[0] == 200
    assert "subnetact_generation_up 1" in served.call("/metrics")[1]
    clock.now_ms += 1e5
    for path in ("/healthz", "/readyz"):
        assert served.call(path) == (503, {"status": "no step is computed"})
    assert "subnetact_generation_up 0" in served.call("/metrics")[1]
    gate.free.release(1000)
    running.result(60)
    assert served.call("/healthz")[0] == 200
    monkeypatch.setattr(served.generator._loop, "refresh", lambda: 1 / 0)
    served.generator._thread.join(60)
    assert served.call("/healthz")[0] == 503


REFUSED: list[tuple[Any, str]] = [
    *((raw, "not JSON") for raw in (b"{", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "a\\ud800"}')),
    (b'{"prompt": "a", "temperature": NaN}', "not JSON"),
    *((b'{"prompt": "a", "deadline_ms": %s}' % number, "not JSON") for number in (b"Infinity", b"1e999")),
    ([1], "body: got [1]"),
    ({}, "prompt"),
    ({"prompt": ""}, "empty"),
    ({"prompt": ["a"] * 33, "n": 2}, "n: 2 answers to 33 prompts"),
    ({"prompt": [1, 2, 97]}, "token 2 is 97"),
    ({"prompt": "a" * 200}, "more than 128"),
    *(({"prompt": value}, "prompt") for value in (3, [True])),
]
"""Bodies that mean nothing as a whole, and words of the reason."""
WRONG: dict[str, list[Any]] = {
    "n": [0, 65, True],
    "logprobs": [6, True],
    "seed": [0.5],
    "messages": [[]],
    "max_tokens": ["many", True, 2.0, 0],
    "max_completion_tokens": [[]],
    "temperature": [False, [], "high"],
    "top_k": [True, 0],
    "top_p": [{}, -1],
    "stop": [[""], {"a": 1}, [True], False],
    "stream": ["yes", 1],
    "stream_options": [[], {"include_usage": 1}, {"other": True}],
    "slo_ttft_ms": [True],
    "deadline_ms": [-1, []],
    "min_accuracy": [99, False, -1],
}
"""Values that fields cannot have; the reason names the field."""
TOLD: dict[str, tuple[Any, str]] = {
    "frequency_penalty": (False, "frequency_penalty: this server supports no other value than 0"),
    "model": (3, "model: got 3. Input should be a valid string"),
    "max_tokens": (10**9, "more than 128"),
    "slo_ttft_ms": (0, "slo_ttft_ms: got 0. Input should be greater than 0"),
    "deadline_ms": (1e308, "deadline_ms: got 1e+308, the most is 3.6e+06 ms"),
    "min_accuracy": ([], "min_accuracy: got []. Input should be a valid number"),
}
"""A wrong value of a field, and what is said of it."""
BODIES = [
    *((body, 400, words) for body, words in REFUSED),
    *(({"prompt": "a", name: value}, 400, name) for name, values in WRONG.items() for value in values),
    *(({"prompt": "a", name: value}, 400, words) for name, (value, words) in TOLD.items()),
    ({"prompt": "a", "deadline_ms": 10**400}, 400, "not JSON"),
    ({"prompt": "a", "deadline_ms": 50.0, "slo_ttft_ms": 50.0}, 400, "deadline_ms"),
    ({"prompt": "a", "model": "other"}, 404, "tiny"),
    ({"prompt": "a", "slo_ttft_ms": 0.001}, 504, "slo_ttft_ms: 0.001 ms passed"),
]


def test_what_cannot_be_answered_is_refused_with_the_reason(served: Served) -> None:
    for body, status, words in BODIES:
        found, answer = served.call("/v1/completions", body)
        assert (found, words in answer["error"]["message"]) == (status, True), (body, answer)
        assert "Traceback" not in str(answer)


CONTENTS: list[Any] = [
    *([{"type": "image_url"}], [{"type": "text", "text": 4}], [{"type": "input_audio", "text": "a"}], 4),
    "\udc00",
]
MESSAGES: list[Any] = [
    *(None, [], "Hello", [3], [{"role": "user"}], [{"content": "a"}]),
    *([{"role": role, "content": "a"}] for role in ("tool", ["user"])),
    *([{"role": "user", "content": content}] for content in CONTENTS),
]


def test_messages_without_text_are_refused(served: Served) -> None:
    for messages in MESSAGES:
        status, answer = served.call("/v1/chat/completions", {"messages": messages})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), messages


def test_headers_set_deadlines_and_nonsense_in_them_is_refused(served: Served) -> None:
    path, body = "/v1/completions", {"prompt": "Hello", "max_tokens": 3}
    assert served.call(path, body, **{"x-deadline-ms": "60000", "x-min-accuracy": "45"})[0] == 200
    both = {"x-slo-ttft-ms": "0.001", "x-llm-d-slo-ttft-ms": "60000", "x-llm-d-slo-tpot-ms": "60000"}
    assert served.call(path, body, **both, **{"x-priority": "-1"})[0] == 200
    deadlines = ("x-slo-ttft-ms", "x-deadline-ms", "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms")
    nonsense = [(name, value) for name in deadlines for value in ("-3", "0", "inf", "nan", "1e308", "soon")]
    for name, value in [*nonsense, ("x-min-accuracy", "inf"), ("x-priority", "low")]:
        assert served.call(path, body, **{name: value})[0] == 400, (name, value)


def test_messages_keep_their_roles_and_parts(served: Served, alone: Alone) -> None:
    parts = [{"type": "text", "text": "lo"}, {"type": "text", "text": "!"}]
    messages = [
        {"role": "developer", "content": "Hel"},
        {"role": "assistant", "content": "so", "tool_calls": None},
        {"role": "user", "content": parts},
    ]
    status, answer = served.call("/v1/chat/completions", {"messages": messages, "max_tokens": 5, **LONG})
    plain = "developer: Hel\nassistant: so\nuser: lo!\nassistant:"
    assert (status, answer["choices"][0]["message"]["content"]) == (200, expected(alone, plain, 5))
