"""The ASGI application: every address of the server, behind the limits and the token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from subnetact import __version__
from subnetact.serve.access import Access
from subnetact.serve.base_app import BaseApp
from subnetact.serve.exchange import Refusal
from subnetact.serve.inference_protocol import InferenceProtocol
from subnetact.serve.limits import Limits
from subnetact.serve.openapi import paths
from subnetact.serve.plain import PlainInference
from subnetact.serve.rows import Answerer
from subnetact.serve.service import Service
from subnetact.serve.status_page import StatusFeed, page

__all__ = ["ServeApp", "build_app"]

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
        access=Access(tokens or {}, allowed_hosts),
        image_mean=image_mean,
        image_std=image_std,
    )
    return ServeApp(service)


class ServeApp(BaseApp):
    """The application of one service.

    Args:
        service: the service.

    Attributes:
        service: the service.
    """

    service: Service
    open_paths = (*BaseApp.open_paths, "/v2/health/live", "/v2/health/ready")

    def __init__(self, service: Service) -> None:
        super().__init__(service, service.close)
        protocol = InferenceProtocol(service, __version__)
        self._add_health()
        self._add_protocol(protocol)
        self._add_status()
        model = f"/v2/models/{service.name}"
        of_version = f"{model}/versions/{service.version}/infer"
        infer = PlainInference(service).infer
        self.inference = {
            "/infer": infer,
            f"{model}/infer": protocol.infer,
            of_version: protocol.infer,
        }

    def error_document(self, refusal: Refusal, path: str) -> dict[str, Any]:
        """Return what a client is told in JSON; the Open Inference Protocol has a form of its own.

        Args:
            refusal: the error.
            path: the address.
        """
        if path.startswith("/v2"):
            return {"error": f"{refusal.kind}: {refusal}"}
        return super().error_document(refusal, path)

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
