"""The base of all applications: it checks server names and tokens, and tells errors without secrets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from subnetact import __version__
from subnetact.errors import SubnetActError
from subnetact.serve.access import Access
from subnetact.serve.exchange import (
    ClientGone,
    Exchange,
    Headers,
    Receive,
    Refusal,
    Scope,
    Send,
    internal_error,
    refusal_of,
    send_reply,
)
from subnetact.serve.limits import Limits
from subnetact.serve.service import now_ms

__all__ = ["BaseApp", "Inference", "Served"]

Inference = Callable[[Exchange], Awaitable[None]]

CLOSES = (400, 401, 408, 413, 415, 431)
"""Statuses after which the connection is closed, because part of the body may not have been read."""
KINDS = {401: "Unauthorized", 404: "NotFound", 405: "MethodNotAllowed"}
MESSAGES = {
    401: "give the server's token: Authorization: Bearer TOKEN",
    404: "there is no such address; /openapi.json lists all",
    405: "this address takes another method; /openapi.json lists all",
}


class Closable(Protocol):
    """What answers the requests."""

    def close(self, drain: bool = True) -> None:
        """Finish or drop accepted requests, and refuse new ones."""


class Served(Protocol):
    """What `run` and `BaseApp` have to know of a service.

    Attributes:
        limits: what clients may send.
        access: who may use the server.
        closing: whether the server is about to end.
    """

    limits: Limits
    access: Access
    closing: bool

    @property
    def batcher(self) -> Closable:
        """What answers the requests."""


class BaseApp(FastAPI):
    """An application whose requests pass the names of the server and the tokens first.

    Inference bypasses the routing of FastAPI, which costs more than JSON. Every exception, of whatever type,
    becomes an answer of the form that `error_document` returns, with nothing of the server's code or files in
    it, unless an answer has begun already: then the exchange ends there, and the server closes the
    connection. Exceptions that are not expected are logged, with status 500.

    Args:
        service: the service.
        close: finishes accepted requests when the application shuts down; runs in a thread.

    Attributes:
        service: the service.
        inference: what handles the POST requests of an address, by its path below the one where the
            application is mounted.
    """

    open_paths: tuple[str, ...] = ("/healthz", "/readyz")
    """Addresses that need no token, because load balancers have none."""

    def __init__(self, service: Served, close: Callable[[], None]) -> None:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(close)

        super().__init__(
            title="subnetact", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
        )
        self.service = service
        self.inference: dict[str, Inference] = {}
        self.add_exception_handler(HTTPException, self._known)
        self.add_exception_handler(SubnetActError, self._known)
        self.add_exception_handler(Exception, self._unexpected)

    def error_document(self, refusal: Refusal, path: str) -> dict[str, Any]:  # noqa: ARG002
        """Return what a client is told in JSON.

        Args:
            refusal: the error.
            path: the address.
        """
        return {"error": refusal.kind, "message": str(refusal)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one exchange as ASGI 3 has it.

        Args:
            scope: the scope.
            receive: the receiving side.
            send: the sending side.
        """
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await super().__call__(scope, receive, send)
            return
        arrived_ms = now_ms()
        path = _below_mount(scope)
        begun = False

        async def send_first(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            headers = Headers(scope["headers"])
            client = self._client(scope, headers, path)
            handler = self.inference.get(path)
            if handler is None:
                await super().__call__(scope, receive, send_first)
            elif scope["method"] != "POST":
                raise HTTPException(405, headers={"Allow": "POST"})
            else:
                await handler(Exchange(scope, headers, client, receive, send_first, arrived_ms))
        except ClientGone:
            return
        except Exception as error:
            status, document, more = self._told(path, error)
            if not begun:  # otherwise the server closes the connection in the middle of the answer
                await send_reply(send, status, document, more)

    def _client(self, scope: Scope, headers: Headers, path: str) -> str:
        if not self.service.access.serves(headers.get(b"host")):
            raise Refusal(
                400, "InvalidHost", "host: the server is not addressed by this name; see --allowed-hosts"
            )
        address = scope.get("client")
        client = self.service.access.client(headers.get(b"authorization"), address[0] if address else "")
        if client is None and path not in self.open_paths:
            raise HTTPException(401, headers={"WWW-Authenticate": 'Bearer, Basic realm="subnetact"'})
        return client or ""

    async def _known(self, request: Request, error: Exception) -> Response:
        status, document, headers = self._told(_below_mount(request.scope), error)
        return JSONResponse(document, status, {name.decode(): value.decode() for name, value in headers})

    async def _unexpected(self, request: Request, _: Exception) -> Response:
        """Answer an unexpected error; FastAPI raises the error once more, and `__call__` logs it."""
        return JSONResponse(self.error_document(internal_error(), _below_mount(request.scope)), 500)

    def _told(self, path: str, error: Exception) -> tuple[int, dict[str, Any], list[tuple[bytes, bytes]]]:
        """Return the status, the document and the headers by which a client is told of an error."""
        if isinstance(error, HTTPException):
            status = error.status_code
            message = MESSAGES.get(status, "the request cannot be handled")
            refusal = Refusal(status, KINDS.get(status, "Refused"), message, error.headers)
        else:
            refusal = refusal_of(error)
        headers = [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
        if refusal.status in CLOSES:
            headers.append((b"connection", b"close"))
        return refusal.status, self.error_document(refusal, path), headers


def _below_mount(scope: Scope) -> str:
    """Return the address below the one where the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"
