"""The base of all applications: names, tokens, limits and addresses, errors without secrets, and counts."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

import orjson
from prometheus_client import generate_latest
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from subnetact import __version__
from subnetact.errors import DeadlinePassed, InvalidRequest, ServeError
from subnetact.serve.access import Access
from subnetact.serve.exchange import GONE, LATER, Raw, Refusal, Terms, header_names, refusal_of, reply
from subnetact.serve.limits import BYTES_PER_VALUE, MEGABYTE, Limits
from subnetact.serve.logs import request_id, trace_id
from subnetact.serving.live.batcher import monotonic_ms
from subnetact.serving.live.histograms import MILLISECONDS, Histogram
from subnetact.serving.live.prometheus import buckets, family_of

CLOSES = (400, 401, 408, 413, 415, 431)  # the connection, as part of the body may not have been read
SHORT = 32 * 1024  # bodies of up to this many bytes are decoded at once, and longer ones on a thread
LOOK_AFTER_S = 0.02  # before the server looks at slow bodies and clients that leave; most requests are done
DECODERS = 2  # threads
ARRIVED = "subnetact.arrived_unix_ms"
"""The key in an ASGI scope of the time of day when a proxy got the request, from when on its time counts."""
DUE = "x-deadline-unix-ms"
REQUEST_ID = re.compile(r"[!-~]{1,128}")
TRACE = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")  # W3C Trace Context
_log = logging.getLogger(__name__)
Asked = TypeVar("Asked")
DOCUMENT: Mapping[str, Any] = orjson.loads((files("subnetact.serve") / "openapi.json").read_bytes())
"""All addresses of all applications in OpenAPI, without what they take."""


def unix_ms() -> float:
    """Return the time of the machine's clock, in ms since 1970."""
    return time.time_ns() * 1e-6


