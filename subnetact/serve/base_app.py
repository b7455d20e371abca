"""The base of all applications: it checks server names and tokens, and tells errors without secrets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import orjson
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from subnetact import __version__
from subnetact.errors import ServeError
from subnetact.serve.exchange import ClientGone, Exchange, Headers, Refusal, refusal_of, send_reply
from subnetact.serve.openapi import UNREADY, operation
from subnetact.serve.service import BaseService, now_ms

__all__ = ["Address", "BaseApp"]

CLOSES = (400, 401, 408, 413, 415, 431)
"""Statuses after which the connection is closed, because part of the body may not have been read."""


class Address(NamedTuple):
    """What an address does: `operation` describes it in OpenAPI, and `open` needs no token."""

    method: str
    answer: Callable[[Exchange], Awaitable[None]]
    operation: dict[str, Any]
    open: bool


class BaseApp:
    """An ASGI application whose requests pass the names of the server and the tokens first.

    Addresses are found in a dictionary: none has a part that varies. Every exception becomes an answer
    without anything of the server's code or files, unless an answer has begun already: then the exchange ends
    there, and the server closes the connection. Exceptions that are not expected are logged, with status 500.

    The service is closed when the application shuts down. `allowed_hosts` are names without ports, by which
    clients may address the server; `*.example.com` has all below it, and None is any name. A page of another
    site can make a browser send requests to this machine (DNS rebinding); the browser then names that site.
    """

    def __init__(self, service: BaseService, allowed_hosts: Iterable[str] | None = None) -> None:
        @asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(service.close)

        self.service = service
        self.addresses: dict[str, Address] = {}
        self.schemas: dict[str, Any] = {}
        self.router = Router(lifespan=lifespan)
        self._entry: Any = self._exchange
        if allowed_hosts is not None:
            names = [f"[{name}]" if ":" in name.strip("[]") else name for name in allowed_hosts]
            try:
                self._entry = TrustedHostMiddleware(self._exchange, names, www_redirect=False)
            except AssertionError as error:
                raise ServeError(f"allowed_hosts: got {names}. {error}") from None
        for path in ("/healthz", "/readyz"):
            summary = "Whether the server should get requests"
            self.get(path, summary, self._healthz, responses=UNREADY, open_=True)
        self.get("/metrics", "Metrics in Prometheus' text format", self._metrics)
        self.get("/openapi.json", "This document", lambda: Response(orjson.dumps(self.openapi()), 200, JSON))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one exchange as ASGI 3 has it: `scope`, `receive` and `send` are its own."""
        await (self._entry if scope["type"] == "http" else self.router)(scope, receive, send)

    def get(
        self,
        path: str,
        summary: str,
        make: Callable[[], Response],
        responses: Any = None,
        open_: bool = False,
    ) -> None:
        """Answer GET requests; `responses` describes other statuses than 200, `open_` needs no token."""

        async def answer(exchange: Exchange) -> None:
            await make()(exchange.scope, exchange.receive, exchange.send)

        described = operation(summary, responses=responses or {})
        self.addresses[path] = Address("GET", answer, described, open_)

    def post(
        self, path: str, answer: Callable[[Exchange], Awaitable[None]], operation: dict[str, Any]
    ) -> None:
        """Answer POST requests; `operation` describes them in the OpenAPI document."""
        self.addresses[path] = Address("POST", answer, operation, False)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        return {
            "openapi": "3.1.0",
            "info": {"title": "subnetact", "version": __version__},
            "paths": {path: {one.method.lower(): one.operation} for path, one in self.addresses.items()},
            "components": {"schemas": self.schemas},
        }

    def _healthz(self) -> Response:
        reason = self.service.unready()
        return json_response({"status": reason or "ok"}, 503 if reason else 200)

    def _metrics(self) -> Response:
        return PlainTextResponse(self.service.prometheus(), media_type="text/plain; version=0.0.4")

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_ms = now_ms()
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        begun = False

        async def send_first(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            headers = Headers(scope["headers"], self.service.limits.header_bytes)
            address = self.addresses.get(path)
            sender, open_ = scope.get("client") or [""], address is not None and address.open
            client = self.service.access.client(headers.get(b"authorization"), sender[0], open_)
            if address is None:
                raise Refusal(404, "NotFound", "there is no such address; /openapi.json lists all")
            if scope["method"] != address.method:
                message = f"this address takes {address.method}; /openapi.json lists all"
                raise Refusal(405, "MethodNotAllowed", message, {"Allow": address.method})
            await address.answer(Exchange(scope, headers, client, receive, send_first, arrived_ms))
        except ClientGone:
            return
        except Exception as error:
            refusal = refusal_of(error)
            if not begun:  # otherwise the server closes the connection in the middle of the answer
                more = [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
                if refusal.status in CLOSES:
                    more.append((b"connection", b"close"))
                document = self.service.error_document(refusal, path)
                await send_reply(send, refusal.status, document, more)


JSON = {"content-type": "application/json"}


def json_response(document: Any, status: int = 200) -> Response:
    """Return a response of JSON."""
    return Response(orjson.dumps(document), status, JSON)
