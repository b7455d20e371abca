"""The addresses of OpenAI's interface in front of a generator: completions and chats, whole or streamed."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from subnetact.errors import InvalidRequest, RequestError
from subnetact.generation import Completion, Generated, Generator
from subnetact.serve.access import Access
from subnetact.serve.base_app import BaseApp
from subnetact.serve.exchange import (
    Bodies,
    ClientGone,
    Exchange,
    Headers,
    Receive,
    Refusal,
    read_body,
    refusal_of,
    send_reply,
)
from subnetact.serve.json_text import SHORT
from subnetact.serve.limits import Limits

__all__ = ["TextApp", "TextService", "build_text_app"]

UNFINISHED = "\ufffd"
"""What decoders write for bytes that are no character yet."""
LONGEST_STOP = 100
KNOWN = {
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "stream",
    "stream_options",
    "n",
    "user",
    "deadline_ms",
    "slo_ttft_ms",
    "min_accuracy",
}
"""Fields that are understood; `user` is ignored."""


@dataclass
class TextService:
    """What the addresses of one text server share.

    Attributes:
        generator: generates tokens.
        encode: a function from a text to its tokens.
        decode: a function from tokens to their text.
        name: name of the model.
        stop: tokens that end every answer.
        limits: what clients may send.
        access: who may use the server.
        closing: whether the server is about to end.
    """

    generator: Generator
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    name: str
    stop: tuple[int, ...]
    limits: Limits
    access: Access
    closing: bool = False

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.limits.bodies_bytes)
        self.batcher = _Closing(self.generator)


class _Closing:
    """The generator as what the server closes at its end."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def close(self, drain: bool = True) -> None:
        self._generator.close(wait=drain)


