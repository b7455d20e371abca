"""Runs the application with uvicorn until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import HANDLED_SIGNALS

from subnetact.errors import ServeError, SubnetActError
from subnetact.serve.base_app import BaseApp
from subnetact.serve.exchange import Refusal

GRACEFUL_S = 30
LOOK_S = 0.05  # how often an application that others replace looks whether its requests have ended
_log = logging.getLogger(__name__)


class Present:
    """The application that is served at present; `reopen` makes the one that takes its place."""

    def __init__(self, app: BaseApp, reopen: Callable[[], BaseApp] | None) -> None:
        self.app, self._changing = app, asyncio.Lock()
        self._endings: set[asyncio.Future[None]] = set()  # of the former ones; an event loop keeps no tasks
        if reopen is not None:
            self._reopen, app.reload = reopen, self.reload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one exchange."""
        await self.app(scope, receive, send)

    async def reload(self) -> None:
        """Let another application take the next requests; the former one finishes those that it has.

        Raises:
            Refusal: there is no other one; the log says why, and the former one goes on.
        """
        async with self._changing:
            former = self.app
            try:
                app = await asyncio.to_thread(self._successor, former)
            except Exception as error:
                code = None if isinstance(error, SubnetActError) else error
                _log.error("nothing was loaded, and what was served goes on: %s", error, exc_info=code)
                raise Refusal(400, "NotLoaded", "load: it failed; the log of the server says why") from None
            app.closing, self.app = former.closing, app
            ending = asyncio.ensure_future(self._end(former))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    def _successor(self, former: BaseApp) -> BaseApp:
        app = self._reopen()
        try:
            app.succeed(former)
        except BaseException:
            app.close(drain=False)
            raise
        return app

    async def _end(self, former: BaseApp) -> None:
        while former.under_way:
            await asyncio.sleep(LOOK_S)
        await asyncio.to_thread(former.close)


class Server(uvicorn.Server):
    """A server that, on SIGTERM, keeps serving for a grace period in s while `/readyz` returns 503."""

    def __init__(self, config: uvicorn.Config, present: Present, grace_s: float) -> None:
        super().__init__(config)
        self._present, self._grace_s = present, grace_s
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Begin to listen and print the address."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self._present.app.reload is not None and hasattr(signal, "SIGHUP"):
            self._loop.add_signal_handler(signal.SIGHUP, lambda: asyncio.ensure_future(self._reload()))
        for listening in (s for server in getattr(self, "servers", []) for s in server.sockets):
            host, port = listening.getsockname()[:2]
            print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def _reload(self) -> None:
        with suppress(Refusal):  # it is in the log
            await self._present.reload()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Begin the grace period at the first signal; the system ends the process at the second."""
        for handled in HANDLED_SIGNALS:
            signal.signal(handled, signal.SIG_DFL)
        self._present.app.closing = True
        if self._grace_s and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, self._grace_s, self._leave)
        else:
            self._leave()

    def _leave(self) -> None:
        self.should_exit = True


def run(
    app: BaseApp,
    host: str = "127.0.0.1",
    port: int = 8000,
    grace_s: float = 0.0,
    reopen: Callable[[], BaseApp] | None = None,
) -> None:
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
        reopen: makes the application anew, after SIGHUP and when a client asks for it by the repository calls
            of the Open Inference Protocol. It takes the next requests, and the former one finishes those that
            it has. If None, neither is possible.

    Raises:
        ServeError: the address, the port or the grace period cannot be used.
    """
    try:
        host.encode("idna")
    except UnicodeError:
        raise ServeError(f"host: {host!r:.60} is no name of a machine; give a name or an address") from None
    if not 0 <= port <= 65535:
        raise ServeError(f"port: {port} is no port; give a whole number from 0 to 65535")
    if not 0 <= grace_s < math.inf:
        raise ServeError(f"grace_s: {grace_s} is no time to wait for; give a finite number of seconds")
    present = Present(app, reopen)
    config = uvicorn.Config(
        present,
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
        Server(config, present, grace_s).run()
    finally:
        present.app.close(drain=False)
