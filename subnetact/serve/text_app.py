"""The addresses of OpenAI's interface in front of a generator: completions and chats, whole or streamed."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from subnetact.errors import InvalidRequest, RequestError
from subnetact.generation import Completion, Generated, Generator
from subnetact.serve.access import Access
from subnetact.serve.ask import read_number, shortened, time_ms
from subnetact.serve.base_app import BaseApp
from subnetact.serve.exchange import (
    SHORT,
    Bodies,
    Exchange,
    Headers,
    Refusal,
    read_body,
    read_json,
    refusal_of,
    send_reply,
)
from subnetact.serve.limits import Limits
from subnetact.serve.service import Attendance
from subnetact.serve.text_codec import TextCodec

__all__ = ["TextApp", "TextService", "build_text_app"]

LONGEST_STOP = 100
FIELDS: Mapping[str, tuple[type, ...]] = {
    "model": (str,),
    "max_tokens": (int,),
    "max_completion_tokens": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "stop": (str, list),
    "stream": (bool,),
    "stream_options": (dict,),
    "user": (str,),
    "deadline_ms": (int, float),
    "slo_ttft_ms": (int, float),
    "min_accuracy": (int, float),
}
"""The types of the fields that both addresses understand; `user` is ignored. No truth value is a number."""
WORDS: Mapping[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "min_p": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "store": False,
    "suffix": "",
    "tools": [],
    "top_logprobs": 0,
}
"""Fields that are not supported, each with the value that changes nothing, which is accepted."""
NUMBERS_OF_HEADERS = ("slo_ttft_ms", "deadline_ms", "min_accuracy")
ROLES = ("system", "developer", "user", "assistant")


@dataclass
class TextService:
    """What the addresses of one text server share.

    Attributes:
        generator: generates tokens.
        codec: makes tokens of texts, and texts of tokens.
        name: name of the model.
        stop: tokens that end every answer.
        limits: what clients may send.
        access: who may use the server.
        closing: whether the server is about to end.
    """

    generator: Generator
    codec: TextCodec
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
    access = Access(tokens or {}, allowed_hosts)
    codec = TextCodec(tokenizer)
    return TextApp(TextService(generator, codec, name, tuple(stop), limits or Limits(), access))


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
            if not service.generator.stats().up:
                return JSONResponse({"status": "no step is computed"}, 503)
            return JSONResponse({"status": "ok"})

        @self.get("/v1/models", summary="Names of the models")
        async def models() -> JSONResponse:
            model = {"id": service.name, "object": "model", "created": 0, "owned_by": "subnetact"}
            return JSONResponse({"object": "list", "data": [model]})

        @self.get("/metrics", response_class=PlainTextResponse, summary="Metrics in Prometheus' text format")
        async def metrics() -> PlainTextResponse:
            return PlainTextResponse(_prometheus(service), media_type="text/plain; version=0.0.4")

    async def _complete(self, chat: bool, exchange: Exchange) -> None:
        answer = None
        try:
            body = await self._body(exchange)
            with Attendance(exchange.receive):
                ask = await self._asked(body, exchange.headers, chat)
                answer = _Answer(self.service, ask, chat, next(self._numbers))
                # A refusal before the first token has a status of its own.
                first, finish = await (answer.first() if ask.stream else answer.rest())
            if ask.stream:
                events = StreamingResponse(answer.events(first, finish), media_type="text/event-stream")
                await events(exchange.scope, exchange.receive, exchange.send)
            else:
                await send_reply(exchange.send, 200, answer.document(first, finish))
        except BaseException:
            if answer is not None:
                answer.completion.cancel()  # Nobody reads it.
            raise

    async def _body(self, exchange: Exchange) -> bytes:
        service, limits = self.service, self.service.limits
        return await read_body(
            exchange.receive, exchange.headers, limits.body_for(0), limits.body_s, service.bodies
        )

    async def _asked(self, body: bytes, headers: Headers, chat: bool) -> _Ask:
        try:
            if len(body) <= SHORT:
                return _ask(self.service, body, headers, chat)
            return await asyncio.to_thread(_ask, self.service, body, headers, chat)
        finally:
            self.service.bodies.give_back(len(body))


@dataclass
class _Ask:
    """One request, checked."""

    prompt: list[int]
    options: dict[str, Any]
    stop: tuple[str, ...]
    stream: bool
    usage: bool


def _ask(service: TextService, body: bytes, headers: Headers, chat: bool) -> _Ask:
    given = _fields(read_json(body, most=None), headers, "messages" if chat else "prompt")
    if given.get("model", service.name) != service.name:
        raise Refusal(404, "NotFound", f"model: this server has {service.name!r}")
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > 4 or not all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in stop):
        raise InvalidRequest(f"stop: give at most four texts of 1 to {LONGEST_STOP} characters")
    extras = given.get("stream_options", {})
    if not extras.keys() <= {"include_usage"} or type(extras.get("include_usage", False)) is not bool:
        raise InvalidRequest("stream_options: give an object with include_usage, true or false")
    longest_ms = service.limits.deadline_ms
    options: dict[str, Any] = {
        "max_new_tokens": given.get("max_completion_tokens", given.get("max_tokens", 64)),
        "temperature": given.get("temperature"),
        "top_p": given.get("top_p"),
        "top_k": given.get("top_k"),
        "min_accuracy": given.get("min_accuracy", 0.0),
        "stop": service.stop,
    }
    for name, option in (("slo_ttft_ms", "first_ms"), ("deadline_ms", "deadline_ms")):
        if name in given:
            options[option] = time_ms(given[name], name, longest_ms)
    prompt = _chat(service, given) if chat else _prompt(service, given)
    return _Ask(prompt, options, tuple(stop), given.get("stream", False), extras.get("include_usage", False))


def _fields(document: Any, headers: Headers, text: str) -> dict[str, Any]:
    """Return the fields of a request that are not null, with numbers from headers, each of its type.

    Args:
        document: the body.
        headers: the headers.
        text: the field that has the text, which another function checks.
    """
    if not isinstance(document, dict):
        raise InvalidRequest(f"body: expected a JSON object, got {type(document).__name__}")
    given = {name: value for name, value in document.items() if value is not None}
    for name in NUMBERS_OF_HEADERS:
        header = f"x-{name.replace('_', '-')}"
        number = headers.get(header.encode())
        if number is not None and name not in given:
            given[name] = read_number(number, header)
    for name, value in given.items():
        if name in NEUTRAL:
            neutral = NEUTRAL[name]
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
                raise InvalidRequest(
                    f"{name}: got {shortened(value)}, and this server supports no other value than "
                    f"{json.dumps(neutral)}; leave it out"
                )
        elif name in FIELDS:
            if type(value) not in FIELDS[name]:
                wanted = " or ".join(WORDS[kind] for kind in FIELDS[name])
                raise InvalidRequest(f"{name}: got {shortened(value)}; give {wanted}")
        elif name != text:
            raise InvalidRequest(
                f"{shortened(name)}: this server does not support it; remove it from the request"
            )
    return given


def _prompt(service: TextService, given: Mapping[str, Any]) -> list[int]:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise InvalidRequest("prompt: expected one text or a list of token ids")
    return service.codec.prompt(prompt)


def _chat(service: TextService, given: Mapping[str, Any]) -> list[int]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages: expected a list of at least one message")
    return service.codec.chat([_message(message, at) for at, message in enumerate(messages)])


def _message(message: Any, position: int) -> dict[str, str]:
    """Return a message with its role and its content, which may come in parts."""
    if not isinstance(message, dict):
        raise InvalidRequest(f"messages: message {position} is no object with role and content")
    given = {name: value for name, value in message.items() if value is not None}
    role, content = given.pop("role", None), given.pop("content", None)
    if role not in ROLES:
        raise InvalidRequest(f"messages: the role of message {position} must be one of {', '.join(ROLES)}")
    if isinstance(content, list):
        texts = [part["text"] if _is_text_part(part) else None for part in content]
        content = "".join(map(str, texts)) if None not in texts else None
    if not isinstance(content, str):
        raise InvalidRequest(f"messages: message {position} has no text as its content")
    if given:
        raise InvalidRequest(
            f"messages: message {position} has {shortened(min(given))}, which this server does not support"
        )
    return {"role": role, "content": content}


def _is_text_part(part: Any) -> bool:
    text = isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"
    return text and isinstance(part["text"], str)


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
        self._writer, self._read = service.codec.writer(), 0
        self._held = ""  # the last characters, which may be the beginning of a text that ends the answer
        self.completion: Completion = service.generator.submit(ask.prompt, **ask.options)
        self.completion.listen(self._tell)

    def _tell(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:  # The loop has ended, and with it the client.
            self.completion.cancel()

    async def first(self) -> tuple[str, str | None]:
        """Wait for the first piece of text, or for the end, and return it with why the answer ends."""
        return await self._next()

    async def rest(self) -> tuple[str, str | None]:
        """Wait for the end, and return the text that was not returned yet, and why the answer ends."""
        pieces, finish = [], None
        while finish is None:
            piece, finish = await self._next()
            pieces.append(piece)
        return "".join(pieces), finish

    def document(self, text: str, finish: str | None) -> dict[str, Any]:
        """Return the whole answer.

        Args:
            text: its text.
            finish: why it ended.
        """
        return {**self._facts, "choices": [self._choice(text, finish, False)], **self._usage()}

    async def events(self, piece: str, finish: str | None) -> AsyncIterator[str]:
        """Yield the answer piece by piece.

        Args:
            piece: the first piece.
            finish: why the answer ends with it, or None.
        """
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
            piece, ended = self._written()
            if not ended and outcome is not None:
                more, ended = self._shown(self._writer.end(), last=True)
                piece += more
            if ended:
                self.completion.cancel()
                return piece, "stop"
            if outcome is not None:
                return piece, "length" if outcome.finish == "length" else "stop"
            if piece:
                return piece, None

    def _written(self) -> tuple[str, bool]:
        """Return the text of the tokens that have come, and whether a text of `stop` ends it.

        Token by token, so that the end does not depend on how many of them come at once.
        """
        pieces = []
        for token in self.completion.tokens(self._read):
            self._read += 1
            if token in self._service.stop:  # It is the last one.
                continue
            piece, ended = self._shown(self._writer.add(token))
            pieces.append(piece)
            if ended:
                return "".join(pieces), True
        return "".join(pieces), False

    def _shown(self, text: str, last: bool = False) -> tuple[str, bool]:
        """Return what can be shown of held back and new text, and whether a text of `stop` ends it."""
        text = self._held + text
        ends = [found for stop in self._ask.stop if (found := text.find(stop)) >= 0]
        if ends:
            return text[: min(ends)], True
        kept = 0 if last else _held_back(text, self._ask.stop)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], False

    def _choice(self, text: str, finish: str | None, streamed: bool) -> dict[str, Any]:
        reason = {"index": 0, "finish_reason": finish, "logprobs": None}
        if not self._chat:
            return {"text": text, **reason}
        return {"delta" if streamed else "message": {"role": "assistant", "content": text}, **reason}

    def _usage(self) -> dict[str, Any]:
        prompt, answer = len(self._ask.prompt), self._read
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


def _prometheus(service: TextService) -> str:
    stats = service.generator.stats()
    lines = []
    for name in ("requests", "finished", "expired", "cancelled", "failed", "tokens", "late", "lifted"):
        lines += [f"# TYPE subnetact_generation_{name}_total counter"]
        lines += [f"subnetact_generation_{name}_total {getattr(stats, name)}"]
    lines += ["# TYPE subnetact_generation_steps_total counter"]
    keys = service.generator.table.subnets
    lines += [f'subnetact_generation_steps_total{{subnet="{keys[i]}"}} {n}' for i, n in stats.steps.items()]
    lines += ["# TYPE subnetact_generation_active gauge", f"subnetact_generation_active {stats.active}"]
    lines += ["# TYPE subnetact_generation_up gauge", f"subnetact_generation_up {int(stats.up)}"]
    return "\n".join(lines) + "\n"
