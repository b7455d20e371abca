"""The ASGI application of a network: every address of the server, behind the limits and the token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl

from subnetact import __version__
from subnetact.errors import DeadlinePassed, InvalidRequest
from subnetact.serve import inference
from subnetact.serve.base_app import UNREADY, Address, BaseApp, Exchange, Reply
from subnetact.serve.exchange import Raw, Refusal, Terms
from subnetact.serve.inference import Ask, Asked, Decoded
from subnetact.serve.limits import Limits
from subnetact.serve.payloads import Images, Signature, named_tensors
from subnetact.serving import Answer
from subnetact.serving.live.batcher import monotonic_ms

SERVER = {"name": "subnetact", "version": __version__, "extensions": ["binary_tensor_data"]}
OWN_SCRIPTS = b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
SAFE_HEADERS = (
    (b"content-security-policy", OWN_SCRIPTS),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)


async def infer_rows(batcher: Any, xs: Sequence[Any], deadline_ms: float, **ask: Any) -> Sequence[Answer]:
    """Infer all rows, each with the options `ask` of `Batcher.infer`; if one fails, withdraw the others."""
    if len(xs) == 1:
        return [await batcher.infer(xs[0], deadline_ms, **ask)]
    tasks = [asyncio.ensure_future(batcher.infer(x, deadline_ms, **ask)) for x in xs]
    try:
        answers: Sequence[Answer] = await asyncio.gather(*tasks)
        return answers
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class ServeApp(BaseApp):
    """The application that `python -m subnetact.serve` runs, to mount it or to run it yourself.

    When the application shuts down, it closes the batcher, which finishes accepted requests. An application
    that is mounted in another one is not told about the end: close the batcher there. The limits for
    connections belong to the server, not to the application; see `subnetact.serve.run`.

    Args:
        batcher: an open `Batcher`, or the client of a cluster.
        engine: its engine, with an example.
        slo_ms: the deadline of requests that name none, in ms.
        name: name of the model in the Open Inference Protocol.
        limits: the limits. If None, the defaults.
        tokens: the name of the client per bearer token. If None, no token is needed.
        image_mean: mean per channel by which images are normalised, after they were scaled to 0..1.
        image_std: standard deviation per channel.
        allowed_hosts: names by which clients may address the server, without ports; requests whose header
            `Host` has another one are refused. If None, any name.

    Raises:
        ServeError: the engine has no example, or a token is too short.

    Example:
        >>> app = subnetact.serve.build_app(batcher, engine, slo_ms=36.0)
        >>> other_app.mount("/digits", app)
    """

    def __init__(
        self,
        batcher: Any,
        engine: Any,
        *,
        slo_ms: float,
        name: str = "model",
        limits: Limits | None = None,
        tokens: Mapping[str, str] | None = None,
        image_mean: tuple[float, ...] = (0.0,),
        image_std: tuple[float, ...] = (1.0,),
        allowed_hosts: Sequence[str] | None = None,
    ) -> None:
        self.signature = Signature(engine.sample)
        values = sum(part.size for part in self.signature.parts)
        super().__init__(limits, tokens, allowed_hosts, values, batcher.close)
        self.batcher, self.name, self.slo_ms = batcher, name, slo_ms
        self.version = str(getattr(engine, "fingerprint", None) or "1")
        # The client of a cluster answers all rows of a request at once.
        self._rows = getattr(batcher, "infer_rows", None) or partial(infer_rows, batcher)
        [output] = engine.run(0, [engine.sample], 1)
        self.outputs = [(name, list(t.shape), t.dtype) for name, t in named_tensors(output, "output")]
        self.images = Images(self.signature, image_mean, image_std)
        model = f"/v2/models/{name}"
        version = f"{model}/versions/{self.version}"
        plain = Address("POST", partial(inference.infer_plain, self), inference.plain_document(self))
        tensors = Address("POST", partial(inference.infer_tensors, self), inference.tensor_document(self))
        self.addresses |= {"/infer": plain, f"{model}/infer": tensors, f"{version}/infer": tensors}
        for path in (model, version):
            self.get(path, "Metadata of the model", lambda: (200, inference.model_metadata(self)))
        for path, what in (("/v2/health", "server"), (model, "model"), (version, "model")):
            summary, open_ = f"Whether the {what} should get requests", path == "/v2/health"
            self.get(f"{path}/ready", summary, self._ready, UNREADY, open_)
        self.get("/v2/health/live", "Whether the server answers", lambda: (200, {"live": True}), open_=True)
        self.get("/v2", "Metadata of the server", lambda: (200, SERVER))
        self.get("/v2/models", "Names of the models", lambda: (200, {"models": [name]}))
        own, kind = files("subnetact.serve"), b"text/html; charset=utf-8"
        page = (own / "status.html").read_bytes().replace(b"PALETTE", (own / "palette.css").read_bytes())
        self.get("/", "The status page", lambda: (200, page, SAFE_HEADERS, kind))
        self.get("/status", "What the status page shows", lambda: (200, self.status(), SAFE_HEADERS))

    def unready(self) -> str:
        """Return why the server should get no requests, or an empty text."""
        return super().unready() or ("" if self.batcher.stats().workers_up else "no worker")

    def prometheus(self) -> str:
        """Return metrics in Prometheus' text format."""
        return str(self.batcher.prometheus())

    def error_document(self, refusal: Refusal, path: str) -> dict[str, Any]:
        """Return in JSON what a client of the address `path` is told of a `refusal`."""
        if path.startswith("/v2"):
            return {"error": f"{refusal.kind}: {refusal}"}
        return super().error_document(refusal, path)

    def _ready(self) -> Reply:
        return (503, {"ready": False}) if self.unready() else (200, {"ready": True})

    def status(self) -> dict[str, Any]:
        """Return the counts of the batcher and the time in s; the page shows the differences of two."""
        stats = self.batcher.stats()
        served_by = {str(subnet): count for subnet, count in stats.served_by.items()}
        accuracy = {str(subnet): round(percent, 2) for subnet, percent in self.batcher.accuracy.items()}
        counts = {name: count for name, count in vars(stats).items() if isinstance(count, (int, float))}
        facts = {"model": self.name, "slo_ms": self.slo_ms, "accuracy": accuracy}
        return {**facts, "time_s": time.monotonic(), **counts, "served_by": served_by}

    async def infer(
        self, exchange: Exchange, decode: Callable[[Raw], Decoded[Asked]]
    ) -> tuple[Asked, Sequence[Answer], dict[str, Any]]:
        """Answer one request of an `exchange`, whose time counts from its arrival.

        Returns:
            What `decode` made of the body, the answers, and facts for the reply.

        Raises:
            InvalidRequest: the query cannot be read.
            DeadlinePassed: the time passed before the body was read. What the batcher raises passes too.
        """

        asked, rows, ask = await exchange.read(decode)
        texts = Terms.header_values(exchange.headers)
        if query := exchange.scope["query_string"]:
            try:
                texts |= parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=16)
            except ValueError:
                raise InvalidRequest("query: not readable; give name=value pairs") from None
        ask.complete(Ask, texts, self.limits.deadline_ms)
        deadline_ms = float(self.slo_ms if ask.deadline_ms is None else ask.deadline_ms)
        left_ms = deadline_ms - (monotonic_ms() - exchange.arrived_ms)
        if left_ms <= 0.0:
            raise DeadlinePassed(
                f"deadline_ms: {deadline_ms:g} ms passed before the request was read; allow more"
            )
        wishes = {"min_accuracy": ask.min_accuracy, "priority": ask.priority, "client": exchange.client}
        answers: Sequence[Answer] = await self._rows(rows, left_ms, **wishes)
        latency_ms = monotonic_ms() - exchange.arrived_ms
        accuracy = round(min([one.accuracy for one in answers]), 2)
        met = latency_ms <= deadline_ms
        return asked, answers, {"accuracy": accuracy, "latency_ms": round(latency_ms, 3), "met": met}


build_app = ServeApp
"""Makes the application of a batcher and its engine."""
