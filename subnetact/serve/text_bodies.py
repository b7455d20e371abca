"""The bodies of OpenAI's interface as pydantic models, which check them and describe them in OpenAPI."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from subnetact.errors import InvalidRequest
from subnetact.generation import Phase
from subnetact.serve.exchange import Refusal, Strict, Terms
from subnetact.serve.text_codec import TextCodec

MOST_ANSWERS = 64
COMPLETION_TOKENS = 16  # of an answer to a prompt that names no number, as OpenAI's interface has it
IGNORED: Set[str] = {
    "metadata",
    "name",
    "parallel_tool_calls",
    "prompt_cache_key",
    "reasoning_effort",
    "safety_identifier",
    "service_tier",
    "store",
    "tool_calls",
    "user",
    "verbosity",
}
"""Fields that clients send and that change nothing here; the metrics count them."""
NEUTRAL: Mapping[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_p": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
}
"""Fields that are not supported, each with the value that changes nothing, which alone is accepted."""


class _Part(Strict):
    _ignored: set[str] = PrivateAttr(default_factory=set)

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: Any, read: ModelWrapValidatorHandler[Any]) -> Any:
        """Leave out what is null; refuse what is not supported, unless it changes nothing."""
        if not isinstance(value, dict):
            return read(value)
        fields = {name: one for name, one in value.items() if one is not None}
        ignored = fields.keys() & IGNORED
        for name in ignored:
            del fields[name]
        for name in NEUTRAL.keys() & fields.keys() - cls.model_fields.keys():
            one, neutral = fields.pop(name), NEUTRAL[name]
            if one != neutral or isinstance(one, bool) != isinstance(neutral, bool):
                raise InvalidRequest(
                    f"{name}: this server supports no other value than {neutral!r}; leave it out"
                )
        part = read(fields)
        part._ignored = ignored
        return part


class TextTerms(Terms):
    """What may be given as headers, too: `x-llm-d-slo-ttft-ms`, `x-priority` and so on."""

    slo_ttft_ms: float | None = Field(default=None, gt=0, description="time to the first token, in ms")
    slo_tpot_ms: float | None = Field(default=None, gt=0, description="time from a token to the next, in ms")


class StreamOptions(_Part):
    """What a stream has besides its text: the usage at its end, or with every piece."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = Field(default=False, description="ignored")


class PhaseBody(_Part):
    """A `Phase` of the answer."""

    end: int | None = Field(default=None, description="the token that ends it")
    subnets: int | str | list[int | str] | None = Field(
        default=None, description="by index or key; null: all"
    )
    tokens: int | None = Field(default=None, description="its largest number of tokens")
    recompute: bool | None = Field(
        default=None, description="compute the cache again; null: only where its subnets cannot continue"
    )


Stop = Annotated[str, Field(min_length=1, max_length=100)]


class _Body(TextTerms, _Part):
    """What the bodies of both addresses have in common."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63 - MOST_ANSWERS)
    n: int = Field(default=1, ge=1, le=MOST_ANSWERS, description="number of answers to each prompt")
    min_tokens: int = Field(default=0, ge=0, description="no token ends the answer before")
    ignore_eos: bool = Field(default=False, description="whether the model's end tokens do not end an answer")
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    phases: list[PhaseBody] | None = Field(default=None, description="which subnets generate which part")

    def ignored(self) -> set[str]:
        """Return the names of the fields that are not looked at."""
        return self._ignored

    def planned(self) -> list[Phase] | None:
        """Return the phases as `Generator.submit` takes them."""
        return None if self.phases is None else [Phase(**dict(phase)) for phase in self.phases]


class CompletionBody(_Body):
    """The body of `/v1/completions`."""

    prompt: str | list[int] | Annotated[list[str] | list[list[int]], Field(max_length=MOST_ANSWERS)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | Literal[False] = Field(
        default=False, description="number of most likely tokens to tell with every token"
    )

    def prompts(self, codec: TextCodec) -> list[list[int]]:
        """Return the tokens of every prompt."""
        several: Any = self.prompt
        if isinstance(several, str) or not several or isinstance(several[0], int):
            several = [several]
        return [codec.prompt(one) if isinstance(one, str) else list(one) for one in several]

    def most_tokens(self, room: int) -> int:  # noqa: ARG002
        """Return how many tokens an answer has if the body names no number."""
        return COMPLETION_TOKENS

    def likely(self) -> int | None:
        """Return the field, in which 0 is not False."""
        return None if self.logprobs is False else self.logprobs


class TextPart(_Part):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Part):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def text(self) -> str:
        """Return the text of all parts."""
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatBody(_Body):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)

    def prompts(self, codec: TextCodec) -> list[list[int]]:
        """Return the tokens of the chat, which is one prompt."""
        return [codec.chat([{"role": one.role, "content": one.text()} for one in self.messages])]

    def most_tokens(self, room: int) -> int:
        """Return how many tokens an answer has if the body names no number: all that there is room for."""
        return max(1, room)

    def likely(self) -> int | None:
        """Return what both fields say."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: give logprobs true with it")
        return self.top_logprobs if self.logprobs else None


TextBody = CompletionBody | ChatBody


def error_document(refusal: Refusal) -> dict[str, Any]:
    """Return what a client is told of a `refusal`, as OpenAI's interface has it."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    name = str(refusal).partition(":")[0].partition(".")[0]
    known = name in {*CompletionBody.model_fields, *ChatBody.model_fields, *NEUTRAL}
    error = {"message": str(refusal), "type": kinds.get(refusal.status, kind)}
    return {"error": {**error, "param": name if known else None, "code": refusal.kind}}
