"""What a client asks for besides its input, what it is told of errors, and replies in JSON."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from subnetact import errors
from subnetact.errors import InvalidRequest
from subnetact.serving.live.rate_limited_log import RateLimitedLog

Model = TypeVar("Model", bound=BaseModel)
CommonModel = TypeVar("CommonModel", bound="Terms")
Raw = bytes | bytearray

LATER = {"Retry-After": "1"}
DROPPED = {"QueueFull": "rejected-saturated", "DeadlinePassed": "rejected-ttl-expired"}
"""What the header `x-llm-d-request-dropped-reason` says of a request that was refused or expired."""
JSON = "application/json"
GONE = 499, "ClientGone", "the client closed its connection before the answer"
_repeated = RateLimitedLog(logging.getLogger(__name__))
STATUSES: Mapping[type[errors.SubnetActError], int] = {
    InvalidRequest: 400,
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
    def read(cls: type[Model], text: Raw | memoryview) -> Model:
        """Return what JSON says, or raise InvalidRequest."""
        return _validated(cls.model_validate, read_json(text))


class Terms(Strict):
    """What every request may ask for; a name in a header is `x-deadline-ms` and so on."""

    deadline_ms: float | None = Field(default=None, gt=0, description="time to the whole answer, in ms")
    min_accuracy: float | None = Field(
        default=None, ge=0, le=100, description="minimum accuracy of the answering subnet, in percent"
    )
    priority: int | None = Field(
        default=None,
        gt=-(2**31),
        lt=2**31,
        description="requests of lower priority expire first; those to language models only if below 0",
    )

    def completed(self, kind: type[CommonModel], texts: Mapping[str, str], most_ms: float) -> CommonModel:
        """Return terms with what the body leaves out from texts; times beyond the limit are refused."""
        own = {name: one for name, one in self if name in kind.model_fields and one is not None}
        terms = _validated(kind.model_validate_strings, dict(texts)).model_copy(update=own)
        for name, one in terms:
            if name.endswith("_ms") and (one or 0.0) > most_ms:
                raise InvalidRequest(f"{name}: got {one!r:.60}, the most is {most_ms:g} ms")
        return terms


@cache
def header_names(model: type[BaseModel]) -> list[tuple[str, str]]:
    """Return the fields that may be headers; of two names for one field, that of llm-d counts."""
    names = [(name, name.replace("_", "-")) for name in model.model_fields]
    return [(f, f"x-{name}") for f, name in names] + [
        (f, f"x-llm-d-{name}") for f, name in names if name.startswith("slo-")
    ]


def read_json(text: Raw | memoryview) -> Any:
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
        raise InvalidRequest(f"{where}: got {first['input']!r:.60}. {first['msg']}") from None


def refusal_of(error: BaseException) -> Refusal:
    """Return what a client is told about an error. Nothing of the server's code or files is in it."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ClientDisconnect):
        return Refusal(*GONE)
    if isinstance(error, HTTPException):  # of Starlette's routes
        kind = {404: "NotFound", 405: "MethodNotAllowed"}.get(error.status_code, "HTTPException")
        message = "there is no such address; /openapi.json lists all"
        if error.status_code == 405:
            message = "this address takes other methods, which the header `allow` names"
        return Refusal(error.status_code, kind, message, error.headers)
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), None)
    if status is None:
        _repeated.log(logging.ERROR, "a request raised an unexpected error", error=error)
        return Refusal(500, "InternalError", "the server failed on this request; its log says why")
    message = str(error)
    if isinstance(error, errors.BatchFailed):
        _repeated.log(logging.WARNING, "a request failed: %s", error, error=error)
        if not isinstance(error, errors.OutputNotFinite):
            message = "the network failed on this request; the log of the server says why"
    headers = dict(LATER) if status in (429, 503) else {}
    if reason := DROPPED.get(type(error).__name__):
        headers["x-llm-d-request-dropped-reason"] = reason
    return Refusal(status, type(error).__name__, message, headers)


def reply(
    document: Mapping[str, Any] | Sequence[Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer in JSON; numbers that JSON has not become null."""
    return Response(orjson.dumps(document), status, headers, JSON)
