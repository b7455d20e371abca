"""The addresses of OpenAI's interface in front of a generator: completions and chats, whole or streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from subnetact.generation import Generator
from subnetact.generation.step_scheduler import COUNTS
from subnetact.serve.base_app import Address, BaseApp, Exchange, operation
from subnetact.serve.exchange import Raw, Refusal, send_reply
from subnetact.serve.limits import Limits
from subnetact.serve.text_answer import TextAnswer
from subnetact.serve.text_bodies import NEUTRAL, ChatBody, CompletionBody, TextBody, TextTerms
from subnetact.serve.text_codec import TextCodec

EVENTS = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]  # nginx passes them on
Asked = tuple[TextBody, list[int], dict[str, Any]]


class TextApp(BaseApp):
    """An application with the addresses of OpenAI's interface; `subnetact.serve.run` serves it.

    `POST /v1/completions` and `POST /v1/chat/completions` answer whole or as a stream of events. Their
    deadlines are fields of the body or headers: `x-slo-ttft-ms` (to the first token), `x-deadline-ms` (to the
    last one) and `x-min-accuracy`. The field `phases` says which subnets generate which part of the answer,
    for example `[{"end": 151668, "subnets": 0}, {"subnets": [1, 2]}]`, with the fields of `Phase`; every
    choice of the answer then says in `cache` whether it is `exact` or `approximate`. Chats go through the
    chat template of the tokenizer if it has one. Otherwise every message becomes a line, `role: content`, and
    the last line is `assistant:`.

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

    Raises:
        ServeError: a token is too short.

    Example:
        >>> app = build_text_app(generator, AutoTokenizer.from_pretrained("my-model"))
        >>> subnetact.serve.run(app)
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Any,
        *,
        name: str = "model",
        stop: Sequence[int] = (),
        limits: Limits | None = None,
        tokens: Mapping[str, str] | None = None,
        allowed_hosts: Sequence[str] | None = None,
    ) -> None:
        super().__init__(limits, tokens, allowed_hosts, close=generator.close)
        self.generator, self.codec, self.name = generator, TextCodec(tokenizer), name
        self.stop = tuple(stop)
        for path, summary, body in (
            ("/v1/completions", "Continue a text", CompletionBody),
            ("/v1/chat/completions", "Continue a chat", ChatBody),
        ):
            document = operation(summary, {"application/json": self.model_schema(body)}, TextTerms)
            self.addresses[path] = Address("POST", partial(self._complete, body), document)
        model = {"id": name, "object": "model", "created": 0, "owned_by": "subnetact"}
        self.get("/v1/models", "Names of the models", lambda: (200, {"object": "list", "data": [model]}))

    def unready(self) -> str:
        """Return why the server should get no requests: a step that hangs is one reason."""
        return super().unready() or ("" if self.generator.stats().up else "no step is computed")

    def prometheus(self) -> str:
        """Return the counts of the generator in Prometheus' text format."""
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Any]:
        """Yield the counts of the generator as families of `prometheus_client`."""
        stats, prefix = self.generator.stats(), "subnetact_generation_"
        for name in COUNTS:
            yield CounterMetricFamily(prefix + name, f"GeneratorStats.{name}", getattr(stats, name))
        steps = CounterMetricFamily(f"{prefix}steps", "Steps that each subnet ran.", labels=["subnet"])
        for i, count in stats.steps.items():
            steps.add_metric([self.generator.table.subnets[i]], count)
        yield steps
        yield GaugeMetricFamily(f"{prefix}active", "Requests under way.", stats.active)
        yield GaugeMetricFamily(f"{prefix}up", "Whether steps are computed, and none hangs.", stats.up)

    def error_document(self, refusal: Refusal, path: str) -> dict[str, Any]:  # noqa: ARG002
        """Return what a client of the address `path` is told of a `refusal`, as OpenAI's interface has it."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "invalid_request_error" if refusal.status < 500 else "server_error"
        name = str(refusal).partition(":")[0].partition(".")[0]
        known = name in {*CompletionBody.model_fields, *ChatBody.model_fields, *NEUTRAL}
        error = {"message": str(refusal), "type": kinds.get(refusal.status, kind)}
        return {"error": {**error, "param": name if known else None, "code": refusal.kind}}

    async def _complete(self, body: type[TextBody], exchange: Exchange) -> None:
        asked = await exchange.read(partial(self._read, body, exchange.headers))
        send, answer = exchange.send, TextAnswer(self, *asked)
        try:
            if not asked[0].stream:
                return await send_reply(send, 200, await answer.whole())
            events = answer.events()
            piece = await anext(events)  # A refusal before the first token has a status of its own.
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await anext(events, b"")
            return await send({"type": "http.response.body", "body": b""})
        finally:
            answer.cancel()

    def _read(self, body: type[TextBody], headers: Mapping[str, str], raw: Raw) -> Asked:
        """Return the body of a request, the tokens of its prompt, and the arguments of `submit`."""
        ask = body.read(raw)
        ask.complete(TextTerms, TextTerms.header_values(headers), self.limits.deadline_ms)
        if ask.model not in (None, self.name):
            raise Refusal(404, "model_not_found", f"model: this server has {self.name!r}")
        names = ("temperature", "top_p", "top_k", "deadline_ms", "min_accuracy")
        wishes = {name: getattr(ask, name) for name in names}
        wishes |= {"max_new_tokens": ask.max_completion_tokens or ask.max_tokens, "stop": self.stop}
        wishes |= {"first_ms": ask.slo_ttft_ms, "logprobs": ask.likely(), "phases": ask.planned()}
        options = {name: value for name, value in wishes.items() if value is not None}
        return ask, ask.tokens(self.codec), options


build_text_app = TextApp
"""Makes the application of a generator and its tokenizer."""
