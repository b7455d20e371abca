"""What a client asks for besides its input, what it is told of errors, and how a reply is sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.types import Send

from subnetact import errors
from subnetact.errors import InvalidRequest
from subnetact.serving.live.rate_limited_log import RateLimitedLog

Model = TypeVar("Model", bound=BaseModel)
Raw = bytes | bytearray

LATER = {"Retry-After": "1"}
JSON = b"application/json"
_repeated = RateLimitedLog(logging.getLogger(__name__))
STATUSES: Mapping[type[errors.SubnetActError], int] = {
    InvalidRequest: 400,
    errors.MissingExtra: 415,
    errors.QueueFull: 429,
    errors.BatcherClosed: 503,
    errors.DeadlinePassed: 504,
    errors.RequestError: 500,
}


class Refusal(Exception):
    """A request that the server refuses for another reason than the batcher's; `kind` is its name."""

    def __init__(self, status: int, kind: str, message: str, headers: Any = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.headers = status, kind, dict(headers or {})


class Strict(BaseModel):
    """A body, or a part of one: no truth value is a number, and no text either."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def read(cls: type[Model], text: Raw) -> Model:
        """Return what JSON says, or raise InvalidRequest."""
        return _validated(cls.model_validate, read_json(text))


class CommonTerms(Strict):
    """What every request may ask for; a name in a header is `x-deadline-ms` and so on."""

    deadline_ms: float | None = Field(default=None, gt=0, description="time to the whole answer, in ms")
    min_accuracy: float | None = Field(
        default=None, ge=0, le=100, description="minimum accuracy of the answering subnet, in percent"
    )

    @classmethod
    def header_values(cls, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the fields that are given as headers."""
        return {name: headers[header] for name, header in _header_names(cls) if header in headers}

    def complete(self, kind: type[CommonTerms], texts: Mapping[str, str], most_ms: float) -> None:
        """Fill what the body leaves out from texts, and refuse times beyond the limit."""
        given = vars(self)  # pydantic's setattr takes 20 us
        if texts:
            found = vars(_validated(kind.model_validate_strings, dict(texts)))
            given |= {name: found[name] for name in texts if given.get(name, name) is None}
        for name in ("deadline_ms", "slo_ttft_ms"):
            if (given.get(name) or 0.0) > most_ms:
                raise InvalidRequest(f"{name}: got {_shortened(given[name])}, the most is {most_ms:g} ms")


class Terms(CommonTerms):
    """What requests to networks may ask for."""

    priority: int | None = Field(
        default=None, gt=-(2**31), lt=2**31, description="requests of lower priority expire first"
    )


@cache
def _header_names(model: type[BaseModel]) -> list[tuple[str, str]]:
    return [(name, f"x-{name.replace('_', '-')}") for name in model.model_fields]


def read_json(text: Raw) -> Any:
    """Read JSON as RFC 8259 has it; of a name given twice, the last value counts."""
    try:
        return orjson.loads(text)
    except (orjson.JSONDecodeError, RecursionError) as error:
        # The message names a place in the text, and nothing of the text.
        raise InvalidRequest(f"body: not JSON ({error}); send one JSON object") from None


def _validated(read: Callable[[Any], Model], value: Any) -> Model:
    """Return what a pydantic model makes of a client's value; an error begins with the name of the field."""
    try:
        return read(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        own = first.get("ctx", {}).get("error")
        if isinstance(own, InvalidRequest):  # of a validator
            raise own from None
        where = ".".join(str(part)[:60] for part in first["loc"]) or "body"
        raise InvalidRequest(f"{where}: got {_shortened(first['input'])}. {first['msg']}") from None


def _shortened(value: object) -> str:
    """Return a value of a client as it may stand in a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def refusal_of(error: BaseException) -> Refusal:
    """Return what a client is told about an error. Nothing of the server's code or files is in it."""
    if isinstance(error, Refusal):
        return error
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), None)
    if status is None:
        _repeated.log(logging.ERROR, "a request raised an unexpected error", error=error)
        return Refusal(500, "InternalError", "the server failed on this request; its log says why")
    message = str(error)
    if isinstance(error, errors.BatchFailed):
        _repeated.log(logging.WARNING, "a request failed: %s", error, error=error)
        message = "the network failed on this request; the log of the server says why"
    return Refusal(status, type(error).__name__, message, LATER if status in (429, 503) else None)


async def send_reply(
    send: Send,
    status: int,
    body: bytes | Mapping[str, Any],
    headers: Iterable[tuple[bytes, bytes]] = (),
    content_type: bytes = JSON,
) -> None:
    """Send a whole reply, of which an object travels as JSON; numbers that JSON has not become null."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    fixed = [(b"content-type", content_type), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": data})
