"""The answer to one request of OpenAI's interface: its choices, as their tokens come, whole or as events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any, NamedTuple

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from subnetact.errors import RequestError
from subnetact.generation import Completion, Generator
from subnetact.serve.exchange import refusal_of
from subnetact.serve.text_bodies import ChatBody, TextBody, error_document
from subnetact.serve.text_codec import TextCodec


class TextService(NamedTuple):
    """A generator, the texts of its tokens, its name, and the tokens that end every answer."""

    generator: Generator
    codec: TextCodec
    name: str
    stop: tuple[int, ...]


class Choice:
    """One of the answers to a request; what has come of it and was not taken yet is in its attributes."""

    def __init__(self, index: int, completion: Completion, service: TextService, body: TextBody) -> None:
        self.index, self.completion = index, completion
        self._write = service.codec.writer()
        self._ends = {*service.stop, *service.generator.end_tokens}
        self._stops = [body.stop] if isinstance(body.stop, str) else body.stop
        self.tells, self._phased = body.likely() is not None, body.phases is not None
        self.read = 0  # tokens
        self._held = ""  # the last characters, which may be the beginning of a text that ends the answer
        self.text, self.finish = "", ""
        self.cache: dict[str, str] = {}  # told with the end of an answer in phases
        self.told: list[tuple[int, Any]] = []  # tokens with their log-probabilities
        self.offset = 0  # characters of the tokens that were told

    def follow(self) -> bool:
        """Read what has come, token by token however many come at once; return whether to take anything."""
        outcome = self.completion.result(0.0) if self.completion.done else None
        tokens = self.completion.tokens(self.read)
        told = self.completion.logprobs(self.read) if self.tells else ()
        for at, token in enumerate(tokens):
            self.read += 1
            if self.tells:
                self.told.append((token, told[at]))
            if token not in self._ends:
                self._show(self._write(token))
            if self.finish:
                return True
        if outcome is not None:
            self.text += self._held
            self.finish = "length" if outcome.finish == "length" else "stop"
            self.cache = {"cache": outcome.cache} if self._phased else {}
        return bool(self.text or self.finish or self.told)

    def _show(self, new: str) -> None:
        """Show what can be shown of held back and new text, up to a text of `stop`, which ends the answer."""
        text = self._held + new
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.text, self.finish = self.text + text[: min(found)], "stop"
            self.completion.cancel()
            return
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        kept = next((n for n in range(longest, 0, -1) if text[-n:] in {s[:n] for s in self._stops}), 0)
        self.text, self._held = self.text + text[: len(text) - kept], text[len(text) - kept :]


class TextAnswer:
    """The answer to one request, whose `n` choices are requests of their own to the generator."""

    def __init__(
        self, service: TextService, body: TextBody, prompt: list[int], options: dict[str, Any]
    ) -> None:
        self.body, self._service, self._prompt = body, service, len(prompt)
        self._chat = isinstance(body, ChatBody)
        self._news = asyncio.Event()
        kind = "chat.completion" if self._chat else "text_completion"
        self._facts = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if self._chat and body.stream else kind,
            "created": int(time.time()),
            "model": service.name,
        }
        self._choices: list[Choice] = []
        try:
            for index in range(body.n):
                completion = service.generator.submit(prompt, **options)
                self._choices.append(Choice(index, completion, service, body))
                completion.watch(self._news)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Stop what nobody reads; nothing happens to what has ended."""
        for choice in self._choices:
            choice.completion.cancel()

    async def _ready(self) -> AsyncIterator[Choice]:
        """Yield choices of which something can be taken, until all have ended."""
        while not all(choice.finish for choice in self._choices):
            await self._news.wait()
            self._news.clear()
            for choice in self._choices:
                if not choice.finish and choice.follow():
                    yield choice

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        async for _ in self._ready():
            pass
        choices = [self._taken(choice, "message", {"role": "assistant"}) for choice in self._choices]
        return {**self._facts, "choices": choices, **self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer piece by piece; an error before the first piece is raised."""
        begun: set[int] = set()
        try:
            async for choice in self._ready():
                role = {} if choice.index in begun else {"role": "assistant"}
                begun.add(choice.index)
                yield _event({**self._facts, "choices": [self._taken(choice, "delta", role)]})
            if self.body.stream_options.include_usage:
                yield _event({**self._facts, "choices": [], **self._usage()})
        except RequestError as error:
            if not begun:
                raise
            yield _event(error_document(refusal_of(error)))
        yield b"data: [DONE]\n\n"

    def _taken(self, choice: Choice, name: str, role: dict[str, str]) -> dict[str, Any]:
        """Return what has come of a choice, and take it."""
        facts = {
            "index": choice.index,
            "finish_reason": choice.finish or None,
            "logprobs": self._logprobs(choice) if choice.tells else None,
            **choice.cache,
        }
        text, choice.text, choice.told = choice.text, "", []
        return {**facts, **({name: {**role, "content": text}} if self._chat else {"text": text})}

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        def one(token: int, value: float) -> dict[str, Any]:
            text = self._service.codec.text([token])
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        tokens = [
            {**one(token, found.own), "top_logprobs": [one(*other) for other in found.likely]}
            for token, found in choice.told
        ]
        if self._chat:
            return {"content": tokens}
        tops = [{other["token"]: other["logprob"] for other in found["top_logprobs"]} for found in tokens]
        names = [found["token"] for found in tokens]
        *offsets, choice.offset = accumulate(map(len, names), initial=choice.offset)
        return {
            "tokens": names,
            "token_logprobs": [found["logprob"] for found in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _usage(self) -> dict[str, Any]:
        read, count = self._prompt, sum(choice.read for choice in self._choices)
        return {"usage": {"prompt_tokens": read, "completion_tokens": count, "total_tokens": read + count}}


class EventStream(StreamingResponse):
    """The events of an answer, the first of which is there; a client that leaves ends the answer."""

    def __init__(self, answer: TextAnswer, first: bytes, later: AsyncIterator[bytes]) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield first
            async for piece in later:
                yield piece

        # nginx passes events on at once.
        headers = {"x-accel-buffering": "no", "cache-control": "no-cache"}
        super().__init__(pieces(), headers=headers, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()


def _event(document: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % orjson.dumps(document)
