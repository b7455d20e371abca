"""The addresses of OpenAI's interface in front of a generator: completions and chats, whole or streamed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.responses import Response

from subnetact.errors import InvalidRequest
from subnetact.generation import Generator
from subnetact.serve.base_app import BaseApp, Exchange, taking
from subnetact.serve.exchange import JSON, Raw, Refusal, reply
from subnetact.serve.limits import Limits
from subnetact.serve.text_answer import Asked, EventStream, TextAnswer, TextService
from subnetact.serve.text_bodies import (
    MOST_ANSWERS,
    ChatBody,
    CompletionBody,
    TextBody,
    TextTerms,
    error_document,
)
from subnetact.serve.text_codec import TextCodec
from subnetact.serving.live.histograms import MILLISECONDS, Histogram
from subnetact.serving.live.prometheus import buckets, family_of, stat_metrics

IGNORED_TEXT = "Fields of bodies that clients sent and that this server does not look at."
FIRST_TEXT = "Time from the arrival of a request to each first token."
BETWEEN_TEXT = "Time from one token of an answer to the next."


class TextApp(BaseApp):
    """An application with the addresses of OpenAI's interface; `subnetact.serve.run` serves it.

    `POST /v1/completions` and `POST /v1/chat/completions` answer whole or as a stream of events. Their
    deadlines are fields of the body or headers: `x-llm-d-slo-ttft-ms` (to the first token),
    `x-llm-d-slo-tpot-ms` (from one to the next; both also without `llm-d-`), `x-deadline-ms` (to the last
    one), `x-min-accuracy` and `x-priority`. The field `phases` says which subnets generate which part of the
    answer, for example `[{"end": 151668, "subnets": 0}, {"subnets": [1, 2]}]`, with the fields of `Phase`;
    every choice of the answer then says in `cache` whether it is `exact` or `approximate`. Chats go through
    the chat template of the tokenizer if it has one. Otherwise every message becomes a line, `role: content`,
    and the last line is `assistant:`.

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
        super().__init__(limits, tokens, allowed_hosts, close=generator.close, names={"name": name})
        self.generator = generator
        times = Histogram(MILLISECONDS), Histogram(MILLISECONDS)
        self.service = TextService(generator, TextCodec(tokenizer), name, tuple(stop), *times)
        self.ignored: Counter[str] = Counter()
        model = {"id": name, "object": "model", "created": 0, "owned_by": "subnetact"}
        self.get("/v1/models", lambda: reply({"object": "list", "data": [model]}))
        self.get("/v1/models/{name}", lambda: reply(model))
        self.get("/health", self._health, open_=True)
        for path, body in (("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody)):
            taken = taking({JSON: self.model_schema(body)}, TextTerms)
            self.add("POST", path, partial(self._complete, body), **taken)

    def unready(self) -> str:
        """Return why the server should get no requests: a step that hangs is one reason."""
        return super().unready() or ("" if self.generator.stats().up else "no step is computed")

    def collect(self) -> Iterator[Any]:
        """Yield metrics as families of `prometheus_client`."""
        yield from super().collect()
        stats, service, names = self.generator.stats(), self.service, self.generator.table.subnets
        steps = [((names[i],), count) for i, count in stats.steps.items()]
        ignored = [((field,), count) for field, count in self.ignored.items()]
        first_s, between_s = buckets(service.first_ms, 1e-3), buckets(service.between_ms, 1e-3)
        for kind, name, text, labels, samples in (
            *stat_metrics(stats),
            ("Counter", "steps", "Steps that each subnet ran.", ["subnet"], steps),
            ("Counter", "ignored_fields", IGNORED_TEXT, ["field"], ignored),
            ("Histogram", "first_token_seconds", FIRST_TEXT, (), [((), *first_s)]),
            ("Histogram", "between_tokens_seconds", BETWEEN_TEXT, (), [((), *between_s)]),
        ):
            yield family_of(kind, f"subnetact_generation_{name}", text, labels, samples)

    def error_document(self, refusal: Refusal, path: str) -> dict[str, Any]:  # noqa: ARG002
        """Return what a client of the address `path` is told of a `refusal`, as OpenAI's interface has it."""
        return error_document(refusal)

    async def _complete(self, kind: type[TextBody], exchange: Exchange) -> Response:
        read = partial(self._asked, kind, exchange)
        async with self.body(exchange, self.body_bytes) as raw:
            answer = TextAnswer(self.service, await self.decoded(read, raw), exchange)
            try:
                if not answer.body.stream:
                    return reply(await answer.whole())
                events = answer.events()
                first = await anext(events)  # A refusal before the first token has a status of its own.
                return EventStream(answer, first, events)
            except BaseException:
                answer.cancel()
                raise

    def _asked(self, kind: type[TextBody], exchange: Exchange, raw: Raw) -> Asked:
        """Return what a request asks for."""
        body, service = kind.read(raw), self.service
        terms = body.completed(TextTerms, exchange.header_values(TextTerms), self.limits.deadline_ms)
        if body.model not in (None, service.name):
            raise Refusal(404, "model_not_found", f"model: this server has {service.name!r}")
        wishes = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "seed")}
        wishes |= {"min_accuracy": terms.min_accuracy, "stop": service.stop, "token_ms": terms.slo_tpot_ms}
        wishes |= {"priority": terms.priority}
        wishes |= {"logprobs": body.likely(), "phases": body.planned()}
        wishes |= {"ignore_eos": body.ignore_eos, "min_tokens": body.min_tokens}
        for name, field in (("deadline_ms", "deadline_ms"), ("first_ms", "slo_ttft_ms")):
            if (limit_ms := getattr(terms, field)) is not None:
                wishes[name] = exchange.left_ms(field, limit_ms)
        options = {name: value for name, value in wishes.items() if value is not None}
        prompts = body.prompts(service.codec)
        if body.n * len(prompts) > MOST_ANSWERS:
            raise InvalidRequest(
                f"n: {body.n} answers to {len(prompts)} prompts are more than {MOST_ANSWERS}; ask for fewer"
            )
        self.ignored.update(body.ignored())
        return body, prompts, options


build_text_app = TextApp
"""Makes the application of a generator and its tokenizer."""
