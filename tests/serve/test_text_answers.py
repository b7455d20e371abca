"""Answers of OpenAI's interface, from a generator whose tokens are written down here."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("starlette", reason="serving needs the extra `serve`")
pytest.importorskip("transformers")

from subnetact.errors import DeadlinePassed, QueueFull, RequestError
from subnetact.serve import build_text_app


class Told(NamedTuple):
    own: float
    likely: tuple[tuple[int, float], ...]


class Scripted:
    """A completion that has all its tokens at once, or that has none and never ends."""

    def __init__(self, text: str | None, likely: int | None, error: RequestError | None = None) -> None:
        self._tokens = [] if text is None else [ord(one) for one in text]
        self._likely, self._error = likely, error
        self.done, self.cancelled = text is not None, False

    def tokens(self, first: int) -> list[int]:
        return self._tokens[first:]

    def logprobs(self, first: int) -> list[Told]:
        assert self._likely is not None
        found = [Told(-0.5, ((token, -0.5), (33, -2.0))[: self._likely]) for token in self._tokens]
        return found[first:]

    def result(self, timeout_s: float) -> Any:
        if self._error is not None:
            raise self._error
        facts = {"finish": "length", "late": 0, "subnets": (1,) * len(self._tokens)}
        return type("Generated", (), facts)

    def watch(self, news: asyncio.Event) -> None:
        if self.done:
            news.set()

    def cancel(self) -> None:
        self.cancelled = True


class ScriptedGenerator:
    """Answers the requests in order with the texts that it was given."""

    end_tokens: frozenset[int] = frozenset()
    max_length = 100
    table = SimpleNamespace(subnets=("small", "large"))

    def __init__(self, *texts: Any) -> None:
        self._texts, self.asked, self.made = list(texts), [], []

    def submit(self, prompt: list[int], logprobs: int | None = None, **options: Any) -> Scripted:
        self.asked.append((prompt, options))
        text = self._texts.pop(0)
        if isinstance(text, QueueFull):
            raise text
        error = text if isinstance(text, RequestError) else None
        self.made.append(Scripted("" if error else text, logprobs, error))
        return self.made[-1]

    def close(self, wait: bool = True) -> None:
        pass


class Letters:
    """A tokenizer with a token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(one) for one in text]

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))


def ask(post: Any, generator: Any, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
    """Return the status and the answer, or the events of a stream."""
    given = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    app = build_text_app(generator, Letters())
    raw = json.dumps({**given, **body}).encode()
    status, _, answer = asyncio.run(post(app, None, path=path, raw=raw))
    if not body.get("stream") or status != 200:
        return status, json.loads(answer)
    *events, end, rest = answer.decode().split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return status, [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_n_answers_are_n_requests(post: Any, path: str) -> None:
    generator = ScriptedGenerator("one", "two", "three")
    status, answer = ask(post, generator, path, n=3, max_tokens=9)
    texts = [one["message"]["content"] if "chat" in path else one["text"] for one in answer["choices"]]
    assert (status, texts) == (200, ["one", "two", "three"])
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 11
    assert len({str(one) for one in generator.asked}) == 1


def test_a_stream_says_of_every_piece_whose_it_is(post: Any) -> None:
    _, events = ask(
        post,
        ScriptedGenerator("one", "two"),
        "/v1/chat/completions",
        **{"n": 2, "stream": True, "stream_options": {"include_usage": True}},
    )
    pieces = [(one["index"], one["delta"]) for event in events for one in event["choices"]]
    assert pieces == [
        (0, {"role": "assistant", "content": "one"}),
        (1, {"role": "assistant", "content": "two"}),
    ]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == events[-1]["usage"]["prompt_tokens"] + 6


def test_if_one_of_n_requests_is_refused_none_goes_on(post: Any) -> None:
    generator = ScriptedGenerator(None, QueueFull("full"))
    status, answer = ask(post, generator, n=2)
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (
        429,
        "rate_limit_error",
        "QueueFull",
    )
    assert generator.made[0].cancelled


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_a_status(post: Any, stream: bool) -> None:
    status, answer = ask(post, ScriptedGenerator(DeadlinePassed("too late")), stream=stream)
    assert (status, answer["error"]["type"], answer["error"]["param"]) == (504, "server_error", None)


def test_an_error_in_mid_stream_is_an_event(post: Any) -> None:
    _, events = ask(post, ScriptedGenerator("one", DeadlinePassed("too late")), n=2, stream=True)
    assert [one["text"] for one in events[0]["choices"]] == ["one"]
    assert events[1]["error"]["code"] == "DeadlinePassed"
    assert len(events) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["none", "bc"])
def test_chats_tell_log_probabilities(post: Any, stream: bool, stop: str) -> None:
    more = {"logprobs": True, "top_logprobs": 2, "stop": stop}
    path = "/v1/chat/completions"
    _, answer = ask(post, ScriptedGenerator("abcd"), path, stream=stream, **more)
    choices = [one["choices"][0] for one in answer] if stream else answer["choices"]
    told = [found for choice in choices for found in choice["logprobs"]["content"]]
    assert [found["token"] for found in told] == list("abcd" if stop == "none" else "abc")
    other = {"token": "!", "logprob": -2.0, "bytes": [33]}
    own = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert told[0] == {**own, "top_logprobs": [own, other]}


def test_completions_tell_log_probabilities(post: Any) -> None:
    _, answer = ask(post, ScriptedGenerator("ab"), logprobs=1)
    expected = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.5], "text_offset": [0, 1]}
    assert answer["choices"][0]["logprobs"] == {**expected, "top_logprobs": [{"a": -0.5}, {"b": -0.5}]}
    _, answer = ask(post, ScriptedGenerator("a"), logprobs=0)
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{}]
    _, answer = ask(post, ScriptedGenerator("a"))
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"model": "other"}, "model"),
        ({"unknown": 1}, None),
    ],
)
def test_an_error_names_its_parameter(post: Any, body: dict[str, Any], param: str | None) -> None:
    status, answer = ask(post, ScriptedGenerator(), "/v1/chat/completions", **body)
    assert status in (400, 404)
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", param)


def test_the_document_describes_the_bodies() -> None:
    document = build_text_app(ScriptedGenerator(), Letters()).openapi()
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert {"messages", "n", "logprobs", "deadline_ms"} <= set(chat["schema"]["properties"])
    assert "Message" in document["components"]["schemas"]
