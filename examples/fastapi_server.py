"""Serve a supernet over HTTP with FastAPI and uvicorn; every request says how long it can wait.

    pip install 'subnetact[demo,serve]'
    python examples/fastapi_server.py

Shows how to connect `Batcher.infer` with an asyncio server: each request gets the time that is left of its
deadline, a client that disconnects cancels its request, and shutting down finishes accepted requests.

POST /infer answers a request, GET /metrics returns Prometheus text, and /docs describes both. The metrics
count what reaches the batcher: a malformed body gets 400 before that and is not among the refused.

GET /healthz returns 503 while no worker is up. After SIGTERM it returns 503 for `--grace-s` seconds while the
server keeps serving, so that load balancers can drain it. Accepted requests are always finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from service import (
    SCHEMA,
    Service,
    error_reply,
    health,
    now_ms,
    open_service,
    options,
    read_ask,
    read_json,
    reply,
)
from starlette.types import ASGIApp, Receive, Scope, Send

from subnetact.errors import RequestError

CLIENT_CLOSED = 499


class Arrival:
    """Middleware that notes the arrival time of a request, before its body is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note the time and pass the request on."""
        scope.setdefault("state", {})["arrived_ms"] = now_ms()
        await self._app(scope, receive, send)


def make_app(service: Service) -> FastAPI:
    """Make the application. When it shuts down, it closes the batcher, which finishes accepted requests.

    Args:
        service: the engine and its batcher.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.batcher.close)

    app = FastAPI(title="subnetact", lifespan=lifespan)
    app.state.closing = False
    app.add_middleware(Arrival)

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> JSONResponse:
        status, body, headers = error_reply(error)
        return JSONResponse(body, status, headers)

    @app.post("/infer", openapi_extra={"requestBody": {"content": {"application/json": {"schema": SCHEMA}}}})
    async def infer(request: Request) -> Response:
        arrived_ms = request.state.arrived_ms
        body = read_json(await request.body())
        ask = read_ask(body, service.engine.example, arrived_ms)
        answer = asyncio.ensure_future(service.batcher.infer(*ask))
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answer.done():
            answer.cancel()
            with suppress(asyncio.CancelledError, RequestError):
                await answer
            return Response(status_code=CLIENT_CLOSED)
        return JSONResponse(reply(answer.result(), body["deadline_ms"], arrived_ms))

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.batcher.prometheus(), media_type="text/plain; version=0.0.4")

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        status, body = health(service, app.state.closing)
        return JSONResponse(body, status)

    return app


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Server(uvicorn.Server):
    """A server that, on SIGTERM, keeps serving for a grace period while `/healthz` returns 503.

    Args:
        config: the configuration of uvicorn.
        app: the application.
        grace_s: length of the grace period, in s.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, grace_s: float) -> None:
        super().__init__(config)
        self._app = app
        self._grace_s = grace_s
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Begin to listen and print the address."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        for listening in (s for server in getattr(self, "servers", []) for s in server.sockets):
            print("listening on http://{}:{}".format(*listening.getsockname()[:2]), flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the grace period at the first signal; shut down at once at the second."""
        again, self._app.state.closing = self._app.state.closing, True
        if again or not self._grace_s or self._loop is None:
            super().handle_exit(sig, frame)
        else:
            exit_ = super().handle_exit
            self._loop.call_soon_threadsafe(self._loop.call_later, self._grace_s, exit_, sig, frame)


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    service = open_service(options(__doc__).parse_args())
    app = make_app(service)
    config = uvicorn.Config(app, service.host, service.port, log_level="warning", access_log=False)
    try:
        Server(config, app, service.grace_s).run()
    finally:
        service.batcher.close(drain=False)


if __name__ == "__main__":
    main()
