"""The status page at `/`: what the server does now, as plain HTML and server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any

import orjson

from subnetact.serving import BatcherStats

__all__ = ["StatusFeed", "page"]

INTERVAL_S = 0.5


def page() -> bytes:
    """Return the HTML of the status page."""
    return (files("subnetact.serve") / "status.html").read_bytes()


class StatusFeed:
    """Figures of the last half second, for all clients that watch.

    Args:
        stats: returns the counters of the batcher.
        facts: what does not change: the name of the model and the accuracy per subnet.
        closing: returns whether the server is about to end, which ends the streams.
        most: largest number of clients that may watch at the same time.
    """

    def __init__(
        self,
        stats: Callable[[], BatcherStats],
        facts: dict[str, Any],
        closing: Callable[[], bool],
        most: int,
    ) -> None:
        self._stats = stats
        self._facts = facts
        self._closing = closing
        self._most = most
        self._watching = 0
        self._last: tuple[float, BatcherStats] | None = None
        self._latest = b""

    @property
    def full(self) -> bool:
        """Whether no further client may watch."""
        return self._watching >= self._most

    async def events(self) -> AsyncIterator[bytes]:
        """Yield one event per half second until the server closes."""
        self._watching += 1
        try:
            yield _event("facts", self._facts)
            while not self._closing():
                yield self._current()
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._watching -= 1

    def _current(self) -> bytes:
        """Return the newest event; it is made at most once per interval, however many clients watch."""
        now = time.monotonic()
        if self._last is None or now - self._last[0] >= 0.9 * INTERVAL_S:
            stats = self._stats()
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
