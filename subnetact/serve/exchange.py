"""One exchange with a client: its headers, its body within the limits, and the reply."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, NamedTuple

import orjson

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
    "SHORT",
    "Bodies",
    "ClientGone",
    "Exchange",
    "Headers",
    "Refusal",
    "TimeLimit",
    "internal_error",
    "read_body",
    "read_json",
    "refusal_of",
    "send_reply",
]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

SHORT = 32 * 1024
"""Bodies of up to this many bytes are decoded at once, and longer ones on a thread. It is also the largest
size of what a JSON body has besides its lists of numbers."""
RETRY_AFTER_S = 1
JSON = b"application/json"
_log = logging.getLogger(__name__)


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
    """The headers of one request. Names are lower-case bytes.

    Args:
        pairs: names and values as ASGI has them.

    Raises:
        Refusal: the headers contradict each other about the length of the body.
    """

    __slots__ = ("_values", "length")

    def __init__(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        values: dict[bytes, bytes] = {}
        for name, value in pairs:
            if name in values and name in (b"content-length", b"transfer-encoding", b"host"):
                raise Refusal(400, "InvalidRequest", f"{name.decode()}: given twice; send one")
            values[name] = value
        self._values = values
        length = values.get(b"content-length")
        if length is None:
            self.length = None
        elif b"transfer-encoding" in values:
            raise Refusal(
                400, "InvalidRequest", "content-length: given beside transfer-encoding; send one of them"
            )
        elif length.isdigit() and len(length) < 20:
            self.length = int(length)
        else:
            raise Refusal(
                400, "InvalidRequest", "content-length: not a whole number; send the number of bytes"
            )

    def get(self, name: bytes) -> str | None:
        """Return the value of a header, or None if the request does not have the header.

        Args:
            name: its name in lower case.
        """
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
    """Counts the bytes of all bodies that a server holds.

    Args:
        most: how many it may hold.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    def take(self, count: int) -> None:
        """Count bytes that a request holds from now on.

        Args:
            count: number of bytes.

        Raises:
            Refusal: the server holds too many already.
        """
        if self.held + count > self._most:
            raise Refusal(
                503,
                "Overloaded",
                "the server holds as many request bodies as it may; retry later",
                {"Retry-After": str(RETRY_AFTER_S)},
            )
        self.held += count

    def give_back(self, count: int) -> None:
        """Count bytes that a request holds no longer.

        Args:
            count: number of bytes.
        """
        self.held -= count


class TimeLimit:
    """Cancels the current task after a time; leaving the block then raises TimeoutError.

    `asyncio.timeout` does the same from Python 3.11 on.

    Args:
        seconds: the time, in s.
    """

    __slots__ = ("_expired", "_handle", "_seconds", "_task")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False

    def __enter__(self) -> None:
        self._task: Any = asyncio.current_task()
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        if self._expired:
            uncancel = getattr(self._task, "uncancel", None)
            if uncancel is not None:
                uncancel()
            if kind is asyncio.CancelledError:
                raise TimeoutError from None


async def read_body(receive: Receive, headers: Headers, most: int, seconds: float, bodies: Bodies) -> bytes:
    """Read the body of a request.

    Args:
        receive: the receiving side of ASGI.
        headers: the headers.
        most: largest number of bytes.
        seconds: time for the whole body, in s.
        bodies: counts the bytes that the server holds; the caller gives `len(body)` back.

    Raises:
        Refusal: the body is too large, too slow or compressed.
        ClientGone: the client closed its connection.
    """
    if headers.length is not None and headers.length > most:
        raise _too_large(most)
    encoding = headers.get(b"content-encoding")
    if encoding not in (None, "", "identity"):
        raise Refusal(
            415, "Unsupported", "content-encoding: bodies are not decompressed; send them as they are"
        )
    held = 0
    chunks: list[bytes] = []
    try:
        with TimeLimit(seconds):
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
    except TimeoutError:
        bodies.give_back(held)
        raise Refusal(408, "TooSlow", f"body: not complete after {seconds:g} s; send it faster") from None
    except BaseException:
        bodies.give_back(held)
        raise
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def read_json(text: bytes, most: int | None = SHORT) -> Any:
    """Read a JSON text from a client. Call it in a thread if the text is longer than `SHORT`.

    The text is JSON as RFC 8259 has it, in UTF-8: without NaN, infinities and halves of characters. Of a name
    that an object has twice, the last value counts. Whole numbers beyond 64 bits become fractions.

    Args:
        text: the text.
        most: how many characters it may have besides lists of numbers. If None, any number.

    Raises:
        InvalidRequest: the text is not JSON, or it has too many characters.
    """
    try:
        value = orjson.loads(text)
        if most is not None and len(text) > most and _size_besides_numbers(value) > most:
            raise InvalidRequest(f"body: more than {most} bytes of JSON besides lists of numbers; send less")
    except (orjson.JSONDecodeError, RecursionError) as error:
        # The message names a place in the text, and nothing of the text.
        raise InvalidRequest(f"body: not JSON ({error}); send one JSON object") from None
    return value


def _size_besides_numbers(value: Any) -> int:
    """Return about how many characters of JSON a value takes, where lists of numbers take none."""
    if type(value) is list:
        numbers = value and set(map(type, value)) <= {int, float}
        return 0 if numbers else 2 + sum(map(_size_besides_numbers, value))
    if type(value) is dict:
        return 2 + sum(4 + len(name) + _size_besides_numbers(inner) for name, inner in value.items())
    return 2 + len(value) if type(value) is str else 4


def _too_large(most: int) -> Refusal:
    return Refusal(413, "TooLarge", f"body: more than {most} bytes; send a smaller one")


def refusal_of(error: BaseException) -> Refusal:
    """Return what a client is told about an error. Nothing of the server's code or files is in it.

    Args:
        error: what was raised while the request was handled.
    """
    if isinstance(error, Refusal):
        return error
    kind = type(error).__name__
    later = {"Retry-After": str(RETRY_AFTER_S)}
    if isinstance(error, InvalidRequest):
        return Refusal(400, kind, str(error))
    if isinstance(error, MissingExtra):
        return Refusal(415, kind, str(error))
    if isinstance(error, QueueFull):
        return Refusal(429, kind, str(error), later)
    if isinstance(error, BatcherClosed):
        return Refusal(503, kind, str(error), later)
    if isinstance(error, DeadlinePassed):
        return Refusal(504, kind, str(error))
    if isinstance(error, BatchFailed):
        _log.warning("a request failed: %s", error)
        return Refusal(500, kind, "the network failed on this request; the log of the server says why")
    if isinstance(error, RequestError):
        return Refusal(500, kind, str(error))
    _log.error("a request raised an unexpected error", exc_info=error)
    return internal_error()


def internal_error() -> Refusal:
    """Return what a client is told about an unexpected error."""
    return Refusal(500, "InternalError", "the server failed on this request; its log says why")


async def send_reply(
    send: Send,
    status: int,
    body: bytes | Mapping[str, Any],
    headers: Iterable[tuple[bytes, bytes]] = (),
    content_type: bytes = JSON,
) -> None:
    """Send a whole reply.

    Args:
        send: the sending side of ASGI.
        status: the HTTP status.
        body: the body, or an object to send as JSON.
        headers: more headers.
        content_type: the type of the body.
    """
    data = body if isinstance(body, bytes) else json.dumps(body, allow_nan=False).encode()
    fixed = [(b"content-type", content_type), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": data})
