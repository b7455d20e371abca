"""How requests travel: an HTTP/1.1 client for load generation, and what a server takes.

Written by hand because httpx 0.28 cannot send the bursts of an open loop from one core: a POST takes 0.03 ms
of CPU time here, and with httpx 0.9 ms if one request is in flight, 1.8 ms with 16, and 4.6 ms with 64.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np
import numpy.typing as npt

from subnetact.errors import ServeError
from subnetact.loadtest.open_loop import Refused, Reply, Sent, run_open_loop

BODIES = ("json", "npy")
"""How inputs travel: as the JSON of `/infer`, with four digits behind the point, or as NumPy files."""
CONNECTIONS = 16
"""Connections that are opened in advance."""
LONGEST_ANSWER = 2**26
NUMPY_NAMES = {"BOOL": "bool", "FP16": "float16", "BF16": "float32", "FP32": "float32", "FP64": "float64"}
NUMPY_NAMES |= {f"{k.upper()}{n}": f"{k}{n}" for k in ("int", "uint") for n in (8, 16, 32, 64)}
"""The dtype to send by datatype."""


class HttpClient:
    """Sends requests to `http://host:port/path`, by default `/infer`, one at a time on each connection.

    Idle connections that the server has closed are replaced. A request that was sent is never sent again, so
    that requests that a server loses are seen.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or 80
        except ValueError as error:
            raise ServeError(f"url: {url!r} is not http://host:port ({error})") from None
        if parts.scheme != "http" or not host or any(c in f"{url}{token}" for c in "\r\n "):
            raise ServeError(f"url: {url!r} is not http://host:port/path, or the token is not one word")
        self._host, self._port = host, port
        access = f"Authorization: Bearer {token}\r\n" if token else ""
        path = parts.path if parts.path not in ("", "/") else "/infer"
        self._post = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{access}Content-Length: "
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open(self, count: int) -> None:
        """Open connections in advance."""
        for _ in range(count):
            self._idle.append(await asyncio.open_connection(self._host, self._port))

    async def post(self, body: bytes, headers: str = "") -> tuple[int, bytes]:
        """Send a request with headers that each end with CR LF; return status and body of the answer.

        A connection that breaks is a ConnectionError, an answer that is no HTTP a ValueError.
        """
        while self._idle:
            reader, writer = self._idle.pop()
            if not (reader.at_eof() or reader.exception() or writer.is_closing()):
                break
            writer.close()
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(f"{self._post}{len(body)}\r\n{headers}\r\n".encode() + body)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = int(head.partition("\r\ncontent-length:")[2].partition("\r\n")[0])
            if not 0 <= length <= LONGEST_ANSWER:
                raise ValueError(f"an answer of {length} bytes")
            answer = await reader.readexactly(length)
            status = int(head.split(" ", 2)[1])
        except BaseException as error:
            writer.close()
            if isinstance(error, (asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError)):
                raise ConnectionResetError("the server closed the connection") from error
            raise
        if "connection: close" in head:
            writer.close()
        else:
            self._idle.append((reader, writer))
        return status, answer

    def close(self) -> None:
        """Close all idle connections."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


def _body(x: npt.NDArray[Any], kind: str) -> bytes:
    if kind == "json":
        return json.dumps({"input": [round(value, 4) for value in x.flatten().tolist()]}).encode()
    file = io.BytesIO()
    np.save(file, x, allow_pickle=False)
    return file.getvalue()


def served_input(url: str, token: str | None = None) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
    """Return the name of the model of a server, and the shape and dtype of its one input."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    opener = build_opener(ProxyHandler({}))

    def get(path: str) -> Any:
        with opener.open(Request(urljoin(url, path), headers=headers)) as answer:
            return json.load(answer)

    try:
        model = get(f"/v2/models/{get('/v2/models')['models'][0]}")
        [part] = model["inputs"]
        return str(model["name"]), tuple(part["shape"][1:]), np.dtype(NUMPY_NAMES[part["datatype"]])
    except (ValueError, KeyError, IndexError, TypeError, HTTPError) as error:
        raise ServeError(
            f"url: {url} describes no model with one tensor as its input ({error}); give --inputs FILE.npy"
        ) from error


async def ask_server(
    url: str,
    inputs: Iterable[npt.NDArray[Any]],
    arrivals_ms: Sequence[float],
    slo_ms: float,
    min_accuracy: float | None = None,
    reserve_ms: float = 0.0,
    body: str = "npy",
    token: str | None = None,
    tell: Callable[[Sent], object] | None = None,
) -> list[Sent]:
    """Send a trace to a server, and `inputs[i % len(inputs)]` with request i; return what became of each.

    The server is told `reserve_ms` less than `slo_ms`, for the network; `tell` is called with every outcome.
    """
    bodies = [_body(x, body) for x in inputs]
    floor = "" if min_accuracy is None else f"x-min-accuracy: {min_accuracy}\r\n"
    client = HttpClient(url, token)

    async def send(i: int, left_ms: float) -> Reply:
        headers = f"x-deadline-ms: {left_ms:.3f}\r\n{floor}"
        status, answer = await client.post(bodies[i % len(bodies)], headers)
        if status != 200:
            raise Refused(refusal(status, answer))
        found = json.loads(answer)
        return Reply(found.get("class", -1), found["subnet"], found["accuracy"])

    try:
        await client.open(CONNECTIONS)
        return await run_open_loop(arrivals_ms, send, slo_ms - reserve_ms, tell=tell)
    finally:
        client.close()


def refusal(status: int, answer: bytes) -> str:
    """Return the name of the error that a server returned, or the HTTP status if the body names none."""
    try:
        return str(json.loads(answer)["error"])[:80]
    except (ValueError, TypeError, KeyError):
        return f"HTTP {status}"
