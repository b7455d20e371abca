"""The ASGI application of a network: every address of the server, behind the limits and the token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any, Protocol

from starlette.responses import HTMLResponse, Response

from subnetact import __version__
from subnetact.serve import inference
from subnetact.serve.base_app import BaseApp, Exchange
from subnetact.serve.exchange import CommonModel, Refusal, Terms, reply
from subnetact.serve.inference import Model, PlainTerms
from subnetact.serve.limits import BYTES_PER_VALUE, MEGABYTE, Limits
from subnetact.serve.payloads import Signature, named_tensors
from subnetact.serving import Answer
from subnetact.serving.live.batcher import monotonic_ms
from subnetact.serving.live.prometheus import Collector, HasStats

SERVER = {"name": "subnetact", "version": __version__, "extensions": ["binary_tensor_data"]}
OWN_SCRIPTS = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
SAFE_HEADERS = {
    "content-security-policy": OWN_SCRIPTS,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


class _Service(HasStats, Protocol):
    """What answers requests: a `Batcher`, or the client of a cluster, which takes all rows at once."""

    def close(self, drain: bool = True) -> None: ...


async def infer_rows(batcher: Any, xs: Sequence[Any], deadline_ms: float, **ask: Any) -> Sequence[Answer]:
    """Infer all rows, each with the options `ask` of `Batcher.infer`; if one fails, withdraw the others."""
    if len(xs) == 1:
        return [await batcher.infer(xs[0], deadline_ms, **ask)]
    batcher.check_room(len(xs))  # a part of them would only take the room of others
    tasks = [asyncio.ensure_future(batcher.infer(x, deadline_ms, **ask)) for x in xs]
    try:
        return list(await asyncio.gather(*tasks))
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
        batcher: _Service,
        engine: Any,
        *,
        slo_ms: float,
        name: str = "model",
        limits: Limits | None = None,
        tokens: Mapping[str, str] | None = None,
        allowed_hosts: Sequence[str] | None = None,
    ) -> None:
        signature = Signature(engine.sample)
        values = sum(part.size for part in signature.parts)
        version = str(getattr(engine, "fingerprint", None) or "1")
        names = {"name": name, "version": version}
        super().__init__(limits, tokens, allowed_hosts, values, batcher.close, names)
        self.batcher, self.slo_ms = batcher, slo_ms
        self.titles = {str(i): one for i, one in enumerate(getattr(engine, "names", ()))}
        # The client of a cluster answers all rows of a request at once.
        self._infer_rows = getattr(batcher, "infer_rows", None) or partial(infer_rows, batcher)
        [output] = engine.run(0, [engine.sample], 1)
        outputs = [(name, list(t.shape), t.dtype) for name, t in named_tensors(output, "output")]
        rows = min(self.limits.rows, getattr(batcher, "max_queue", self.limits.rows))  # more could never wait
        self.model = Model(name, version, signature, outputs, rows)
        whole = min(MEGABYTE + BYTES_PER_VALUE * values * rows, self.limits.bodies_bytes)
        self.tensor_bytes = self.limits.body_bytes or max(whole, self.body_bytes)
        page = (files("subnetact.serve") / "status.html").read_text("utf-8")
        page = page.replace("PALETTE", (files("subnetact.serve") / "palette.css").read_text("utf-8"))
        self.get("/", lambda: HTMLResponse(page, headers=SAFE_HEADERS))
        self.get("/status", lambda: reply(self.status(), headers=SAFE_HEADERS))
        self.get("/v2", lambda: reply(SERVER))
        self.get("/v2/models", lambda: reply({"models": [name]}))
        self.get("/v2/health/live", lambda: reply({"live": True}), open_=True)
        self.get("/v2/health/ready", self._ready, open_=True)
        taken = inference.tensors_taken(self, self.model)
        for path in ("/v2/models/{name}/versions/{version}", "/v2/models/{name}"):
            self.get(path, lambda: reply(self.model.metadata()))
            self.get(f"{path}/ready", lambda: self._ready(name=name))
            self.add("POST", f"{path}/infer", self._infer_tensors, **taken)
        self.add("POST", "/infer", self._infer_plain, **inference.plain_taken(self, self.model))

    def unready(self) -> str:
        """Return why the server should get no requests, or an empty text."""
        return super().unready() or ("" if self.batcher.stats().workers_up else "no worker")

    def _ready(self, **facts: str) -> Response:
        reason = self.unready()
        return reply({**facts, "ready": not reason}, 503 if reason else 200)

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of the batcher, and those of the answers."""
        yield from Collector(self.batcher).collect()
        yield from super().collect()

    def error_document(self, refusal: Refusal, path: str) -> dict[str, Any]:
        """Return in JSON what a client of the address `path` is told of a `refusal`."""
        if path.startswith("/v2"):
            return {"error": f"{refusal.kind}: {refusal}"}
        return super().error_document(refusal, path)

    def status(self) -> dict[str, Any]:
        """Return the counts of the batcher and the time in s; the page shows the differences of two."""
        stats = self.batcher.stats()
        served_by = {str(subnet): count for subnet, count in stats.served_by.items()}
        accuracy = {str(subnet): round(percent, 2) for subnet, percent in self.batcher.accuracy.items()}
        counts = {name: count for name, count in vars(stats).items() if isinstance(count, (int, float))}
        facts = {"model": self.model.name, "slo_ms": self.slo_ms, "accuracy": accuracy, "names": self.titles}
        return {**facts, "time_s": time.monotonic(), **counts, "served_by": served_by}

    async def _infer_plain(self, exchange: Exchange) -> Response:
        """Answer one input of `/infer`."""
        async with self.body(exchange, self.body_bytes) as raw:
            body, x = await self.decoded(partial(inference.read_plain, self.model), raw)
            terms = self._terms(exchange, body, PlainTerms)
            answers, facts = await self._answers(exchange, [x], terms)
            return inference.plain_reply(terms.output, answers[0], facts)

    async def _infer_tensors(self, exchange: Exchange) -> Response:
        """Answer tensors of the Open Inference Protocol, row by row."""
        read = partial(inference.read_tensors, self.model, exchange.headers)
        async with self.body(exchange, self.tensor_bytes) as raw:
            asked, parameters, rows = await self.decoded(read, raw)
            answers, facts = await self._answers(exchange, rows, self._terms(exchange, parameters, Terms))
            all_binary = bool(parameters.binary_data_output)
            return inference.tensor_reply(self.model, asked, all_binary, answers, facts)

    def _terms(self, exchange: Exchange, body: Terms, kind: type[CommonModel]) -> CommonModel:
        """Return what a request asks for in its body, its query or its headers, the first of which counts."""
        texts = exchange.header_values(Terms) | dict(exchange.query_params)
        return body.completed(kind, texts, self.limits.deadline_ms)

    async def _answers(
        self, exchange: Exchange, rows: Sequence[Any], terms: Terms
    ) -> tuple[Sequence[Answer], dict[str, Any]]:
        """Return the answers to all rows, and facts for the reply; the time counts from the arrival.

        Raises:
            DeadlinePassed: the time passed before the body was read. What the batcher raises passes too.
        """
        deadline_ms = float(self.slo_ms if terms.deadline_ms is None else terms.deadline_ms)
        left_ms = exchange.left_ms("deadline_ms", deadline_ms)
        wishes = {"min_accuracy": terms.min_accuracy, "priority": terms.priority, "client": exchange.sender}
        answers: Sequence[Answer] = await self._infer_rows(rows, left_ms, **wishes)
        latency_ms = monotonic_ms() - exchange.arrived_ms
        accuracy, met = round(min([one.accuracy for one in answers]), 2), latency_ms <= deadline_ms
        exchange.outcome = "met" if met else "late"  # the metrics count what the client is told
        return answers, {"accuracy": accuracy, "latency_ms": round(latency_ms, 3), "met": met}


build_app = ServeApp
"""Makes the application of a batcher and its engine."""
