"""The HTTP interface in a front: one of several, behind a proxy that may keep requests waiting."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from subnetact.cluster.replica import unix_ms
from subnetact.errors import DeadlinePassed, InvalidRequest
from subnetact.serve.app import ServeApp
from subnetact.serving.live.prometheus import Collector
from subnetact.serving.live.stats import BatcherStats

ARRIVED = "subnetact.arrived_unix_ms"
"""The key in an ASGI scope of the time of day when a proxy got the request."""
DUE = "x-deadline-unix-ms"
OWN = ("workers", "workers_up", "correction")  # not sums over fronts


class Share(NamedTuple):
    """The counters of one process, as `Collector` takes them."""

    accuracy: Mapping[int, float]
    counts: BatcherStats

    def stats(self) -> BatcherStats:
        """Return the counters."""
        return self.counts


class FrontApp(ServeApp):
    """The application of a front: its counters are those of all fronts, and time counts from the proxy on.

    `gather` returns the counters of all fronts and of all replicas, by name, because any front may get the
    next request for them.
    """

    def __init__(self, gather: Callable[[], Awaitable[Any]], *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._gather, self._gathering = gather, asyncio.Lock()
        self._fronts: Mapping[str, Share] = {}
        self._replicas: Mapping[str, Share] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one exchange; gather the counters first if it asks for them."""
        if scope["type"] == "http" and scope["path"].endswith(("/metrics", "/status")):
            async with self._gathering:  # older counters must not replace newer ones
                self._fronts, self._replicas = await self._gather()
        await super().__call__(scope, receive, send)

    def prometheus(self) -> str:
        """Return the metrics of every front and every replica in Prometheus' text format."""
        replicas = Collector(self._replicas, "subnetact_replica_", "replica").text()
        return Collector(self._fronts, label="front").text() + replicas

    def status(self) -> dict[str, Any]:
        """Return the counts of all fronts and the time in s."""
        document, counts = super().status(), [one.counts for one in self._fronts.values()]
        served = sum((Counter(one.served_by) for one in counts), Counter[int]())
        document["served_by"] = {str(subnet): count for subnet, count in served.items()}
        for name in vars(BatcherStats()).keys() & document.keys() - {"served_by", *OWN}:
            document[name] = sum(getattr(one, name) for one in counts)
        return document

    async def infer(self, exchange: Any, decode: Any) -> Any:
        """Answer one request, whose time counts from its arrival at the proxy.

        The header `x-deadline-unix-ms` is the time of day, in ms since 1970, when the answer is due, for
        requests that name no other deadline in their body or query. Errors are those of `ServeApp.infer`.
        """
        now_ms = unix_ms()
        arrived_unix_ms = min(exchange.scope.get(ARRIVED, now_ms), now_ms)
        exchange.arrived_ms -= now_ms - arrived_unix_ms
        due = exchange.headers.get(DUE)
        if due is not None:
            if not (due.isdecimal() and len(due) < 16):
                raise InvalidRequest(f"{DUE}: got {due[:60]!r}; give whole ms since 1970")
            left_ms = int(due) - arrived_unix_ms
            if left_ms <= 0.0:
                raise DeadlinePassed(f"{DUE}: the time passed before the request arrived; allow more")
            exchange.headers = {**exchange.headers, "x-deadline-ms": f"{left_ms:.3f}"}
        return await super().infer(exchange, decode)
