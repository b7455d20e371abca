"""Runs the application with uvicorn until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from subnetact.errors import ServeError
from subnetact.serve.base_app import BaseApp

GRACEFUL_S = 30
_log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """A server that, on SIGTERM, keeps serving for a grace period in s while `/readyz` returns 503."""

    def __init__(self, config: uvicorn.Config, app: BaseApp, grace_s: float) -> None:
        super().__init__(config)
        self._app, self._grace_s = app, grace_s
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Begin to listen and print the address."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        for listening in (s for server in getattr(self, "servers", []) for s in server.sockets):
            host, port = listening.getsockname()[:2]
            print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Begin the grace period at the first signal; the system ends the process at the second."""
        for handled in HANDLED_SIGNALS:
            signal.signal(handled, signal.SIG_DFL)
        self._app.closing = True
        if self._grace_s and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, self._grace_s, self._leave)
        else:
            self._leave()

    def _leave(self) -> None:
        self.should_exit = True


def check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be; end the program with status 3 where nothing can listen."""
    try:
        host.encode("idna")
    except UnicodeError:
        raise ServeError(f"host: {host!r:.60} is no name of a machine; give a name or an address") from None
    if not 0 <= port <= 65535:
        raise ServeError(f"port: {port} is no port; give a whole number from 0 to 65535")
    try:
        places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = min(places, key=lambda place: place[0] != socket.AF_INET)  # It may have both.
        socket.create_server(address, family=family).close()
    except OSError as error:
        where = f"nothing can listen at {host}:{port} ({error.strerror}); give another --port or --host"
        _log.error(where)
        raise SystemExit(3) from error


def run(app: BaseApp, host: str = "127.0.0.1", port: int = 8000, grace_s: float = 0.0) -> None:
    """Serve an application until SIGTERM or SIGINT, with its limits on connections.

    After the first signal `/readyz` returns 503 for `grace_s` seconds while the server keeps serving, so that
    load balancers can drain it, and every answer ends its connection. Then the server takes no new requests,
    answers those that it has already taken, for up to 30 s, and the function returns. A second signal ends
    the process at once. Put a proxy before it where clients may be slow or hostile:
    `examples/proxy` says why.

    Args:
        app: the application.
        host: address to listen at.
        port: port to listen at; 0 takes a free one.
        grace_s: length of the grace period, in s.

    Raises:
        ServeError: the address, the port or the grace period cannot be used.
        SystemExit: with status 3, another program listens there.
    """
    if not 0 <= grace_s < math.inf:
        raise ServeError(f"grace_s: {grace_s} is no time to wait for; give a finite number of seconds")
    config = uvicorn.Config(
        app,
        host,
        port,
        loop="asyncio",  # uvloop saves no time here
        ws="none",
        log_config=None,  # lines go where the program's own go
        log_level="error",  # strangers cause warnings
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=app.limits.connections + 1,  # uvicorn counts the connection that asks, too
        h11_max_incomplete_event_size=app.limits.header_bytes,
        timeout_keep_alive=math.ceil(app.limits.idle_s),
        timeout_graceful_shutdown=GRACEFUL_S,
        backlog=min(app.limits.connections, 2048),
    )
    gc.collect()
    gc.freeze()  # A full collection of all that is loaded would stop the server for 0.1 s.
    try:
        check_address(host, port)
        Server(config, app, grace_s).run()
    finally:
        app.close(drain=False)
    _log.info("stopped")
