"""The base of all applications: names, tokens, limits and addresses, and errors that tell no secrets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from subnetact import __version__
from subnetact.errors import InvalidRequest, ServeError
from subnetact.serve.access import Access
from subnetact.serve.exchange import LATER, Raw, Refusal, refusal_of, send_reply
from subnetact.serve.limits import BYTES_PER_VALUE, MEGABYTE, Limits
from subnetact.serve.payloads import is_image
from subnetact.serving.live.batcher import monotonic_ms

CLOSES = (400, 401, 408, 413, 415, 431)  # the connection, as part of the body may not have been read
SHORT = 32 * 1024  # bodies of up to this many bytes are decoded at once, and longer ones on a thread
WATCH_AFTER_S = 0.02  # before the server watches whether a client leaves: most requests end earlier
DECODERS = 2  # threads
GONE = 499, "ClientGone", "the client closed its connection before the answer"
Asked = TypeVar("Asked")
Reply = tuple[Any, ...]
"""What `send_reply` takes: status, body, headers and type."""
UNREADY = {"503": "The server is closing, or it computes nothing."}
ERRORS = {
    "400": "The request is malformed.",
    "401": "The token is missing or unknown.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is compressed, or an image that this server cannot decode.",
    "429": "The queue is full; retry after the time in Retry-After.",
    "503": "The server is closing or overloaded.",
    "504": "The deadline passed.",
}


class Address(NamedTuple):
    """What an address does: `operation` describes it in OpenAPI, and `open` needs no token."""

    method: str
    answer: Callable[[Exchange], Awaitable[None]]
    operation: dict[str, Any]
    open: bool = False


class BaseApp:
    """An ASGI application whose requests pass the names of the server and the tokens first.

    Every exception becomes an answer without anything of the server's code or files, unless an answer has
    begun already: then the server closes the connection. `allowed_hosts` are names without ports: a page of
    another site can make a browser send requests to this machine (DNS rebinding), but the browser then names
    that site. One input has `values` values. `close` ends what answers, and finishes accepted requests if its
    argument says so. While `closing`, `/healthz` and `/readyz` return 503.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        tokens: Mapping[str, str] | None = None,
        allowed_hosts: Iterable[str] | None = None,
        values: int = 0,
        close: Callable[[bool], object] = lambda _: None,
    ) -> None:
        @asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.close)

        self.limits = limits or Limits()
        self.access = Access(tokens or {})
        self.held_bytes = 0  # of all bodies
        self.closing, self._close = False, close
        self.addresses: dict[str, Address] = {}
        self.schemas: dict[str, Any] = {}
        self.router = Router(lifespan=lifespan)
        self.body_bytes = self.limits.body_bytes or MEGABYTE + BYTES_PER_VALUE * values
        self.threads = ThreadPoolExecutor(DECODERS, "subnetact-serve")
        self._entry: Any = self._exchange
        if allowed_hosts is not None:
            names = [f"[{name}]" if ":" in name.strip("[]") else name for name in allowed_hosts]
            try:
                self._entry = TrustedHostMiddleware(self._exchange, names, www_redirect=False)
            except AssertionError as error:
                raise ServeError(f"allowed_hosts: got {names}. {error}") from None
        for path in ("/healthz", "/readyz"):
            summary = "Whether the server should get requests"
            self.get(path, summary, self._healthz, UNREADY, open_=True)
        kind, summary = b"text/plain; version=0.0.4; charset=utf-8", "Metrics in Prometheus' text format"
        self.get("/metrics", summary, lambda: (200, self.prometheus().encode(), (), kind))
        self.get("/openapi.json", "This document", lambda: (200, self.openapi()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one exchange as ASGI 3 has it: `scope`, `receive` and `send` are its own."""
        await (self._entry if scope["type"] == "http" else self.router)(scope, receive, send)

    def get(
        self, path: str, summary: str, make: Callable[[], Reply], responses: Any = None, open_: bool = False
    ) -> None:
        """Answer GET requests; `responses` describes other statuses than 200, `open_` needs no token."""

        async def answer(exchange: Exchange) -> None:
            await send_reply(exchange.send, *make())

        self.addresses[path] = Address("GET", answer, operation(summary, responses=responses or {}), open_)

    def unready(self) -> str:
        """Return why the server should get no requests, or an empty text."""
        return "closing" if self.closing else ""

    def _healthz(self) -> Reply:
        reason = self.unready()
        return 503 if reason else 200, {"status": reason or "ok"}

    def prometheus(self) -> str:
        """Return metrics in Prometheus' text format."""
        raise NotImplementedError

    def error_document(self, refusal: Refusal, path: str) -> dict[str, Any]:  # noqa: ARG002
        """Return in JSON what a client of the address `path` is told of a `refusal`."""
        return {"error": refusal.kind, "message": str(refusal)}

    def close(self, drain: bool = True) -> None:
        """Finish accepted requests, or without `drain` drop them. A second call does nothing."""
        self.closing = True
        self._close(drain)
        self.threads.shutdown()

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        return {
            "openapi": "3.1.0",
            "info": {"title": "subnetact", "version": __version__},
            "paths": {path: {one.method.lower(): one.operation} for path, one in self.addresses.items()},
            "components": {"schemas": self.schemas},
        }

    def model_schema(self, model: type[BaseModel]) -> dict[str, Any]:
        """Return the schema of a model, and put those that it refers to among the document's own."""
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        self.schemas |= schema.pop("$defs", {})
        return schema

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self, scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        try:
            exchange.headers = _headers(scope["headers"], self.limits.header_bytes)
            address = self.addresses.get(path)
            sender, open_ = scope.get("client") or [""], address is not None and address.open
            exchange.client = self.access.client(exchange.headers.get("authorization"), sender[0], open_)
            if address is None:
                raise Refusal(404, "NotFound", "there is no such address; /openapi.json lists all")
            if scope["method"] != address.method:
                message = f"this address takes {address.method}; /openapi.json lists all"
                raise Refusal(405, "MethodNotAllowed", message, {"Allow": address.method})
            await address.answer(exchange)
            return
        except asyncio.CancelledError:
            if exchange.refusal is None:
                raise
            if hasattr(exchange.task, "uncancel"):  # Python 3.11
                exchange.task.uncancel()
            refusal = exchange.refusal
        except Exception as error:
            refusal = refusal_of(error)
        finally:
            exchange.close()
        # The server closes the connection in the middle of an answer that has begun.
        if not exchange.begun and refusal.status != GONE[0]:
            more = [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
            if refusal.status in CLOSES:
                more.append((b"connection", b"close"))
            await send_reply(send, refusal.status, self.error_document(refusal, path), more)


class Exchange:
    """One request as an address gets it, with the name or address of its client and when it arrived.

    If its body comes too slowly or its client leaves, its task is cancelled, and `refusal` says why.
    """

    def __init__(self, app: BaseApp, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.arrived_ms = scope, monotonic_ms()
        self.headers: Mapping[str, str] = {}
        self.client, self.begun = "", False  # whether the answer has begun
        self.task: Any = asyncio.current_task()
        self.refusal: Refusal | None = None
        self._app, self._receive, self._send = app, receive, send
        self._body = bytearray()
        self._pending: list[asyncio.TimerHandle | asyncio.Task[None]] = []

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the answer."""
        self.begun = True
        await self._send(message)

    async def read(self, decode: Callable[[Raw], Asked]) -> Asked:
        """Return what `decode` makes of the body, which is read within the limits."""
        loop, limit_s = asyncio.get_running_loop(), self._app.limits.body_s
        why = 408, "TooSlow", f"body: not complete after {limit_s:g} s; send it faster"
        timer = loop.call_later(limit_s, self._end, *why)  # anyio.fail_after takes 14 us more
        self._pending.append(timer)
        await self._read_body()
        timer.cancel()
        watch = lambda: self._pending.append(loop.create_task(self._watch()))  # noqa: E731
        self._pending.append(loop.call_later(WATCH_AFTER_S, watch))
        if len(self._body) <= SHORT and not is_image(self._body):
            return decode(self._body)
        return await loop.run_in_executor(self._app.threads, decode, self._body)

    def close(self) -> None:
        """Free the memory of the body, and watch the client no more."""
        self._app.held_bytes -= len(self._body)
        for one in self._pending:
            one.cancel()

    async def _read_body(self) -> None:
        app, body, more = self._app, self._body, True
        most, length = app.body_bytes, int(self.headers.get("content-length", 0))
        if self.headers.get("content-encoding", "") not in ("", "identity"):
            message = "content-encoding: bodies are not decompressed; send them as they are"
            raise Refusal(415, "Unsupported", message)
        while True:
            if max(length, len(body)) > most:
                raise Refusal(413, "TooLarge", f"body: more than {most} bytes; send a smaller one")
            if not more:
                return
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise Refusal(*GONE)
            chunk, more = event.get("body", b""), event.get("more_body", False)
            free = max(most, app.limits.bodies_bytes) - app.held_bytes
            if free < len(chunk) <= most - len(body):
                message = "the server holds as many request bodies as it may; retry later"
                raise Refusal(503, "Overloaded", message, LATER)
            body += chunk
            app.held_bytes += len(chunk)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end(*GONE)

    def _end(self, *why: Any) -> None:
        self.refusal = Refusal(*why)
        self.task.cancel()


def _headers(pairs: Iterable[tuple[bytes, bytes]], most: int) -> Mapping[str, str]:
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


def operation(
    summary: str,
    contents: Mapping[str, Any] | None = None,
    terms: type[BaseModel] | None = None,
    responses: Mapping[str, str] = ERRORS,
) -> dict[str, Any]:
    """Describe an address: the types of its body, the model of its headers, and what statuses mean."""
    statuses = {"200": "The answer.", **responses}
    described = {status: {"description": text} for status, text in statuses.items()}
    found: dict[str, Any] = {"summary": summary, "responses": described}
    if contents:
        content = {kind: {"schema": schema} for kind, schema in contents.items()}
        found["requestBody"] = {"required": True, "content": content}
    if terms:
        headers = {f"x-{name.replace('_', '-')}": schema for name, schema in properties(terms).items()}
        found["parameters"] = [{"name": n, "in": "header", "schema": s} for n, s in headers.items()]
    return found


def properties(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schemas of a model's fields; null is what is absent, and no query or header has it."""
    fields: dict[str, Any] = model.model_json_schema()["properties"]
    return {name: {**one["anyOf"][0], "description": one["description"]} for name, one in fields.items()}
