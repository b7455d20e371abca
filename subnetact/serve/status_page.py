"""The status page at `/`: what the server does now, as plain HTML and server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

import orjson
from starlette.responses import Response, StreamingResponse

from subnetact.serve.exchange import LATER, Refusal
from subnetact.serve.service import Service
from subnetact.serving import BatcherStats

__all__ = ["SAFE_HEADERS", "StatusFeed", "page"]

INTERVAL_S = 0.5
SAFE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # of nginx
}


def page() -> bytes:
    """Return the HTML of the status page."""
    return (files("subnetact.serve") / "status.html").read_bytes()


class StatusFeed:
    """Figures of the last half second of a service, for all clients that watch."""

    def __init__(self, service: Service) -> None:
        self._service = service
        accuracy = {i: round(percent, 2) for i, percent in service.batcher.accuracy.items()}
        self._facts = {"model": service.name, "slo_ms": service.slo_ms, "accuracy": accuracy}
        self._watching = 0
        self._last: tuple[float, BatcherStats] | None = None
        self._latest = b""

    def response(self) -> Response:
        """Return a stream of one event per half second until the server closes."""
        if self._watching >= self._service.limits.streams:
            raise Refusal(503, "Overloaded", "too many clients watch; retry later", LATER)
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=SAFE_HEADERS)

    async def _events(self) -> AsyncIterator[bytes]:
        self._watching += 1
        try:
            yield _event("facts", self._facts)
            while not self._service.closing:
                yield self._current()
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._watching -= 1

    def _current(self) -> bytes:
        """Return the newest event; it is made at most once per interval, however many clients watch."""
        now = time.monotonic()
        if self._last is None or now - self._last[0] >= 0.9 * INTERVAL_S:
            stats = self._service.batcher.stats()
            if self._last is not None and now - self._last[0] < 10 * INTERVAL_S:
                self._latest = _event("status", _figures(*self._last, now, stats))
            else:
                self._latest = _event("status", _figures(now - INTERVAL_S, stats, now, stats))
            self._last = now, stats
        return self._latest


def _figures(before_s: float, old: BatcherStats, now_s: float, new: BatcherStats) -> dict[str, Any]:
    seconds = now_s - before_s
    met = new.met - old.met
    done = met + sum(getattr(new, name) - getattr(old, name) for name in ("late", "dropped", "failed"))
    done += new.full - old.full
    served = {k: n - old.served_by.get(k, 0) for k, n in new.served_by.items() if n > old.served_by.get(k, 0)}
    return {
        "arrivals": round((new.submitted + new.full - old.submitted - old.full) / seconds, 1),
        "attainment": round(100 * met / done, 2) if done else None,
        "accuracy": round((new.accuracy_sum - old.accuracy_sum) / met, 2) if met else None,
        "subnet": max(served, key=lambda k: served[k]) if served else None,
        "served": served,
        "queued": new.queued,
        "workers": f"{new.workers_up} of {new.workers}",
        "total": new.submitted,
        "missed": new.late + new.dropped + new.failed + new.full,
    }


def _event(name: str, value: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
