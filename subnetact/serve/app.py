"""The ASGI application: every address of the server, behind the limits and the token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from subnetact import __version__
from subnetact.errors import SubnetActError
from subnetact.serve.access import Access
from subnetact.serve.exchange import (
    ClientGone,
    Headers,
    Receive,
    Refusal,
    Scope,
    Send,
    refusal_of,
    send_reply,
)
from subnetact.serve.inference_protocol import InferenceProtocol
from subnetact.serve.limits import Limits
from subnetact.serve.openapi import paths
from subnetact.serve.plain import PlainInference
from subnetact.serve.rows import Answerer
from subnetact.serve.service import Service, now_ms
from subnetact.serve.status_page import StatusFeed, page

__all__ = ["ServeApp", "build_app"]

Inference = Callable[[Scope, Headers, str, Receive, Send, float], Awaitable[None]]
OPEN = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")
"""Addresses that need no token, because load balancers have none."""
CLOSE = (b"connection", b"close")
UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"description": "The server is closing, or no worker is up."}
}
FULL: dict[int | str, dict[str, Any]] = {503: {"description": "As many clients watch as may."}}
SAFE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


def build_app(
    batcher: Answerer,
    engine: Any,
    *,
    slo_ms: float,
    name: str = "model",
    limits: Limits | None = None,
    tokens: dict[str, str] | None = None,
    image_mean: tuple[float, ...] = (0.0,),
    image_std: tuple[float, ...] = (1.0,),
    allowed_hosts: Sequence[str] | None = None,
) -> ServeApp:
    """Make the application that `python -m subnetact.serve` runs, to mount it or to run it yourself.

    When the application shuts down, it closes the batcher, which finishes accepted requests. An application
    that is mounted in another one is not told about the end: close the batcher there. The time limits for
    slow and idle connections belong to the server, not to the application; see `subnetact.serve.run`.

    Args:
        batcher: an open batcher, or the client of a cluster.
        engine: its engine, with an example.
        slo_ms: the deadline of requests that name none, in ms.
        name: name of the model in the Open Inference Protocol.
        limits: the limits. If None, the defaults.
        tokens: the name of the client per bearer token. If None, no token is needed.
        image_mean: mean per channel by which images are normalised, after they were scaled to 0..1.
        image_std: standard deviation per channel.
        allowed_hosts: names by which clients may address the server, without ports; requests whose header
            `Host` has another one are refused. If None, any name.

    Returns:
        The application.

    Raises:
        ServeError: the engine has no example, or a token is too short.

    Example:
        >>> app = subnetact.serve.build_app(batcher, engine, slo_ms=36.0)
        >>> other_app.mount("/digits", app)
    """
    service = Service(
        batcher,
        engine,
        name=name,
        slo_ms=slo_ms,
        limits=limits,
        access=Access(tokens or {}),
        image_mean=image_mean,
        image_std=image_std,
        allowed_hosts=allowed_hosts,
    )
    return ServeApp(service)


class ServeApp(FastAPI):
    """The application of one service. Inference bypasses the routing of FastAPI, which costs more than JSON.

    Args:
        service: the service.

    Attributes:
        service: the service.
    """

    def __init__(self, service: Service) -> None:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(service.close)

        super().__init__(
            title="subnetact", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
        )
        self.service = service
        protocol = InferenceProtocol(service, __version__)
        self._add_health()
        self._add_protocol(protocol)
        self._add_status()
        self.add_exception_handler(HTTPException, _known)
        self.add_exception_handler(SubnetActError, _known)
        model = f"/v2/models/{service.name}"
        of_version = f"{model}/versions/{service.version}/infer"
        infer = PlainInference(service).infer
        self._inference: dict[str, tuple[Inference, bool]] = {
            "/infer": (infer, False),
            f"{model}/infer": (protocol.infer, True),
            of_version: (protocol.infer, True),
        }

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
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        protocol = path.startswith("/v2")
        try:
            headers = Headers(scope["headers"])
            if not self.service.serves_host(headers.get(b"host")):
                raise Refusal(
                    400, "InvalidHost", "host: the server is not addressed by this name; see --allowed-hosts"
                )
            client = self._client(scope, headers, path)
            found = self._inference.get(path)
            if found is None:
                await self._route(scope, receive, send)
            elif scope["method"] != "POST":
                raise HTTPException(405, headers={"Allow": "POST"})
            else:
                await found[0](scope, headers, client, receive, send, arrived_ms)
        except ClientGone:
            return
        except Exception as error:
            await _refuse(send, error, protocol)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except Exception as error:  # FastAPI has told the client, without the reason, and raises it again
            refusal_of(error)

    def _client(self, scope: Scope, headers: Headers, path: str) -> str:
        address = scope.get("client")
        client = self.service.access.client(headers.get(b"authorization"), address[0] if address else "")
        if client is None and path not in OPEN:
            raise HTTPException(401, headers={"WWW-Authenticate": 'Bearer, Basic realm="subnetact"'})
        return client or ""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        if self.openapi_schema is None:
            document = super().openapi()
            document["paths"] = {**paths(self.service), **document["paths"]}
            self.openapi_schema = document
        return self.openapi_schema

    def _health(self) -> tuple[int, str]:
        if self.service.closing:
            return 503, "closing"
        if not self.service.batcher.stats().workers_up:
            return 503, "no worker"
        return 200, "ok"

    def _add_health(self) -> None:

        @self.get("/healthz", responses=UNREADY, summary="Whether the server should get requests")
        @self.get("/readyz", responses=UNREADY, summary="Whether the server should get requests")
        async def healthz() -> JSONResponse:
            status, text = self._health()
            return JSONResponse({"status": text}, status)

        @self.get("/metrics", response_class=PlainTextResponse, summary="Metrics in Prometheus' text format")
        async def metrics() -> PlainTextResponse:
            text = self.service.batcher.prometheus()
            return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _add_protocol(self, protocol: InferenceProtocol) -> None:
        model = f"/v2/models/{self.service.name}"
        version = f"{model}/versions/{self.service.version}"

        @self.get("/v2/health/live", summary="Whether the server answers")
        async def live() -> JSONResponse:
            return JSONResponse({"live": True})

        @self.get("/v2/health/ready", responses=UNREADY, summary="Whether the server should get requests")
        @self.get(f"{model}/ready", responses=UNREADY, summary="Whether the model should get requests")
        @self.get(f"{version}/ready", responses=UNREADY, summary="Whether the model should get requests")
        async def ready() -> JSONResponse:
            status, _ = self._health()
            return JSONResponse({"ready": status == 200}, status)

        @self.get("/v2", summary="Metadata of the server")
        async def server() -> JSONResponse:
            return JSONResponse(protocol.server())

        @self.get("/v2/models", summary="Names of the models")
        async def models() -> JSONResponse:
            return JSONResponse({"models": [self.service.name]})

        @self.get(model, summary="Metadata of the model")
        @self.get(version, summary="Metadata of the model")
        async def metadata() -> JSONResponse:
            return JSONResponse(protocol.model())

    def _add_status(self) -> None:
        service = self.service
        accuracy = {i: round(percent, 2) for i, percent in service.batcher.accuracy.items()}
        facts = {"model": service.name, "slo_ms": service.slo_ms, "accuracy": accuracy}
        feed = StatusFeed(service.batcher.stats, facts, lambda: service.closing, service.limits.streams)
        html = page()

        @self.get("/", response_class=HTMLResponse, summary="The status page")
        async def status() -> HTMLResponse:
            return HTMLResponse(html, headers=SAFE_HEADERS)

        @self.get("/status/events", responses=FULL, summary="Figures as server-sent events, without end")
        async def events() -> Response:
            if feed.full:
                return JSONResponse(
                    {"error": "Overloaded", "message": "too many clients watch; retry later"}, 503
                )
            return StreamingResponse(feed.events(), media_type="text/event-stream", headers=SAFE_HEADERS)


async def _known(request: Request, error: Exception) -> Response:
    """Answer an error of the routes as that of the inferences."""
    sent: list[dict[str, Any]] = []

    async def keep(message: Any) -> None:
        sent.append(message)

    await _refuse(keep, error, request.url.path.startswith("/v2"))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Response(sent[1]["body"], sent[0]["status"], headers)


async def _refuse(send: Send, error: Exception, protocol: bool) -> None:
    """Send an error. The connection is closed, because part of the body may not have been read."""
    if isinstance(error, HTTPException):
        status, kind, message = error.status_code, _KINDS.get(error.status_code, "Refused"), ""
        more = dict(error.headers or {})
        message = _MESSAGES.get(status, "the request cannot be handled")
    else:
        refusal = refusal_of(error)
        status, kind, message, more = refusal.status, refusal.kind, str(refusal), refusal.headers
    body = {"error": f"{kind}: {message}"} if protocol else {"error": kind, "message": message}
    headers = [(name.lower().encode(), value.encode()) for name, value in more.items()]
    if status in (400, 401, 408, 413, 415, 431):
        headers.append(CLOSE)
    await send_reply(send, status, body, headers)


_KINDS = {401: "Unauthorized", 404: "NotFound", 405: "MethodNotAllowed"}
_MESSAGES = {
    401: "give the server's token: Authorization: Bearer TOKEN",
    404: "there is no such address; /openapi.json lists all",
    405: "this address takes another method; /openapi.json lists all",
}
