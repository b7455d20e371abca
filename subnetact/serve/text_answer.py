"""The answer to one request of OpenAI's interface: its choices, as their tokens come, whole or as events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from subnetact.errors import RequestError
from subnetact.generation import Completion, Generated, Generator
from subnetact.serve.base_app import Exchange
from subnetact.serve.exchange import refusal_of
from subnetact.serve.text_bodies import ChatBody, TextBody, error_document
from subnetact.serve.text_codec import TextCodec
from subnetact.serving.live.batcher import monotonic_ms
from subnetact.serving.live.histograms import Histogram

Asked = tuple[TextBody, list[list[int]], dict[str, Any]]
"""The body of a request, the tokens of its prompts, and the arguments of `Generator.submit`."""


class TextService(NamedTuple):
    """A generator, the texts of its tokens, its name, and the tokens that end every answer.

    `first_ms` has the times from the arrival of a request to its first tokens, and `between_ms` those from
    one token of an answer to the next, as its client gets them.
    """

    generator: Generator
    codec: TextCodec
    name: str
    stop: tuple[int, ...]
    first_ms: Histogram
    between_ms: Histogram


class Choice:
    """One of the answers to a request; what has come of it and was not taken yet is in its attributes."""

    def __init__(
        self, index: int, completion: Completion, service: TextService, body: TextBody, arrived_ms: float
    ) -> None:
        self.index, self.completion = index, completion
        self._service, self._last_ms = service, arrived_ms
        self._write = service.codec.writer()
        self._ends = {*service.stop, *service.generator.end_tokens}
        self._stops = [body.stop] if isinstance(body.stop, str) else body.stop
        self.tells, self._phased = body.likely() is not None, body.phases is not None
        self.read = 0  # tokens
        self._held = ""  # the last characters, which may be the beginning of a text that ends the answer
        self.text, self.finish = "", ""
        self.facts: dict[str, Any] = {}  # told with the end of an answer
        self.late = False
        self.told: list[tuple[int, Any]] = []  # tokens with their log-probabilities
        self.offset = 0  # characters of the tokens that were told

    def follow(self) -> bool:
        """Read what has come, token by token however many come at once; return whether to take anything."""
        outcome = self.completion.result(0.0) if self.completion.done else None
        tokens = self.completion.tokens(self.read)
        told = self.completion.logprobs(self.read) if self.tells else ()
        self._measure(len(tokens))
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
            self._conclude(outcome)
        return bool(self.text or self.finish or self.told)

    def _measure(self, count: int) -> None:
        """Count the times of new tokens."""
        if count:
            now = monotonic_ms()
            first = not self.read
            if first:
                self._service.first_ms.add(now - self._last_ms)
            self._service.between_ms.add_all([(now - self._last_ms) / count] * (count - first))
            self._last_ms = now

    def _conclude(self, outcome: Generated) -> None:
        """Keep what is told of an answer that has ended: whether it was in time, and who gave its tokens."""
        self.late = bool(outcome.late)
        names = self._service.generator.table.subnets
        served = Counter(outcome.subnets)
        self.facts = {"met": not self.late, "subnets": {names[i]: count for i, count in served.items()}}
        if self._phased:
            self.facts["cache"] = outcome.cache

    def _show(self, new: str) -> None:
        """Show what can be shown of held back and new text, up to a text of `stop`, which ends the answer."""
        text = self._held + new
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.text, self.finish = self.text + text[: min(found)], "stop"
            self.completion.cancel()
            with suppress(RequestError):  # it may have failed behind the text that ends the answer
                self._conclude(self.completion.result(0.0))
            return
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        kept = next((n for n in range(longest, 0, -1) if text[-n:] in {s[:n] for s in self._stops}), 0)
        self.text, self._held = self.text + text[: len(text) - kept], text[len(text) - kept :]


class TextAnswer:
    """The answer to one request, whose `n` choices are requests of their own to the generator."""

    def __init__(self, service: TextService, asked: Asked, exchange: Exchange) -> None:
        body, prompts, options = asked
        self.body, self._service, self._prompt = body, service, sum(map(len, prompts))
        self._exchange = exchange
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
            for index in range(body.n * len(prompts)):
                prompt = prompts[index // body.n]
                room = service.generator.max_length - len(prompt)
                count = body.max_completion_tokens or body.max_tokens or body.most_tokens(room)
                if body.seed is not None:
                    options = {**options, "seed": body.seed + index}
                completion = service.generator.submit(prompt, max_new_tokens=count, **options)
                self._choices.append(Choice(index, completion, service, body, exchange.arrived_ms))
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
        self._exchange.outcome = "late" if any(choice.late for choice in self._choices) else "met"

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        async for _ in self._ready():
            pass
        choices = [self._taken(choice, "message", {"role": "assistant"}) for choice in self._choices]
        return {**self._facts, "choices": choices, **self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer piece by piece; an error before the first piece is raised."""
        begun: set[int] = set()
        options = self.body.stream_options
        try:
            async for choice in self._ready():
                role = {} if choice.index in begun else {"role": "assistant"}
                begun.add(choice.index)
                piece = {**self._facts, "choices": [self._taken(choice, "delta", role)]}
                if options.continuous_usage_stats:
                    piece |= self._usage()
                elif options.include_usage:
                    piece["usage"] = None
                yield _event(piece)
            if options.include_usage:
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
            **choice.facts,
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
