"""The addresses of OpenAI's interface in front of a generator: completions and chats, whole or streamed."""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic import ConfigDict, Field, model_validator

from subnetact.errors import InvalidRequest, RequestError
from subnetact.generation import Completion, Generated, Generator
from subnetact.serve.ask import Strict, header_names, header_values, too_long
from subnetact.serve.base_app import BaseApp, json_response
from subnetact.serve.exchange import (
    Exchange,
    Headers,
    Refusal,
    read_json,
    refusal_of,
    send_reply,
    validated,
)
from subnetact.serve.limits import Limits
from subnetact.serve.openapi import model_schema, operation
from subnetact.serve.service import BaseService
from subnetact.serve.text_codec import TextCodec

__all__ = ["TextApp", "TextService", "build_text_app"]

MOST_ANSWERS = 16
NEUTRAL: Mapping[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_p": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "store": False,
    "suffix": "",
    "tools": [],
}
"""Fields that are not supported, each with the value that changes nothing, which is accepted."""
COUNTERS = {
    "requests": "Accepted requests.",
    "finished": "Requests that ended by a stop token or by their largest number of tokens.",
    "expired": "Requests whose tokens came too late.",
    "cancelled": "Requests whose clients left, or whose text ended.",
    "failed": "Requests whose step raised.",
    "tokens": "Generated tokens.",
    "late": "Tokens that came after they were due.",
    "lifted": "Steps that ran a more accurate subnet because one sequence demands it.",
}
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
"""The headers of a stream; nginx must not hold it back."""


class _Part(Strict):
    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """Leave out what is null; refuse what is not supported, unless it changes nothing."""
        if not isinstance(value, dict):
            return value
        given = {name: one for name, one in value.items() if one is not None}
        for name in NEUTRAL.keys() & given.keys() - cls.model_fields.keys():
            one, neutral = given.pop(name), NEUTRAL[name]
            if one != neutral or isinstance(one, bool) != isinstance(neutral, bool):
                raise ValueError(
                    f"{name}: this server supports no other value than {neutral!r}; leave it out"
                )
        return given


class _Terms(Strict):
    """What may be given as headers, too: `x-slo-ttft-ms` and so on."""

    slo_ttft_ms: float | None = Field(default=None, gt=0, description="time to the first token, in ms")
    deadline_ms: float | None = Field(default=None, gt=0, description="time to the last token, in ms")
    min_accuracy: float | None = Field(
        default=None, ge=0, le=100, description="minimum accuracy of the subnets, in percent"
    )


HEADERS = header_names(_Terms)


class StreamOptions(_Part):
    """What a stream has besides its text."""

    include_usage: bool = False


Stop = Annotated[str, Field(min_length=1, max_length=100)]


class _Body(_Terms, _Part):
    model_config = ConfigDict(json_schema_extra={"not": {"required": ["seed"]}})

    model: str | None = None
    max_tokens: int = Field(default=64, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int = Field(default=1, ge=1, le=MOST_ANSWERS, description="number of answers")
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = Field(default=None, description="ignored")

    def tokens(self, codec: TextCodec) -> list[int]:
        """Return the tokens of the prompt or of the chat."""
        raise NotImplementedError

    def top(self) -> int | None:
        """Return how many most likely tokens to tell, or None for no log-probabilities at all."""
        raise NotImplementedError


class CompletionBody(_Body):
    """The body of `/v1/completions`."""

    prompt: str | list[int] | Annotated[list[str], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | Literal[False] = Field(
        default=False, description="number of most likely tokens to tell with every token"
    )

    def tokens(self, codec: TextCodec) -> list[int]:
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], str)):
            return codec.prompt(prompt if isinstance(prompt, str) else prompt[0])
        return list(prompt)

    def top(self) -> int | None:
        return None if self.logprobs is False else self.logprobs


