"""The base of all applications: names, tokens, limits and addresses, errors without secrets, and counts."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from subnetact import __version__
from subnetact.errors import InvalidRequest, ServeError
from subnetact.serve.access import Access
from subnetact.serve.exchange import GONE, JSON, LATER, Raw, Refusal, refusal_of, reply
from subnetact.serve.limits import BYTES_PER_VALUE, MEGABYTE, Limits
from subnetact.serve.payloads import is_image
from subnetact.serving.live.batcher import monotonic_ms

CLOSES = (400, 401, 408, 413, 415, 431)  # the connection, as part of the body may not have been read
SHORT = 32 * 1024  # bodies of up to this many bytes are decoded at once, and longer ones on a thread
WATCH_AFTER_S = 0.02  # before the server watches whether a client leaves: most requests end earlier
DECODERS = 2  # threads
Asked = TypeVar("Asked")
Contents = Mapping[str, Any]
"""The schema of a body by its content type."""
UNREADY = "The server is closing, or it computes nothing."
ERRORS = {
    "400": "The request is malformed, or can never be answered.",
    "401": "The token is missing or unknown.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is compressed, or an image that this server cannot decode.",
    "429": "The queue is full; retry after the time in Retry-After.",
    "500": "The network or the server failed.",
    "503": "The server is closing or overloaded.",
    "504": "The deadline passed.",
}


class Exchange:
    """What an application knows of a request: its headers, client and arrival, and whether it was in time."""

    def __init__(self, app: BaseApp, path: str, send: Send) -> None:
        self.arrived_ms = monotonic_ms()
        self.headers: Mapping[str, str] = {}
        self.client, self.outcome, self.begun = "", "", False  # whether the answer has begun
        self._app, self._path, self._send = app, path, send

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the answer; its beginning is counted."""
        if message["type"] == "http.response.start":
            self.begun = True
            self.count(message["status"])
            if self._app.closing or message["status"] in CLOSES:
                message["headers"].append((b"connection", b"close"))
        await self._send(message)

    def count(self, status: int) -> None:
        """Count the answer. All addresses that do not exist have one label, so that labels stay few."""
        route = self._path if self._path in self._app.documents else ""
        self._app.responses[route, str(status), self.outcome] += 1


def exchange_of(request: Request) -> Exchange:
    """Return what the application knows of a request."""
    exchange: Exchange = request.scope["exchange"]
    return exchange


