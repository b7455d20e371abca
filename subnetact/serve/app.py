"""The ASGI application: every address of the server, behind the limits and the token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.responses import HTMLResponse, Response

from subnetact import __version__
from subnetact.serve import plain
from subnetact.serve.base_app import BaseApp, json_response
from subnetact.serve.inference_protocol import InferenceProtocol
from subnetact.serve.limits import Limits
from subnetact.serve.openapi import UNREADY, inference, tensors
from subnetact.serve.rows import Answerer
from subnetact.serve.service import Service
from subnetact.serve.status_page import SAFE_HEADERS, StatusFeed, page

__all__ = ["ServeApp", "build_app"]
SERVER = {"name": "subnetact", "version": __version__, "extensions": ["binary_tensor_data"]}


def build_app(
    batcher: Answerer,
    engine: Any,
    *,
    slo_ms: float,
    name: str = "model",
    limits: Limits | None = None,
    tokens: Mapping[str, str] | None = None,
    image_mean: tuple[float, ...] = (0.0,),
    image_std: tuple[float, ...] = (1.0,),
    allowed_hosts: Sequence[str] | None = None,
) -> ServeApp:
    """Make the application that `python -m subnetact.serve` runs, to mount it or to run it yourself.

    When the application shuts down, it closes the batcher, which finishes accepted requests. An application
    that is mounted in another one is not told about the end: close the batcher there. The limits for
    connections belong to the server, not to the application; see `subnetact.serve.run`.

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
    images = {"mean": image_mean, "std": image_std}
    return ServeApp(
        Service(batcher, engine, name, slo_ms, images, limits=limits, tokens=tokens), allowed_hosts
    )


class ServeApp(BaseApp):
    """The application of one service: `/infer`, the Open Inference Protocol and the status page."""

    service: Service

    def __init__(self, service: Service, allowed_hosts: Sequence[str] | None = None) -> None:
        super().__init__(service, allowed_hosts)
        protocol = InferenceProtocol(service)
        model = f"/v2/models/{service.name}"
        version = f"{model}/versions/{service.version}"
        self.post("/infer", partial(plain.infer, service), inference(service))
        for path in (model, version):
            self.post(f"{path}/infer", protocol.infer, tensors(service, self.schemas))
            self.get(path, "Metadata of the model", lambda: json_response(protocol.model()))
        for path, what in (("/v2/health", "server"), (model, "model"), (version, "model")):
            summary, open_ = f"Whether the {what} should get requests", path == "/v2/health"
            self.get(f"{path}/ready", summary, self._ready, responses=UNREADY, open_=open_)
        alive = "Whether the server answers"
        self.get("/v2/health/live", alive, lambda: json_response({"live": True}), open_=True)
        self.get("/v2", "Metadata of the server", lambda: json_response(SERVER))
        self.get("/v2/models", "Names of the models", lambda: json_response({"models": [service.name]}))
        self.get("/", "The status page", partial(HTMLResponse, page(), headers=SAFE_HEADERS))
        feed, full = StatusFeed(service), {"503": "As many clients watch as may."}
        self.get("/status/events", "Figures as server-sent events", feed.response, responses=full)

    def _ready(self) -> Response:
        reason = self.service.unready()
        return json_response({"ready": not reason}, 503 if reason else 200)