def build_text_app(
    generator: Generator,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
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
    last one) and `x-min-accuracy`. Messages of chats are joined with line breaks, because the network need
    not know any format of chats: encode them yourself if yours does.

    Args:
        generator: generates tokens; the application closes it at its end.
        encode: a function from a text to its tokens. Texts of long requests are encoded on other threads, so
            that nobody waits for them.
        decode: a function from tokens to their text.
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
        >>> app = build_text_app(generator, lambda text: tokenizer.encode(text).ids, tokenizer.decode)
        >>> subnetact.serve.run(app)
    """
    access = Access(tokens or {}, allowed_hosts)
    return TextApp(TextService(generator, encode, decode, name, tuple(stop), limits or Limits(), access))


class TextApp(BaseApp):
    """The application of one text service.

    Args:
        service: the service.

    Attributes:
        service: the service.
    """

    service: TextService

    def __init__(self, service: TextService) -> None:
        super().__init__(service, service.generator.close)
        self._numbers = itertools.count()
        self.inference = {
            "/v1/completions": partial(self._complete, False),
            "/v1/chat/completions": partial(self._complete, True),
        }
        self._add_routes()

    def error_document(self, refusal: Refusal, path: str) -> dict[str, Any]:  # noqa: ARG002
        """Return what a client is told in JSON.

        Args:
            refusal: the error.
            path: the address.
        """
        return {"error": _error(refusal)}

    def _add_routes(self) -> None:
        service = self.service

        @self.get("/healthz", summary="Whether the server should get requests")
        @self.get("/readyz", summary="Whether the server should get requests")
        async def healthz() -> JSONResponse:
            if service.closing:
                return JSONResponse({"status": "closing"}, 503)
            return JSONResponse({"status": "ok"})

        @self.get("/v1/models", summary="Names of the models")
        async def models() -> JSONResponse:
            model = {"id": service.name, "object": "model", "created": 0, "owned_by": "subnetact"}
            return JSONResponse({"object": "list", "data": [model]})

        @self.get("/metrics", response_class=PlainTextResponse, summary="Metrics in Prometheus' text format")
        async def metrics() -> PlainTextResponse:
            return PlainTextResponse(_prometheus(service), media_type="text/plain; version=0.0.4")

    async def _complete(self, chat: bool, exchange: Exchange) -> None:
        headers, receive = exchange.headers, exchange.receive
        service, limits = self.service, self.service.limits
        body = await read_body(receive, headers, limits.body_for(0), limits.body_s, service.bodies)
        try:
            if len(body) <= SHORT:
                ask = _ask(service, body, headers, chat)
            else:
                ask = await asyncio.to_thread(_ask, service, body, headers, chat)
        finally:
            service.bodies.give_back(len(body))
        answer = _Answer(service, ask, chat, next(self._numbers))
        if ask.stream:
            first = await answer.first()  # A refusal before the first token has a status of its own.
            response = StreamingResponse(answer.events(first), media_type="text/event-stream")
            await response(exchange.scope, receive, exchange.send)
            return
        leaving = asyncio.ensure_future(_left(receive))
        working = asyncio.ensure_future(answer.whole())
        await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not working.done():
            answer.completion.cancel()
            working.cancel()
            raise ClientGone
        await send_reply(exchange.send, 200, working.result())


@dataclass
class _Ask:
    """One request, checked."""

    prompt: list[int]
    options: dict[str, Any]
    stop: tuple[str, ...]
    stream: bool
    usage: bool


def _ask(service: TextService, body: bytes, headers: Headers, chat: bool) -> _Ask:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest("body: it is no JSON object; see /openapi.json of OpenAI's interface") from None
    if not isinstance(given, dict):
        raise InvalidRequest(f"body: expected a JSON object, got {type(given).__name__}")
    given = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(set(given) - KNOWN)
    if unknown:
        raise InvalidRequest(f"{unknown[0]}: this server does not support it; remove it from the request")
    if given.get("model", service.name) != service.name:
        raise Refusal(404, "NotFound", f"model: this server has {service.name!r}")
    if given.get("n", 1) != 1:
        raise InvalidRequest("n: this server gives one answer per request; send the request again")
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    short = isinstance(stop, list) and len(stop) <= 4
    if not short or not all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in stop):
        raise InvalidRequest(f"stop: give at most four texts of 1 to {LONGEST_STOP} characters")
    stream, extras = given.get("stream", False), given.get("stream_options", {})
    if not isinstance(stream, bool) or not isinstance(extras, dict):
        raise InvalidRequest("stream: true or false; stream_options: an object")
    options: dict[str, Any] = {
        "max_new_tokens": given.get("max_completion_tokens", given.get("max_tokens", 64)),
        "temperature": given.get("temperature"),
        "top_p": given.get("top_p"),
        "top_k": given.get("top_k"),
        "first_ms": _time(given, headers, "slo_ttft_ms"),
        "deadline_ms": _time(given, headers, "deadline_ms"),
        "min_accuracy": _time(given, headers, "min_accuracy") or 0.0,
        "stop": service.stop,
    }
    usage = bool(extras.get("include_usage"))
    return _Ask(_prompt(service, given, chat), options, tuple(stop), stream, usage)


def _prompt(service: TextService, given: Mapping[str, Any], chat: bool) -> list[int]:
    if not chat:
        prompt = given.get("prompt")
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise InvalidRequest("prompt: expected one text or a list of token ids")
        return _encoded(service, prompt, "prompt")
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages: expected a list of at least one message")
    texts = []
    for position, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
        if not isinstance(content, str):
            raise InvalidRequest(f"messages: message {position} has no text as its content")
        texts.append(content)
    return _encoded(service, "\n".join(texts), "messages")


def _encoded(service: TextService, text: str, name: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can write one half of a pair of surrogates.
        raise InvalidRequest(f"{name}: the text has half a character, such as \\ud800; remove it") from None
    return list(service.encode(text))


def _time(given: Mapping[str, Any], headers: Headers, name: str) -> float | None:
    """Return a number from a field of the body, or from the header of that name."""
    if name in given:
        number: float = given[name]
        return number
    text = headers.get(b"x-" + name.replace("_", "-").encode())
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"x-{name.replace('_', '-')}: {text[:40]!r} is no number") from None


class _Answer:
    """The answer to one request, as OpenAI's interface writes it."""

    def __init__(self, service: TextService, ask: _Ask, chat: bool, number: int) -> None:
        self._service, self._ask, self._chat = service, ask, chat
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        kind = "chat.completion" if chat else "text_completion"
        self._facts = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
            "object": f"{kind}.chunk" if chat and ask.stream else kind,
            "created": int(time.time()),
            "model": service.name,
        }
        self._shown = ""
        self.completion: Completion = service.generator.submit(ask.prompt, **ask.options)
        self.completion.listen(self._tell)

    def _tell(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:  # The loop has ended, and with it the client.
            self.completion.cancel()

    async def first(self) -> tuple[str, str | None]:
        """Wait for the first piece of text, or for the end."""
        return await self._next()

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        finish = None
        while finish is None:
            _, finish = await self._next()
        return {**self._facts, "choices": [self._choice(self._shown, finish, False)], **self._usage()}

    async def events(self, first: tuple[str, str | None]) -> AsyncIterator[str]:
        """Yield the answer piece by piece.

        Args:
            first: what `first` returned.
        """
        piece, finish = first
        try:
            while True:
                if piece or finish is not None:
                    yield _event({**self._facts, "choices": [self._choice(piece, finish, True)]})
                if finish is not None:
                    break
                try:
                    piece, finish = await self._next()
                except RequestError as error:
                    refusal = refusal_of(error)
                    yield _event({"error": _error(refusal)})
                    break
            if self._ask.usage:
                yield _event({**self._facts, "choices": [], **self._usage()})
            yield "data: [DONE]\n\n"
        finally:
            self.completion.cancel()  # Nothing happens if it has ended.

    async def _next(self) -> tuple[str, str | None]:
        """Return the next piece of text, and why the answer ends if it does."""
        while True:
            await self._news.wait()
            self._news.clear()
            done = self.completion.done
            outcome: Generated | None = self.completion.result(0.0) if done else None
            tokens = list(self.completion.tokens())
            if tokens and tokens[-1] in self._service.stop:
                tokens.pop()
            text = self._service.decode(tokens) if tokens else ""
            ends = [found for stop in self._ask.stop if (found := text.find(stop)) >= 0]
            finish = None
            if ends:
                text, finish = text[: min(ends)], "stop"
                self.completion.cancel()
            elif outcome is not None:
                finish = "length" if outcome.finish == "length" else "stop"
            else:
                text = text.rstrip(UNFINISHED)
                text = text[: len(text) - _held_back(text, self._ask.stop)]
            piece = text[len(self._shown) :]
            self._shown = text
            if piece or finish is not None:
                return piece, finish

    def _choice(self, text: str, finish: str | None, streamed: bool) -> dict[str, Any]:
        reason = {"index": 0, "finish_reason": finish, "logprobs": None}
        if not self._chat:
            return {"text": text, **reason}
        return {"delta" if streamed else "message": {"role": "assistant", "content": text}, **reason}

    def _usage(self) -> dict[str, Any]:
        prompt, answer = len(self._ask.prompt), len(self.completion.tokens())
        usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        return {"usage": usage}


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Return how many last characters may be the beginning of a text that ends the answer."""
    longest = max(map(len, stops), default=0)
    for count in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-count:]) for stop in stops):
            return count
    return 0


def _event(document: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def _error(refusal: Refusal) -> dict[str, Any]:
    kind = "invalid_request_error" if refusal.status < 500 and refusal.status != 429 else "server_error"
    return {"message": str(refusal), "type": kind, "param": None, "code": refusal.kind}


async def _left(receive: Receive) -> None:
    """Wait until the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _prometheus(service: TextService) -> str:
    stats = service.generator.stats()
    lines = []
    for name in ("requests", "finished", "expired", "cancelled", "failed", "tokens", "late"):
        lines += [f"# TYPE subnetact_generation_{name}_total counter"]
        lines += [f"subnetact_generation_{name}_total {getattr(stats, name)}"]
    lines += ["# TYPE subnetact_generation_steps_total counter"]
    keys = service.generator.table.subnets
    lines += [f'subnetact_generation_steps_total{{subnet="{keys[i]}"}} {n}' for i, n in stats.steps.items()]
    lines += ["# TYPE subnetact_generation_active gauge", f"subnetact_generation_active {stats.active}"]
    return "\n".join(lines) + "\n"
