"""Answers of OpenAI's interface, from a generator whose tokens are written down here."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("starlette", reason="serving needs the extra `serve`")
pytest.importorskip("transformers")

from subnetact.errors import DeadlinePassed, QueueFull, RequestError
from subnetact.serve import build_text_app
from subnetact.serve.base_app import ARRIVED, unix_ms
from subnetact.serve.text_bodies import IGNORED, NEUTRAL


class Told(NamedTuple):
    own: float
    likely: tuple[tuple[int, float], ...]


class Scripted:
    """A completion that has all its tokens at once, or that has none and never ends."""

    def __init__(
        self, text: str | None, likely: int | None, error: RequestError | None = None, late: int = 0
    ) -> None:
        self._late = late
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
        facts = {"finish": "length", "late": self._late, "subnets": (1,) * len(self._tokens)}
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

    def __init__(self, *texts: Any, late: int = 0) -> None:
        self._texts, self._late, self.asked, self.made = list(texts), late, [], []

    def submit(self, prompt: list[int], logprobs: int | None = None, **options: Any) -> Scripted:
        self.asked.append((prompt, options))
        text = self._texts.pop(0)
        if isinstance(text, QueueFull):
            raise text
        error = text if isinstance(text, RequestError) else None
        self.made.append(Scripted("" if error else text, logprobs, error, self._late))
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


FATES: dict[str, list[tuple[str, Any]]] = {
    "used": [("min_tokens", 2), ("ignore_eos", True), ("temperature", 0.5), ("top_k", 3), ("seed", 1234)],
    "ignored": [
        *(("metadata", {"a": "b"}), ("parallel_tool_calls", False), ("prompt_cache_key", "k")),
        *(("reasoning_effort", "low"), ("safety_identifier", "u1"), ("service_tier", "auto")),
        *(("store", True), ("user", "u"), ("verbosity", "low")),
    ],
    "neutral": [
        *(("frequency_penalty", 0), ("presence_penalty", 0.0), ("logit_bias", {}), ("logprobs", False)),
        *(("tools", []), ("n", 1), ("temperature", None), ("tool_choice", "none")),
        ("response_format", {"type": "text"}),
    ],
    "refused": [
        *(("frequency_penalty", 0.5), ("presence_penalty", 1), ("logit_bias", {"1": 5}), ("best_of", 2)),
        *(("response_format", {"type": "json_object"}), ("tool_choice", "auto"), ("echo", True)),
        *(("tools", [{"type": "function"}]), ("unheard_of", 1), ("max_tokens", 0)),
    ],
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("fate", FATES)
def test_a_field_is_used_or_ignored_and_counted_or_refused(post: Any, path: str, fate: str) -> None:
    for field, value in FATES[fate]:
        generator = ScriptedGenerator("ab")
        app = build_text_app(generator, Letters())
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a", "name": "bob"}], field: value}
        del body["prompt" if "chat" in path else "messages"]
        status, _, raw = asyncio.run(post(app, None, path=path, raw=json.dumps(body).encode()))
        answer = json.loads(raw)
        assert status == (400 if fate == "refused" else 200), answer
        assert app.ignored == ({field: 1} if fate == "ignored" else {})
        if fate == "used":
            assert generator.asked[0][1][field] == value
        if fate == "refused":
            assert field in answer["error"]["message"]
            assert answer["error"].keys() == {"message", "type", "param", "code"}
            assert answer["error"]["type"] == "invalid_request_error"
            assert answer["error"]["param"] == (None if field == "unheard_of" else field)


def test_every_ignored_field_and_every_neutral_one_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "openai.md").read_text()
    assert [name for name in (*IGNORED, *NEUTRAL) if f"`{name}`" not in page] == []


def test_every_prompt_of_a_list_and_every_chat_has_its_answers(post: Any) -> None:
    generator = ScriptedGenerator("one", "two", "three")
    status, answer = ask(post, generator, "/v1/chat/completions", n=3, max_tokens=9)
    texts = [one["message"]["content"] for one in answer["choices"]]
    assert (status, texts) == (200, ["one", "two", "three"])
    assert len({str(one) for one in generator.asked}) == 1
    generator = ScriptedGenerator("ab", "cd", "ef", "gh")
    status, answer = ask(post, generator, prompt=["x", "yz"], n=2)
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "cd", "ef", "gh"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [prompt for prompt, _ in generator.asked] == [[120], [120], [121, 122], [121, 122]]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 8)
    assert ask(post, ScriptedGenerator("ab", "cd"), prompt=[[1, 2], [3]])[0] == 200
    assert ask(post, ScriptedGenerator(), prompt=["x"] * 33, n=2)[0] == 400


@pytest.mark.parametrize(("path", "count"), [("/v1/completions", 16), ("/v1/chat/completions", 100 - 18)])
def test_without_a_number_a_chat_has_all_the_room_and_a_completion_16_tokens(
    post: Any, path: str, count: int
) -> None:
    generator = ScriptedGenerator("ab", "ab")
    assert ask(post, generator, path)[0] == ask(post, generator, path, max_tokens=5)[0] == 200
    assert [options["max_new_tokens"] for _, options in generator.asked] == [count, 5]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late", [0, 2])
def test_the_end_of_an_answer_names_its_subnets_and_whether_it_was_late(
    post: Any, stream: bool, late: int
) -> None:
    generator = ScriptedGenerator("ab", late=late)
    app = build_text_app(generator, Letters())
    raw = json.dumps({"prompt": "a", "stream": stream}).encode()
    _, _, answer = asyncio.run(post(app, None, path="/v1/completions", raw=raw))
    [choice] = json.loads(answer.partition(b"\n")[0].removeprefix(b"data: "))["choices"]
    assert (choice["met"], choice["subnets"]) == (not late, {"large": 2})
    assert app.responses == {("/v1/completions", "200", "late" if late else "met"): 1}
    assert (app.service.first_ms.count, app.service.between_ms.count) == (1, 1)


@pytest.mark.parametrize(
    ("options", "usages"),
    [
        ({}, []),
        ({"include_usage": True}, [None, 3]),
        ({"include_usage": True, "continuous_usage_stats": True}, [3, 3]),
    ],
)
def test_pieces_of_a_stream_tell_the_usage_if_asked(post: Any, options: Any, usages: Any) -> None:
    _, events = ask(post, ScriptedGenerator("ab"), stream=True, stream_options=options)
    told = [event["usage"] for event in events if "usage" in event]
    assert [usage and usage["total_tokens"] for usage in told] == usages


def test_time_that_passed_on_the_way_counts(post: Any) -> None:
    app = build_text_app(generator := ScriptedGenerator("ab"), Letters())
    body = json.dumps({"prompt": "a", "deadline_ms": 60000, "slo_ttft_ms": 50000}).encode()
    sent = {ARRIVED: unix_ms() - 20000.0}
    assert asyncio.run(post(app, None, path="/v1/completions", raw=body, **sent))[0] == 200
    options = generator.asked[0][1]
    assert options["deadline_ms"] <= 40000
    assert options["first_ms"] <= 30000
    sent = {ARRIVED: unix_ms() - 55000.0}
    assert asyncio.run(post(app, None, path="/v1/completions", raw=body, **sent))[0] == 504


def test_the_model_and_the_health_of_the_server_have_addresses(post: Any) -> None:
    app = build_text_app(ScriptedGenerator(), Letters(), name="mine")
    status, _, answer = asyncio.run(post(app, None, method="GET", path="/v1/models/mine"))
    assert (status, json.loads(answer)["id"]) == (200, "mine")
    assert asyncio.run(post(app, None, method="GET", path="/v1/models/other"))[0] == 404
    assert "/health" in app.paths


def test_a_stream_says_of_every_piece_whose_it_is(post: Any) -> None:
    generator, usage = ScriptedGenerator("one", "two"), {"include_usage": True}
    _, events = ask(post, generator, "/v1/chat/completions", n=2, stream=True, stream_options=usage)
    pieces = [(one["index"], one["delta"]) for event in events for one in event["choices"]]
    assert pieces == [(i, {"role": "assistant", "content": text}) for i, text in enumerate(("one", "two"))]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == events[-1]["usage"]["prompt_tokens"] + 6


def test_if_one_of_n_requests_is_refused_none_goes_on(post: Any) -> None:
    generator = ScriptedGenerator(None, QueueFull("full"))
    status, answer = ask(post, generator, n=2)
    error = answer["error"]
    assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "QueueFull")
    assert generator.made[0].cancelled


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_a_status_and_a_later_one_is_an_event(
    post: Any, stream: bool
) -> None:
    status, answer = ask(post, ScriptedGenerator(DeadlinePassed("too late")), stream=stream)
    assert (status, answer["error"]["type"], answer["error"]["param"]) == (504, "server_error", None)
    _, events = ask(post, ScriptedGenerator("one", DeadlinePassed("too late")), n=2, stream=True)
    assert [one["text"] for one in events[0]["choices"]] == ["one"]
    assert (len(events), events[1]["error"]["code"]) == (2, "DeadlinePassed")


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
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"model": "other"}, "model"),
    ],
)
def test_an_error_of_a_chat_names_its_parameter(post: Any, body: dict[str, Any], param: str) -> None:
    status, answer = ask(post, ScriptedGenerator(), "/v1/chat/completions", **body)
    assert status in (400, 404)
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", param)


def test_the_document_describes_the_bodies() -> None:
    document = build_text_app(ScriptedGenerator(), Letters()).openapi()
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert {"messages", "n", "logprobs", "deadline_ms"} <= set(chat["schema"]["properties"])
    assert "Message" in document["components"]["schemas"]
