"""Guards the connections of uvicorn: their number, the size of their heads, and slow or idle clients.

uvicorn closes a connection that is idle after an answer. It waits without end for a client that opens a
connection and sends nothing, sends one byte of a header now and then, or never reads its answer, and it has
no limit on the number of connections that do so. It keeps all requests that a client sends ahead of the
answers.
"""

from __future__ import annotations

import asyncio
import re
import time
from importlib import import_module, util
from typing import Any

from subnetact.serve.limits import Limits

__all__ = ["Guard", "guarded_protocol"]

SWEEP_S = 0.25
PIPELINED = 64
"""Requests that a client may send before the answer to the first one."""
END_OF_HEAD = re.compile(rb"\n\r?\n")
BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Guard:
    """Looks at all connections of a server four times per second and closes those beyond a limit.

    Args:
        limits: the limits.

    Attributes:
        cut_off: number of connections that were closed.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.cut_off = 0
        self._connections: dict[Any, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: Any) -> bool:
        """Count a new connection; if there are too many, close the one that waited longest for a request.

        Args:
            connection: the protocol of the connection.

        Returns:
            Whether the new connection may stay.
        """
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        if len(self._connections) >= self.limits.connections:
            waiting = min(
                (other for other in self._connections if other.waits),
                key=lambda other: other.since_s,
                default=None,
            )
            self.cut_off += 1
            if waiting is None:
                return False
            self.remove(waiting)
            waiting.transport.abort()
        self._connections[connection] = None
        return True

    def remove(self, connection: Any) -> None:
        """Forget a connection that ended.

        Args:
            connection: the protocol of the connection.
        """
        self._connections.pop(connection, None)

    def _sweep(self) -> None:
        limits, now = self.limits, time.monotonic()
        for connection in list(self._connections):
            closing = connection.transport.is_closing()
            if closing:  # It waits until the client has read what was written.
                connection.stuck_since_s = connection.stuck_since_s or now
            stuck_s = connection.stuck_since_s
            if stuck_s is not None and now - stuck_s > limits.write_s:
                self.cut_off += not closing
                self.remove(connection)
                connection.transport.abort()
            elif connection.waits and not closing:
                begun = connection.head_bytes > 0 or connection.cycle is None
                if now - connection.since_s > (limits.header_s if begun else limits.idle_s):
                    self.cut_off += 1
                    connection.end(SLOW if connection.head_bytes else b"")
        self._timer = None
        if self._connections:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


def guarded_protocol(guard: Guard) -> type[asyncio.Protocol]:
    """Return a class of protocols for `uvicorn.Config(http=...)`, with httptools if it is installed.

    Args:
        guard: the guard of all connections.
    """
    base: Any
    if util.find_spec("httptools") is not None:
        base = import_module("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol
    else:
        base = import_module("uvicorn.protocols.http.h11_impl").H11Protocol

    class GuardedProtocol(base):  # type: ignore[misc]
        """One connection; it waits until the headers of a request are there, and again after its answer."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.since_s = time.monotonic()
            self.head_bytes = self.ahead_bytes = 0
            self.head_end = b""
            self.stuck_since_s: float | None = None
            if not guard.add(self):
                self.end(BUSY)

        def connection_lost(self, error: Exception | None) -> None:
            guard.remove(self)
            super().connection_lost(error)

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            if self.transport.is_closing():
                return
            if (
                not self.waits and not before.more_body
            ):  # requests that come before the answer to the last one
                self.ahead_bytes += len(data)
                if self.ahead_bytes > guard.limits.header_bytes:
                    self.transport.abort()
                    return
            if self.waits:
                if not self.head_bytes:
                    self.since_s, self.head_end = time.monotonic(), b""
                if self._head_too_long(data):
                    self.end(LONG)
                    return
            super().data_received(data)
            if not self.waits and not self.cycle.more_body and self._too_far_ahead():
                self.transport.abort()
                return
            if self.waits:
                self.ahead_bytes = 0
            if self.cycle is before and self.waits:
                self.head_bytes += len(data)
                self.head_end = (self.head_end + data)[-2:]
            else:
                self.head_bytes = 0

        def _head_too_long(self, data: bytes) -> bool:
            """Return whether the head goes on beyond its limit; the parsers look at unfinished heads only."""
            room = guard.limits.header_bytes - self.head_bytes
            if len(data) <= room:
                return False
            end = len(self.head_end)
            return END_OF_HEAD.search(self.head_end + data[: room + 1], 0, end + room) is None

        def _too_far_ahead(self) -> bool:
            pipeline = getattr(self, "pipeline", None)
            if pipeline is None:  # h11
                return len(self.conn.trailing_data[0]) > guard.limits.header_bytes
            if len(pipeline) <= PIPELINED:
                return False
            pipeline.clear()
            return True

        def on_response_complete(self) -> None:
            self.since_s = time.monotonic()
            super().on_response_complete()

        def pause_writing(self) -> None:
            self.stuck_since_s = time.monotonic()
            super().pause_writing()

        def resume_writing(self) -> None:
            self.stuck_since_s = None
            super().resume_writing()

        @property
        def waits(self) -> bool:
            """Whether there is no request that the server works on."""
            return self.cycle is None or self.cycle.response_complete

        def end(self, answer: bytes) -> None:
            """Send an answer if none was sent on this connection before, and close it."""
            if answer and self.cycle is None:
                self.transport.write(answer)
            self.transport.close()

    return GuardedProtocol