class TextPart(_Part):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Part):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class ChatBody(_Body):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)

    def tokens(self, codec: TextCodec) -> list[int]:
        texts = [
            one.content if isinstance(one.content, str) else "".join(part.text for part in one.content)
            for one in self.messages
        ]
        roles = [one.role for one in self.messages]
        return codec.chat([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])

    def top(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: give logprobs true with it")
        return self.top_logprobs if self.logprobs else None


class TextService(BaseService):
    """What the addresses of one text server share.

    Args:
        generator: generates tokens.
        codec: makes tokens of texts, and texts of tokens.
        name: name of the model.
        stop: tokens that end every answer.
        limits: what clients may send. If None, the defaults.
        tokens: the name of the client per token. If None, everybody may use the server.
    """

    def __init__(
        self,
        generator: Generator,
        codec: TextCodec,
        name: str,
        stop: Sequence[int],
        limits: Limits | None,
        tokens: Mapping[str, str] | None,
    ) -> None:
        super().__init__(limits, tokens)
        self.generator, self.codec, self.name, self.stop = generator, codec, name, tuple(stop)

    def unready(self) -> str:
        """Return why the server should get no requests: a step that hangs is one reason."""
        return super().unready() or ("" if self.generator.stats().up else "no step is computed")

    def prometheus(self) -> str:
        """Return the counts of the generator in Prometheus' text format."""
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Any]:
        """Yield the counts of the generator as families of `prometheus_client`."""
        stats, prefix = self.generator.stats(), "subnetact_generation_"
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(prefix + name, text, getattr(stats, name))
        steps = CounterMetricFamily(f"{prefix}steps", "Steps that each subnet ran.", labels=["subnet"])
        for i, count in stats.steps.items():
            steps.add_metric([self.generator.table.subnets[i]], count)
        yield steps
        yield GaugeMetricFamily(f"{prefix}active", "Requests under way.", stats.active)
        yield GaugeMetricFamily(f"{prefix}up", "Whether steps are computed, and none hangs.", stats.up)

    def error_document(self, refusal: Refusal, path: str) -> dict[str, Any]:  # noqa: ARG002
        """Return what a client is told in JSON, as OpenAI's interface has it."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "invalid_request_error" if refusal.status < 500 else "server_error"
        name = str(refusal).partition(":")[0].partition(".")[0]
        known = name in {*CompletionBody.model_fields, *ChatBody.model_fields, *NEUTRAL}
        error = {"message": str(refusal), "type": kinds.get(refusal.status, kind)}
        return {"error": {**error, "param": name if known else None, "code": refusal.kind}}

    def close(self, drain: bool = True) -> None:
        """Finish or drop accepted requests, and refuse new ones."""
        self.closing = True
        self.generator.close(wait=drain)
        super().close()


def build_text_app(
    generator: Generator,
    tokenizer: Any,
    *,
    name: str = "model",
    stop: Sequence[int] = (),
    limits: Limits | None = None,
    tokens: Mapping[str, str] | None = None,
    allowed_hosts: Sequence[str] | None = None,
) -> TextApp:
    """Make an application with the addresses of OpenAI's interface; `subnetact.serve.run` serves it.

    `POST /v1/completions` and `POST /v1/chat/completions` answer whole or as a stream of events. Their
    deadlines are fields of the body or headers: `x-slo-ttft-ms` (to the first token), `x-deadline-ms` (to the
    last one) and `x-min-accuracy`. Chats go through the chat template of the tokenizer if it has one.
    Otherwise every message becomes a line, `role: content`, and the last line is `assistant:`.

    Args:
        generator: generates tokens; the application closes it at its end.
        tokenizer: the tokenizer of `tokenizers` or `transformers`, or another object with `encode(text)` and
            `decode(tokens, skip_special_tokens=True)`. Texts of long requests are encoded on other threads,
            so that nobody waits for them.
        name: name of the model.
        stop: tokens that end every answer.
        limits: what clients may send. If None, the defaults.
        tokens: the name of the client per bearer token. If None, no token is needed.
        allowed_hosts: names by which clients may address the server. If None, any name.

    Returns:
        The application.

    Raises:
        ServeError: a token is too short.

    Example:
        >>> app = build_text_app(generator, AutoTokenizer.from_pretrained("my-model"))
        >>> subnetact.serve.run(app)
    """
    service = TextService(generator, TextCodec(tokenizer), name, stop, limits, tokens)
    return TextApp(service, allowed_hosts)


class TextApp(BaseApp):
    """The application of one text service: `/v1/completions`, `/v1/chat/completions` and `/v1/models`.

    Args:
        service: the service.
        allowed_hosts: names by which clients may address the server. If None, any name.
    """

    service: TextService

    def __init__(self, service: TextService, allowed_hosts: Sequence[str] | None = None) -> None:
        super().__init__(service, allowed_hosts)
        addresses: tuple[tuple[str, str, type[_Body]], ...] = (
            ("/v1/completions", "Continue a text", CompletionBody),
            ("/v1/chat/completions", "Continue a chat", ChatBody),
        )
        for path, summary, body in addresses:
            contents = {"application/json": {"schema": model_schema(body, self.schemas)}}
            self.post(path, partial(self._complete, body), operation(summary, contents, _Terms))
        model = {"id": service.name, "object": "model", "created": 0, "owned_by": "subnetact"}
        models = {"object": "list", "data": [model]}
        self.get("/v1/models", "Names of the models", lambda: json_response(models))

    async def _complete(self, body: type[_Body], exchange: Exchange) -> None:
        await self.service.exchange(
            exchange, partial(self._read, body, exchange.headers), partial(self._send, exchange)
        )

    def _read(
        self, body: type[_Body], headers: Headers, raw: bytes
    ) -> tuple[_Body, list[int], dict[str, Any]]:
        """Return the body of a request, the tokens of its prompt, and the arguments of `submit`."""
        service = self.service
        ask = validated(body.model_validate, read_json(raw))
        terms = validated(_Terms.model_validate_strings, header_values(HEADERS, headers))
        if ask.model not in (None, service.name):
            raise Refusal(404, "model_not_found", f"model: this server has {service.name!r}")
        options: dict[str, Any] = {
            "max_new_tokens": ask.max_completion_tokens or ask.max_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k,
            "stop": service.stop,
        }
        renamed = {"slo_ttft_ms": "first_ms", "deadline_ms": "deadline_ms", "min_accuracy": "min_accuracy"}
        for name, option in renamed.items():
            value = getattr(terms, name) if getattr(ask, name) is None else getattr(ask, name)
            if value is not None:
                if value > service.limits.deadline_ms:
                    raise too_long(name, value, service.limits.deadline_ms)
                options[option] = value
        if ask.top() is not None:
            if "logprobs" not in inspect.signature(service.generator.submit).parameters:
                raise InvalidRequest("logprobs: this generator tells no log-probabilities; leave it out")
            options["logprobs"] = ask.top()
        return ask, ask.tokens(service.codec), options

    async def _send(self, exchange: Exchange, asked: tuple[_Body, list[int], dict[str, Any]]) -> None:
        ask, prompt, options = asked
        answer = _Answer(self.service, ask, prompt)
        try:
            answer.begin(prompt, options)
            if not ask.stream:
                return await send_reply(exchange.send, 200, await answer.whole())
            events = answer.events()
            piece = await anext(events)  # A refusal before the first token has a status of its own.
            await exchange.send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            while piece:
                await exchange.send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await anext(events, b"")
            return await exchange.send({"type": "http.response.body", "body": b""})
        finally:
            for choice in answer.choices:
                choice.completion.cancel()  # Nothing happens if it has ended.


@dataclass
class _Piece:
    """The next part of one choice: its text, its tokens with their log-probabilities, and why it ends."""

    index: int
    text: str
    logprobs: list[tuple[int, float, Sequence[tuple[int, float]]]]
    finish: str | None


@dataclass
class _Choice:
    """One of the answers to a request, as its tokens come."""

    index: int
    service: TextService
    completion: Completion
    stops: Sequence[str]
    tells: bool  # log-probabilities
    read: int = 0  # tokens
    held: str = ""  # the last characters, which may be the beginning of a text that ends the answer

    def __post_init__(self) -> None:
        self._writer = self.service.codec.writer()

    def next(self) -> _Piece | None:
        """Return what has come since the last call, or None.

        Raises:
            RequestError: the request failed.
        """
        outcome: Generated | None = self.completion.result(0.0) if self.completion.done else None
        piece = _Piece(self.index, "", [], None)
        found: Any = self.completion
        told = found.logprobs(self.read) if self.tells else ()
        # Token by token, so that the end does not depend on how many of them come at once.
        for at, token in enumerate(self.completion.tokens(self.read)):
            self.read += 1
            if self.tells:
                piece.logprobs.append((token, *told[at]))
            if token in self.service.stop:  # It is the last one.
                continue
            if self._show(self._writer(token), piece):
                return piece
        if outcome is not None:
            piece.text += self.held
            piece.finish = "length" if outcome.finish == "length" else "stop"
        return piece if piece.text or piece.finish else None

    def _show(self, new: str, piece: _Piece) -> bool:
        """Show what can be shown of held back and new text; return whether a text of `stop` ends it."""
        text = self.held + new
        ends = [found for stop in self.stops if (found := text.find(stop)) >= 0]
        if ends:
            piece.text, piece.finish = piece.text + text[: min(ends)], "stop"
            self.completion.cancel()
            return True
        longest = max(map(len, self.stops), default=1) - 1
        kept = next(
            (n for n in range(min(longest, len(text)), 0, -1) if text[-n:] in {s[:n] for s in self.stops}), 0
        )
        piece.text, self.held = piece.text + text[: len(text) - kept], text[len(text) - kept :]
        return False


class _Answer:
    """The answer to one request, as OpenAI's interface writes it."""

    def __init__(self, service: TextService, ask: _Body, prompt: Sequence[int]) -> None:
        self._service, self._ask, self._prompt = service, ask, len(prompt)
        self._chat = isinstance(ask, ChatBody)
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self.choices: list[_Choice] = []
        kind = "chat.completion" if self._chat else "text_completion"
        self._facts = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if self._chat and ask.stream else kind,
            "created": int(time.time()),
            "model": service.name,
        }

    def begin(self, prompt: list[int], options: dict[str, Any]) -> None:
        """Submit a request for every choice."""
        stops = [self._ask.stop] if isinstance(self._ask.stop, str) else self._ask.stop
        for index in range(self._ask.n):
            completion = self._service.generator.submit(prompt, **options)
            self.choices.append(_Choice(index, self._service, completion, stops, "logprobs" in options))
            completion.listen(partial(self._tell, completion))

    def _tell(self, completion: Completion) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:  # The loop has ended, and with it the client.
            completion.cancel()

    async def _pieces(self) -> AsyncIterator[_Piece]:
        """Yield what comes, of any choice, until all have ended."""
        left = list(self.choices)
        while left:
            await self._news.wait()
            self._news.clear()
            for choice in list(left):
                piece = choice.next()
                if piece is not None:
                    if piece.finish is not None:
                        left.remove(choice)
                    yield piece

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        found = [_Piece(choice.index, "", [], None) for choice in self.choices]
        async for piece in self._pieces():
            one = found[piece.index]
            one.text, one.finish = one.text + piece.text, piece.finish
            one.logprobs += piece.logprobs
        choices = [{**self._choice(one), **self._text(one, "message", True)} for one in found]
        return {**self._facts, "choices": choices, **self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer piece by piece."""
        begun: set[int] = set()
        try:
            async for piece in self._pieces():
                text = self._text(piece, "delta", piece.index not in begun)
                begun.add(piece.index)
                yield self._event({"choices": [{**self._choice(piece), **text}]})
        except RequestError as error:
            refusal = refusal_of(error)
            if not begun:
                raise
            yield b"data: %s\n\n" % orjson.dumps(self._service.error_document(refusal, ""))
        else:
            if self._ask.stream_options.include_usage:
                yield self._event({"choices": [], **self._usage()})
        yield b"data: [DONE]\n\n"

    def _event(self, document: Mapping[str, Any]) -> bytes:
        return b"data: %s\n\n" % orjson.dumps({**self._facts, **document})

    def _text(self, piece: _Piece, name: str, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        return {name: {**role, "content": piece.text}} if self._chat else {"text": piece.text}

    def _choice(self, piece: _Piece) -> dict[str, Any]:
        told = self._logprobs(piece) if self.choices[piece.index].tells else None
        return {"index": piece.index, "finish_reason": piece.finish, "logprobs": told}

    def _logprobs(self, piece: _Piece) -> dict[str, Any]:
        def told(token: int, value: float) -> dict[str, Any]:
            text = self._service.codec.text([token])
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        tokens = [
            {**told(token, value), "top_logprobs": [told(*one) for one in top]}
            for token, value, top in piece.logprobs
        ]
        if self._chat:
            return {"content": tokens, "refusal": None}
        tops = [{one["token"]: one["logprob"] for one in found["top_logprobs"]} for found in tokens]
        return {
            "tokens": [one["token"] for one in tokens],
            "token_logprobs": [one["logprob"] for one in tokens],
            "top_logprobs": tops,
        }

    def _usage(self) -> dict[str, Any]:
        answer = sum(choice.read for choice in self.choices)
        usage = {"prompt_tokens": self._prompt, "completion_tokens": answer}
        return {"usage": {**usage, "total_tokens": self._prompt + answer}}
