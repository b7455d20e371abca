"""One exchange with a client: its headers, what it asks for besides its input, its errors, and the reply."""

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

__all__ = [
    "CommonTerms",
    "Raw",
    "Refusal",
    "Strict",
    "Terms",
    "header_values",
    "read_headers",
    "read_json",
    "refusal_of",
    "send_reply",
    "validated",
]

Model = TypeVar("Model")
Raw = bytes | bytearray

LATER = {"Retry-After": "1"}
JSON = b"application/json"
_log = logging.getLogger(__name__)
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


def read_headers(pairs: Iterable[tuple[bytes, bytes]], most: int) -> Mapping[str, str]:
    """Return headers by lower-case name, of at most `most` bytes and without contradictions."""
    values: dict[str, str] = {}
    for raw, value in pairs:
        name = raw.decode("latin-1")
        if name in values and name in ("content-length", "transfer-encoding", "host"):
            raise InvalidRequest(f"{name}: given twice; send one")
        values[name] = value.decode("latin-1")
        most -= len(raw) + len(value)
    if most < 0:
        raise Refusal(431, "TooLarge", "headers: more bytes than this server reads; send fewer")
    length = values.get("content-length", "0")
    both = "transfer-encoding" in values and "content-length" in values
    if both or not (length.isdecimal() and len(length) < 20):
        raise InvalidRequest(
            "content-length: no whole number, or beside transfer-encoding; send the number of bytes"
        )
    return values


class Strict(BaseModel):
    """A body, or a part of one: no truth value is a number, and no text either."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class CommonTerms(Strict):
    """What every request may ask for; a name in a header is `x-deadline-ms` and so on."""

    deadline_ms: float | None = Field(default=None, gt=0, description="time to the whole answer, in ms")
    min_accuracy: float | None = Field(
        default=None, ge=0, le=100, description="minimum accuracy of the answering subnet, in percent"
    )

    def complete(self, kind: type[CommonTerms], texts: Mapping[str, str], most_ms: float) -> None:
        """Fill what the body leaves out from texts, and refuse times beyond the limit."""
        given = vars(self)  # pydantic's setattr takes 20 us
        if texts:
            found = vars(validated(kind.model_validate_strings, dict(texts)))
            given |= {name: found[name] for name in texts if given.get(name, name) is None}
        for name in ("deadline_ms", "slo_ttft_ms"):
            if (given.get(name) or 0.0) > most_ms:
                raise InvalidRequest(f"{name}: got {shortened(given[name])}, the most is {most_ms:g} ms")


class Terms(CommonTerms):
    """What requests to networks may ask for."""

    priority: int | None = Field(
        default=None, gt=-(2**31), lt=2**31, description="requests of lower priority expire first"
    )


def header_values(model: type[BaseModel], headers: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a model that are given as headers."""
    return {name: headers[header] for name, header in _header_names(model) if header in headers}


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


def validated(read: Callable[[Any], Model], value: Any) -> Model:
    """Return what a pydantic model makes of a client's value; an error begins with the name of the field."""
    try:
        return read(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        own = first.get("ctx", {}).get("error")
        if isinstance(own, InvalidRequest):  # of a validator
            raise own from None
        where = ".".join(str(part)[:60] for part in first["loc"]) or "body"
        raise InvalidRequest(f"{where}: got {shortened(first['input'])}. {first['msg']}") from None


def shortened(value: object) -> str:
    """Return a value of a client as it may stand in a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def refusal_of(error: BaseException) -> Refusal:
    """Return what a client is told about an error. Nothing of the server's code or files is in it."""
    if isinstance(error, Refusal):
        return error
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), None)
    if status is None:
        _log.error("a request raised an unexpected error", exc_info=error)
        return Refusal(500, "InternalError", "the server failed on this request; its log says why")
    message = str(error)
    if isinstance(error, errors.BatchFailed):
        _log.warning("a request failed: %s", error)
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
