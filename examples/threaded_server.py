"""Serve a supernet over HTTP with the standard library's threaded server: one thread per connection.

    python examples/threaded_server.py

Shows how to connect `Batcher.submit` with a server of threads. Addresses, requests and answers are those of
`fastapi_server.py`, but no web framework is needed. /metrics needs prometheus_client
(`pip install 'subnetact[serve]'`); without it, /metrics returns 501.
"""

from __future__ import annotations

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from service import (
    Service,
    error_reply,
    health,
    now_ms,
    open_service,
    options,
    read_ask,
    read_json,
    reply,
)

from subnetact.errors import InvalidRequest, MissingExtra, RequestError

LARGEST_BODY = 2**24


class Server(ThreadingHTTPServer):
    """Gives the service to the handlers. `server_close` waits until their answers are sent.

    Args:
        service: the engine and its batcher.
    """

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, service: Service) -> None:
        super().__init__((service.host, service.port), Handler)
        self.service = service
        self.closing = threading.Event()

    def stop(self) -> None:
        """Return 503 on `/healthz` for the grace period, then accept no more connections."""
        if not self.closing.is_set():
            self.closing.set()
            grace = threading.Timer(self.service.grace_s, self.shutdown)
            grace.start()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, one after another."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 5.0  # closes idle connections, so that the server can end
    server: Server

    def do_POST(self) -> None:
        """Answer `/infer`."""
        arrived_ms = now_ms()
        if self.path != "/infer":
            return self._send(404, {"error": "NotFound", "message": f"{self.path}: POST goes to /infer"})
        service = self.server.service
        try:
            body = read_json(self._body())
            ask = read_ask(body, service.engine.example, arrived_ms)
            answer = service.batcher.submit(*ask).result()
        except RequestError as error:
            return self._send(*error_reply(error))
        return self._send(200, reply(answer, body["deadline_ms"], arrived_ms))

    def do_GET(self) -> None:
        """Answer `/metrics` and `/healthz`."""
        if self.path == "/metrics":
            try:
                text = self.server.service.batcher.prometheus()
            except MissingExtra as error:
                return self._send(501, {"error": "MissingExtra", "message": str(error)})
            return self._send(200, text, {"Content-Type": "text/plain; version=0.0.4"})
        if self.path == "/healthz":
            return self._send(*health(self.server.service, self.server.closing.is_set()))
        return self._send(404, {"error": "NotFound", "message": f"{self.path}: GET /metrics or /healthz"})

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log single requests."""

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST_BODY:
            self.close_connection = True
            raise InvalidRequest(f"Content-Length: {length!r} is not a number up to {LARGEST_BODY}")
        return self.rfile.read(int(length))

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        if self.server.closing.is_set():
            self.close_connection = True
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    service = open_service(options(__doc__).parse_args())
    with service.batcher, Server(service) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        print("listening on http://{}:{}".format(*server.server_address[:2]), flush=True)
        server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
