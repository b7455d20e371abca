"""The HTTP interface in a front: one of several, behind a proxy that may keep requests waiting."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from subnetact.serve.app import ServeApp
from subnetact.serve.base_app import responses_metric
from subnetact.serving.live.prometheus import Collector
from subnetact.serving.live.stats import BatcherStats

OWN = ("workers", "workers_up", "correction")  # not sums over fronts


class Share(NamedTuple):
    """The counters of one process, as `Collector` takes them, and of its HTTP answers."""

    accuracy: Mapping[int, float]
    counts: BatcherStats
    responses: Mapping[tuple[str, str, str], int] = {}

    def stats(self) -> BatcherStats:
        """Return the counters."""
        return self.counts


class FrontApp(ServeApp):
    """The application of a front, whose counters are those of all fronts.

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

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of every front and every replica."""
        yield from Collector(self._fronts, label="front").collect()
        yield from Collector(self._replicas, "subnetact_replica_", "replica").collect()
        fronts = self._fronts.items()
        counts = {(*of, name): n for name, front in fronts for of, n in front.responses.items()}
        yield responses_metric(counts, "front")

    def status(self) -> dict[str, Any]:
        """Return the counts of all fronts and the time in s."""
        document, counts = super().status(), [one.counts for one in self._fronts.values()]
        served = sum((Counter(one.served_by) for one in counts), Counter[int]())
        document["served_by"] = {str(subnet): count for subnet, count in served.items()}
        for name in vars(BatcherStats()).keys() & document.keys() - {"served_by", *OWN}:
            document[name] = sum(getattr(one, name) for one in counts)
        return document