class Exchange(Request):
    """A request with the name of its `sender` and when it arrived.

    Its answer is counted as it ends; `outcome` says whether it was in time, if that was asked for. The `id`
    is that of the header `x-request-id`, or a new one.
    """

    def __init__(self, app: BaseApp, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__({**scope, "app": app, "exchange": self}, receive, send)
        self.arrived_ms = monotonic_ms()
        if ARRIVED in scope:
            self.arrived_ms -= max(0.0, unix_ms() - scope[ARRIVED])
        self.path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        name = self.headers.get("x-request-id", "")
        self.id = name if REQUEST_ID.fullmatch(name) else os.urandom(8).hex()
        request_id.set(self.id)
        if trace := TRACE.fullmatch(self.headers.get("traceparent", "")):
            trace_id.set(trace[1])
        self.sender, self.outcome, self.status, self.counted = "", "", 0, False

    def header_values(self, kind: type[Terms]) -> dict[str, str]:
        """Return the fields of `kind` that are given as headers.

        The header `x-deadline-unix-ms` is the time of day, in ms since 1970, when the answer is due.
        """
        texts = {name: self.headers[text] for name, text in header_names(kind) if text in self.headers}
        if (due := self.headers.get(DUE)) is not None:
            if not (due.isdecimal() and len(due) < 16):
                raise InvalidRequest(f"{DUE}: got {due[:60]!r}; give whole ms since 1970")
            deadline_ms = int(due) - unix_ms() + monotonic_ms() - self.arrived_ms
            if deadline_ms <= 0.0:
                raise DeadlinePassed(f"{DUE}: the time passed before the request arrived; allow more")
            texts.setdefault("deadline_ms", f"{deadline_ms:.3f}")
        return texts

    def left_ms(self, name: str, limit_ms: float) -> float:
        """Return what is left of a time from the arrival on, which a client calls `name`.

        Raises:
            DeadlinePassed: nothing is left.
        """
        left_ms = limit_ms - (monotonic_ms() - self.arrived_ms)
        if left_ms <= 0.0:
            raise DeadlinePassed(f"{name}: {limit_ms:g} ms passed before the request was read; allow more")
        return left_ms

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"].append((b"x-request-id", self.id.encode()))
            if self.app.closing or message["status"] in CLOSES:
                message["headers"].append((b"connection", b"close"))
        elif not message.get("more_body"):
            self.count(self.status)
        await self._send(message)

    def count(self, status: int) -> None:
        """Count the answer. All addresses that do not exist have one label, so that labels stay few."""
        route, took_ms = self.path if self.path in self.app.paths else "", monotonic_ms() - self.arrived_ms
        self.counted = True
        self.app.responses[route, str(status), self.outcome] += 1
        self.app.latencies_ms[route].add(took_ms)
        _log.debug("%s %r %d in %.1f ms for %s", self.method, self.path, status, took_ms, self.sender)


class Endpoint(NamedTuple):
    """An address of the router; the application makes answers of its errors."""

    answer: Callable[[Exchange], Awaitable[Response]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        response = await self.answer(scope["exchange"])
        await response(scope, receive, send)


def responses_metric(counts: Mapping[Any, int], *more: str) -> Any:
    """Return the counts of answers as a metric; their last labels are named `more`."""
    text = "HTTP answers by route, status and outcome (met or late); 499: the client left before it."
    names = ["route", "status", "outcome", *more]
    return family_of("Counter", "subnetact_http_responses", text, names, counts.items())


class BaseApp:
    """An ASGI application whose requests pass the names of the server and the tokens first.

    Every exception becomes an answer without anything of the server's code or files, unless an answer has
    begun already: then the server closes the connection. `allowed_hosts` are names without ports: a page of
    another site can make a browser send requests to this machine (DNS rebinding), but the browser then names
    that site. One input has `values` values, and `names` fill
    the paths of openapi.json. `close` ends what answers, and finishes accepted requests if its
    argument says so. While `closing`, `/readyz` returns 503, and every answer ends its connection.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        tokens: Mapping[str, str] | None = None,
        allowed_hosts: Iterable[str] | None = None,
        values: int = 0,
        close: Callable[[bool], object] = lambda _: None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        @asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.close)

        self.limits = limits or Limits()
        self.access = Access(tokens or {})
        self.hosts = {"*"} if allowed_hosts is None else set(map(_host, allowed_hosts))
        self.held_bytes = 0  # of all bodies
        self.closing, self._close = False, close
        self.responses: Counter[tuple[str, str, str]] = Counter()
        self.latencies_ms: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(MILLISECONDS))
        self.paths: dict[str, Any] = {}
        self.names: Mapping[str, str] = names or {}
        self.schemas: dict[str, Any] = {}
        self.router = Router(redirect_slashes=False, lifespan=lifespan)
        self.body_bytes = self.limits.body_bytes or MEGABYTE + BYTES_PER_VALUE * values
        self.threads = ThreadPoolExecutor(DECODERS, "subnetact-serve")
        self._open: set[str] = set()  # paths that need no token
        kind = "text/plain; version=0.0.4; charset=utf-8"
        self.get("/openapi.json", lambda: reply(self.openapi()))
        self.get("/metrics", lambda: Response(self.prometheus(), media_type=kind))
        self.get("/livez", lambda: reply({"status": "ok"}), open_=True)
        for path in ("/healthz", "/readyz"):
            self.get(path, self._health, open_=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one exchange as ASGI 3 has it: `scope`, `receive` and `send` are its own."""
        if scope["type"] != "http":
            return await self.router(scope, receive, send)
        exchange = Exchange(self, scope, receive, send)
        try:
            headers = exchange.headers
            _check_headers(headers, self.limits.header_bytes)
            self._check_host(headers.get("host", ""))
            sender, open_ = scope.get("client") or [""], exchange.path in self._open
            exchange.sender = self.access.client(headers.get("authorization"), sender[0], open_)
            await self.router.app(exchange.scope, receive, exchange.send)
        except Exception as error:
            refusal = refusal_of(error)
            if exchange.status or refusal.status == GONE[0]:  # the server closes the connection
                exchange.count(refusal.status)
            else:
                told = self.error_document(refusal, exchange.path)
                await reply(told, refusal.status, refusal.headers)(scope, receive, exchange.send)
        finally:
            if not exchange.counted:
                exchange.count(GONE[0])

    def add(self, method: str, path: str, answer: Any, open_: bool = False, **taken: Any) -> None:
        """Let `answer` answer the requests for a path of openapi.json; `open_` ones need no token.

        The document says of it besides what `taken` has: the body and the parameters.
        """
        described = DOCUMENT["paths"].get(path, {}).get(method.lower(), {}) | taken
        path = path.format_map(self.names)
        # What is added last is found first.
        self.router.routes.insert(0, Route(path, Endpoint(answer), methods=[method]))  # type: ignore[arg-type]
        if open_:
            self._open.add(path)
            described["security"] = []
        self.paths[path] = {method.lower(): described}

    def get(self, path: str, make: Callable[[], Response], open_: bool = False) -> None:
        """Answer GET and HEAD."""

        async def answer(_: Exchange) -> Response:
            return make()

        self.add("GET", path, answer, open_)

    def _health(self) -> Response:
        reason = self.unready()
        return reply({"status": reason or "ok"}, 503 if reason else 200)

    def unready(self) -> str:
        """Return why the server should get no requests, or an empty text."""
        return "closing" if self.closing else ""

    def collect(self) -> Iterator[Any]:
        """Yield metrics as families of `prometheus_client`."""
        yield responses_metric(self.responses)
        text = "Time from the arrival of a request to the end of its answer, by route."
        times = [([route], *buckets(histogram, 1e-3)) for route, histogram in self.latencies_ms.items()]
        yield family_of("Histogram", "subnetact_http_latency_seconds", text, ["route"], times)

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
        parts, facts = DOCUMENT["components"], {**DOCUMENT["info"], "version": __version__}
        parts = {**parts, "schemas": parts["schemas"] | self.schemas}
        security = DOCUMENT["security"] if self.access.needed else []
        return {**DOCUMENT, "info": facts, "paths": self.paths, "components": parts, "security": security}

    def model_schema(self, model: type[BaseModel]) -> dict[str, Any]:
        """Return the schema of a model, and put those that it refers to among the document's own."""
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        self.schemas |= schema.pop("$defs", {})
        return schema

    @asynccontextmanager
    async def body(self, exchange: Exchange, most: int) -> AsyncIterator[bytearray]:
        """Read the body of a request, of at most `most` bytes, and watch its client while the block runs.

        Raises:
            Refusal: the body is too long or too slow, or the client has left, even within the block.
        """
        loop, limit_s = asyncio.get_running_loop(), self.limits.body_s
        task: Any = asyncio.current_task()
        refusals: list[Refusal] = []
        raw = bytearray()

        def end(*why: Any) -> None:
            refusals.append(Refusal(*why))
            task.cancel()

        async def watch() -> None:
            while (await exchange.receive())["type"] != "http.disconnect":
                pass
            end(*GONE)

        def look() -> None:
            slow = 408, "TooSlow", f"body: not complete after {limit_s:g} s; send it faster"
            pending.append(loop.create_task(watch()) if complete else loop.call_later(limit_s, end, *slow))

        complete = False
        # One timer for a usual request, which ends before it; anyio.fail_after takes 14 us more.
        pending: list[asyncio.TimerHandle | asyncio.Task[None]] = [loop.call_later(LOOK_AFTER_S, look)]
        try:
            await self._read(exchange, raw, most)
            complete = True
            if pending[1:]:
                pending.pop().cancel()
                look()
            yield raw
        except asyncio.CancelledError:
            if not refusals:
                raise
            if hasattr(task, "uncancel"):  # Python 3.11
                task.uncancel()
            raise refusals[0] from None
        finally:
            self.held_bytes -= len(raw)
            for one in pending:
                one.cancel()

    async def decoded(self, decode: Callable[[Raw], Asked], raw: Raw) -> Asked:
        """Return what `decode` makes of a body; on a thread if that may take long."""
        if len(raw) <= SHORT:
            return decode(raw)
        return await asyncio.get_running_loop().run_in_executor(self.threads, decode, raw)

    async def _read(self, exchange: Exchange, raw: bytearray, most: int) -> None:
        headers, too_large = exchange.headers, f"body: more than {most} bytes; send a smaller one"
        if headers.get("content-encoding", "") not in ("", "identity"):
            message = "content-encoding: bodies are not decompressed; send them as they are"
            raise Refusal(415, "Unsupported", message)
        if int(headers.get("content-length", 0)) > most:
            raise Refusal(413, "TooLarge", too_large)
        async for chunk in exchange.stream():
            if len(raw) + len(chunk) > most:
                raise Refusal(413, "TooLarge", too_large)
            if self.held_bytes + len(chunk) > max(most, self.limits.bodies_bytes):
                message = "the server holds as many request bodies as it may; retry later"
                raise Refusal(503, "Overloaded", message, LATER)
            raw += chunk
            self.held_bytes += len(chunk)

    def _check_host(self, host: str) -> None:
        front, _, port = host.lower().rpartition(":")
        name = front if port.isdecimal() else host.lower()
        if name not in self.hosts and not any(name.endswith(one[1:]) for one in self.hosts if one[0] == "*"):
            raise Refusal(400, "InvalidHost", "host: not a name of this server; use one of its names")


def _host(name: str) -> str:
    """Return a name as the header Host has it: an IPv6 address in brackets."""
    if "*" in name.removeprefix("*.") and name != "*":
        raise ServeError(f"allowed_hosts: got {name!r}; give a name, '*.example.com' or '*'")
    return f"[{name}]" if ":" in name.strip("[]") else name.lower()


def _check_headers(headers: Headers, most: int) -> None:
    """Refuse headers of more than `most` bytes, or with contradictions."""
    for name in ("content-length", "transfer-encoding", "host"):
        if len(headers.getlist(name)) > 1:
            raise InvalidRequest(f"{name}: given twice; send one")
    if sum(len(name) + len(value) for name, value in headers.raw) > most:
        raise Refusal(431, "TooLarge", "headers: more bytes than this server reads; send fewer")
    length = headers.get("content-length", "0")
    both = "transfer-encoding" in headers and "content-length" in headers
    if both or not (length.isdecimal() and len(length) < 20):
        raise InvalidRequest(
            "content-length: no whole number, or beside transfer-encoding; send the number of bytes"
        )


def taking(
    contents: Mapping[str, Any], headers: type[BaseModel], query: type[BaseModel] | None = None
) -> dict[str, Any]:
    """Describe what an address takes: schemas of bodies by content type, and models of headers and query."""
    content = {kind: {"schema": schema} for kind, schema in contents.items()}
    fields = properties(headers)
    places = [("header", header, fields[name]) for name, header in header_names(headers)]
    places += [("query", name, one) for name, one in properties(query).items()] if query else []
    parameters = [{"name": name, "in": place, "schema": schema} for place, name, schema in places]
    return {"requestBody": {"required": True, "content": content}, "parameters": parameters}


def properties(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schemas of a model's fields; null is what is absent, and no query or header has it."""
    fields: dict[str, Any] = model.model_json_schema()["properties"]
    return {name: {**one["anyOf"][0], "description": one["description"]} for name, one in fields.items()}
