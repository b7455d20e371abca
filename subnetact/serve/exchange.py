"""One exchange with a client: its headers, its body within the limits, and the reply."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeVar

import orjson
from pydantic import ValidationError

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    InvalidRequest,
    MissingExtra,
    QueueFull,
    RequestError,
)

__all__ = [
    "Bodies",
    "ClientGone",
    "Exchange",
    "Headers",
    "Refusal",
    "read_body",
    "read_json",
    "refusal_of",
    "send_reply",
    "shortened",
    "validated",
]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Model = TypeVar("Model")

LATER = {"Retry-After": "1"}
JSON = b"application/json"
_log = logging.getLogger(__name__)
STATUSES: Mapping[type[RequestError] | type[MissingExtra], int] = {
    InvalidRequest: 400,
    MissingExtra: 415,
    QueueFull: 429,
    BatcherClosed: 503,
    DeadlinePassed: 504,
    BatchFailed: 500,
    RequestError: 500,
}


class ClientGone(Exception):
    """The client closed its connection before the answer."""


class Refusal(Exception):
    """A request that the server refuses for another reason than the batcher's.

    Args:
        status: the HTTP status.
        kind: the name of the reason.
        message: the reason, and what to do next.
        headers: more headers of the reply.
    """

    def __init__(
        self, status: int, kind: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = dict(headers or {})


class Headers:
    """The headers of one request by lower-case name.

    Args:
        pairs: names and values as ASGI has them.
        most: largest number of bytes of all.

    Raises:
        Refusal: there are too many, or they contradict each other about the length of the body.
    """

    __slots__ = ("_values", "length")

    def __init__(self, pairs: Iterable[tuple[bytes, bytes]], most: int) -> None:
        values: dict[bytes, bytes] = {}
        self._values = values
        for name, value in pairs:
            if name in values and name in (b"content-length", b"transfer-encoding", b"host"):
                raise Refusal(400, "InvalidRequest", f"{name.decode()}: given twice; send one")
            values[name] = value
            most -= len(name) + len(value)
        if most < 0:
            raise Refusal(431, "TooLarge", "headers: more bytes than this server reads; send fewer")
        length = values.get(b"content-length")
        self.length = None
        if length is not None and b"transfer-encoding" in values:
            raise Refusal(
                400, "InvalidRequest", "content-length: given beside transfer-encoding; send one of them"
            )
        if length is not None:
            if not (length.isdigit() and len(length) < 20):
                raise Refusal(
                    400, "InvalidRequest", "content-length: not a whole number; send the number of bytes"
                )
            self.length = int(length)

    def get(self, name: bytes) -> str | None:
        """Return the value of a header, or None if the request does not have it."""
        value = self._values.get(name)
        return None if value is None else value.decode("latin-1")


class Exchange(NamedTuple):
    """One request as an address gets it.

    Attributes:
        scope: the scope of ASGI.
        headers: the headers of the request.
        client: name or address of the client.
        receive: the receiving side of ASGI.
        send: the sending side of ASGI.
        arrived_ms: time of the arrival by `now_ms`, in ms.
    """

    scope: Scope
    headers: Headers
    client: str
    receive: Receive
    send: Send
    arrived_ms: float


class Bodies:
    """Counts the bytes of all bodies that a server holds, of which it may hold `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    def take(self, count: int) -> None:
        """Count bytes that a request holds from now on.

        Raises:
            Refusal: the server holds too many already.
        """
        if self.held + count > self._most:
            raise Refusal(
                503, "Overloaded", "the server holds as many request bodies as it may; retry later", LATER
            )
        self.held += count

    def give_back(self, count: int) -> None:
        """Count bytes that a request holds no longer."""
        self.held -= count


async def read_body(receive: Receive, headers: Headers, most: int, bodies: Bodies) -> bytes:
    """Read a body of at most `most` bytes; the caller gives `len(body)` back to `bodies`.

    Raises:
        Refusal: the body is too large or compressed.
        ClientGone: the client closed its connection.
    """
    if headers.length is not None and headers.length > most:
        raise _too_large(most)
    if headers.get(b"content-encoding") not in (None, "", "identity"):
        raise Refusal(
            415, "Unsupported", "content-encoding: bodies are not decompressed; send them as they are"
        )
    held = 0
    chunks: list[bytes] = []
    try:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            if held + len(chunk) > most:
                raise _too_large(most)
            bodies.take(len(chunk))
            held += len(chunk)
            chunks.append(chunk)
    except BaseException:
        bodies.give_back(held)
        raise
    return b"".join(chunks)


def read_json(text: bytes) -> Any:
    """Read JSON as RFC 8259 has it, in UTF-8: without NaN, infinities and halves of characters.

    Of a name that an object has twice, the last value counts. Whole numbers beyond 64 bits become fractions.

    Raises:
        InvalidRequest: the text is not JSON.
    """
    try:
        return orjson.loads(text)
    except (orjson.JSONDecodeError, RecursionError) as error:
        # The message names a place in the text, and nothing of the text.
        raise InvalidRequest(f"body: not JSON ({error}); send one JSON object") from None


def validated(read: Callable[[Any], Model], value: Any) -> Model:
    """Return what a method of a pydantic model makes of a client's value.

    Raises:
        InvalidRequest: the value does not fit; the message begins with the name of the field.
    """
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
    try:
        text = repr(value)
    except ValueError:  # A whole number with more digits than Python prints.
        text = "a very long number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _too_large(most: int) -> Refusal:
    return Refusal(413, "TooLarge", f"body: more than {most} bytes; send a smaller one")


def refusal_of(error: BaseException) -> Refusal:
    """Return what a client is told about an error. Nothing of the server's code or files is in it.

    Args:
        error: what was raised while the request was handled.
    """
    if isinstance(error, Refusal):
        return error
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), None)
    if status is None:
        _log.error("a request raised an unexpected error", exc_info=error)
        return Refusal(500, "InternalError", "the server failed on this request; its log says why")
    message = str(error)
    if isinstance(error, BatchFailed):
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