class BaseApp:
    """An ASGI application whose requests pass the names of the server and the tokens first.

    Every exception becomes an answer without anything of the server's code or files, unless an answer has
    begun already: then the server closes the connection. `allowed_hosts` are names without ports: a page of
    another site can make a browser send requests to this machine (DNS rebinding), but the browser then names
    that site. One input has `values` values. `close` ends what answers, and finishes accepted requests if its
    argument says so. While `closing`, `/readyz` returns 503, and every answer ends its connection.
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
        self.hosts = ["*"] if allowed_hosts is None else [_host(name) for name in allowed_hosts]
        self.held_bytes = 0  # of all bodies
        self.closing, self._close = False, close
        self.responses: Counter[tuple[str, str, str]] = Counter()
        self.documents: dict[str, Any] = {}
        self.schemas: dict[str, Any] = {}
        self.router = Router(redirect_slashes=False, lifespan=lifespan)
        self.body_bytes = self.limits.body_bytes or MEGABYTE + BYTES_PER_VALUE * values
        self.threads = ThreadPoolExecutor(DECODERS, "subnetact-serve")
        self._open: set[str] = set()  # paths that need no token
        self.get(
            "/openapi.json", "This document", lambda: reply(self.openapi()), {"openapi": "", "paths": {}}
        )
        kind = "text/plain; version=0.0.4; charset=utf-8"
        metrics = lambda: Response(self.prometheus(), media_type=kind)  # noqa: E731
        self.get("/metrics", "Metrics in Prometheus' text format", metrics, kind="text/plain")
        self.probe("/livez", "Whether the process answers", lambda: "")
        for path in ("/healthz", "/readyz"):
            self.probe(path, "Whether the server should get requests", self.unready)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one exchange as ASGI 3 has it: `scope`, `receive` and `send` are its own."""
        if scope["type"] != "http":
            return await self.router(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        exchange = Exchange(self, path, send)
        try:
            headers = exchange.headers = _headers(scope["headers"], self.limits.header_bytes)
            self._check_host(headers.get("host", ""))
            sender, open_ = scope.get("client") or [""], path in self._open
            exchange.client = self.access.client(headers.get("authorization"), sender[0], open_)
            await self.router({**scope, "app": self, "exchange": exchange}, receive, exchange.send)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status == GONE[0] and not exchange.begun:
                exchange.count(GONE[0])
            elif (
                not exchange.begun
            ):  # Otherwise the server closes the connection in the middle of the answer.
                answer = reply(self.error_document(refusal, path), refusal.status, refusal.headers)
                await answer(scope, receive, exchange.send)

    def add(self, method: str, path: str, answer: Any, document: dict[str, Any], open_: bool = False) -> None:
        """Let `answer` answer the requests for a path, which without a token only an `open_` one does."""
        # What is added last is found first.
        self.router.routes.insert(0, Route(path, answer, methods=[method]))
        error = {JSON: {"schema": schema_of(self.error_document(Refusal(400, "InvalidRequest", ""), path))}}
        for status, described in document["responses"].items():
            if status != "200":
                described.setdefault("content", error)
        if open_:
            self._open.add(path)
            document["security"] = []
        self.documents[path] = {method.lower(): document}

    def get(
        self, path: str, summary: str, make: Callable[[], Response], example: Any = None, kind: str = JSON
    ) -> None:
        """Answer GET and HEAD; the document has the form of an `example` of the answer in JSON."""

        async def answer(_: Request) -> Response:
            return make()

        schema = {"type": "string"} if example is None else schema_of(example)
        self.add("GET", path, answer, operation(summary, {kind: schema}, responses={}))

    def probe(
        self,
        path: str,
        summary: str,
        failing: Callable[[], str],
        told: Callable[[str], dict[str, Any]] = lambda reason: {"status": reason or "ok"},
        open_: bool = True,
    ) -> None:
        """Answer what is `told` of the reason for failing, with status 503 if there is one."""

        async def answer(_: Request) -> Response:
            reason = failing()
            return reply(told(reason), 503 if reason else 200)

        contents = {JSON: schema_of(told(""))}
        document = operation(summary, contents, responses={"503": UNREADY})
        document["responses"]["503"] |= {"content": _content(contents)}
        self.add("GET", path, answer, document, open_)

    def unready(self) -> str:
        """Return why the server should get no requests, or an empty text."""
        return "closing" if self.closing else ""

    def collect(self) -> Iterator[Any]:
        """Yield metrics as families of `prometheus_client`."""
        text = "HTTP answers by route, status and outcome (met or late); 499: the client left before it."
        family = CounterMetricFamily("subnetact_http_responses", text, labels=["route", "status", "outcome"])
        for labels, count in self.responses.items():
            family.add_metric(labels, count)
        yield family

    def prometheus(self) -> str:
        """Return metrics in Prometheus' text format."""
        return generate_latest(self).decode()

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
        schemes = self.access.schemes()
        return {
            "openapi": "3.1.0",
            "info": {"title": "subnetact", "version": __version__},
            "paths": self.documents,
            "components": {"schemas": self.schemas, "securitySchemes": schemes},
            "security": [{name: []} for name in schemes],
        }

    def model_schema(self, model: type[BaseModel]) -> dict[str, Any]:
        """Return the schema of a model, and put those that it refers to among the document's own."""
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        self.schemas |= schema.pop("$defs", {})
        return schema

    @asynccontextmanager
    async def body(self, request: Request, most: int) -> AsyncIterator[bytearray]:
        """Read the body of a request, of at most `most` bytes, and watch its client while the block runs.

        Raises:
            Refusal: the body is too long or too slow, or the client has left, even within the block.
        """
        loop, task, limit_s = asyncio.get_running_loop(), asyncio.current_task(), self.limits.body_s
        refusals: list[Refusal] = []
        raw = bytearray()

        def end(*why: Any) -> None:
            refusals.append(Refusal(*why))
            if task is not None:
                task.cancel()

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            end(*GONE)

        slow = 408, "TooSlow", f"body: not complete after {limit_s:g} s; send it faster"
        # anyio.fail_after takes 14 us more.
        pending: list[asyncio.TimerHandle | asyncio.Task[None]] = [loop.call_later(limit_s, end, *slow)]
        try:
            await self._read(request, raw, most)
            pending[0].cancel()
            begin = lambda: pending.append(loop.create_task(watch()))  # noqa: E731
            pending.append(loop.call_later(WATCH_AFTER_S, begin))
            yield raw
        except asyncio.CancelledError:
            if not refusals:
                raise
            if task is not None and hasattr(task, "uncancel"):  # Python 3.11
                task.uncancel()
            raise refusals[0] from None
        finally:
            self.held_bytes -= len(raw)
            for one in pending:
                one.cancel()

    async def decoded(self, decode: Callable[[Raw], Asked], raw: Raw) -> Asked:
        """Return what `decode` makes of a body; on a thread if that may take long."""
        if len(raw) <= SHORT and not is_image(raw):
            return decode(raw)
        return await asyncio.get_running_loop().run_in_executor(self.threads, decode, raw)

    async def _read(self, request: Request, raw: bytearray, most: int) -> None:
        headers, too_large = exchange_of(request).headers, f"body: more than {most} bytes; send a smaller one"
        if headers.get("content-encoding", "") not in ("", "identity"):
            message = "content-encoding: bodies are not decompressed; send them as they are"
            raise Refusal(415, "Unsupported", message)
        if int(headers.get("content-length", 0)) > most:
            raise Refusal(413, "TooLarge", too_large)
        async for chunk in request.stream():
            if len(raw) + len(chunk) > most:
                raise Refusal(413, "TooLarge", too_large)
            if self.held_bytes + len(chunk) > max(most, self.limits.bodies_bytes):
                message = "the server holds as many request bodies as it may; retry later"
                raise Refusal(503, "Overloaded", message, LATER)
            raw += chunk
            self.held_bytes += len(chunk)

    def _check_host(self, host: str) -> None:
        name = re.sub(r":\d*$", "", host).lower()
        if not any(name == one or (one[0] == "*" and name.endswith(one[1:])) for one in self.hosts):
            raise Refusal(400, "InvalidHost", "host: not a name of this server; use one of its names")


def _host(name: str) -> str:
    """Return a name as the header Host has it: an IPv6 address in brackets."""
    if "*" in name.removeprefix("*.") and name != "*":
        raise ServeError(f"allowed_hosts: got {name!r}; give a name, '*.example.com' or '*'")
    return f"[{name}]" if ":" in name.strip("[]") else name.lower()


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


def _content(contents: Contents) -> dict[str, Any]:
    return {kind: {"schema": schema} for kind, schema in contents.items()}


def operation(
    summary: str,
    answers: Contents,
    contents: Contents | None = None,
    terms: type[BaseModel] | None = None,
    responses: Mapping[str, str] = ERRORS,
) -> dict[str, Any]:
    """Describe an address: its answers, its body, the model of its headers, and what statuses mean."""
    described: dict[str, Any] = {status: {"description": text} for status, text in responses.items()}
    described["200"] = {"description": "The answer.", "content": _content(answers)}
    document: dict[str, Any] = {"summary": summary, "responses": described}
    if contents:
        document["requestBody"] = {"required": True, "content": _content(contents)}
    if terms:
        headers = {f"x-{name.replace('_', '-')}": schema for name, schema in properties(terms).items()}
        document["parameters"] = [{"name": n, "in": "header", "schema": s} for n, s in headers.items()]
    return document


def properties(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schemas of a model's fields; null is what is absent, and no query or header has it."""
    fields: dict[str, Any] = model.model_json_schema()["properties"]
    return {name: {**one["anyOf"][0], "description": one["description"]} for name, one in fields.items()}


def schema_of(example: Any) -> dict[str, Any]:
    """Return the schema of documents like an example; what it has, all have. None stands for anything."""
    if isinstance(example, dict):
        fields = {name: schema_of(one) for name, one in example.items()}
        return {"type": "object", "required": list(fields), "properties": fields}
    if isinstance(example, list):
        return {"type": "array", "items": schema_of(example[0]) if example else {}}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": names[type(example)]} if type(example) in names else {}
