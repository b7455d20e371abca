"""How requests travel: over the connections of aiohttp, and what a server takes.

aiohttp, because a POST takes 0.09 ms of CPU time with it. With httpx 0.28 it takes 0.9 to 4.6 ms, too long
for an open loop from one core.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import ServeError, extra_needed
from subnetact.loadtest.open_loop import Refused, Reply, Sent, run_open_loop

with extra_needed("a load test needs aiohttp; pip install 'subnetact[serve]'"):
    from aiohttp import ClientError, ClientSession, TCPConnector
    from yarl import URL

NUMPY_NAMES = {"BOOL": "bool", "FP16": "float16", "BF16": "float32", "FP32": "float32", "FP64": "float64"}
NUMPY_NAMES |= {f"{k.upper()}{n}": f"{k}{n}" for k in ("int", "uint") for n in (8, 16, 32, 64)}
"""The dtype to send by datatype."""


class HttpClient:
    """Sends requests to `http://host:port/path`, by default `/infer`, each on a connection that is free.

    A POST that was sent is never sent again, so that requests that a server loses are seen.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        try:
            self.url = URL(url)
        except ValueError as error:
            raise ServeError(f"url: {url!r} is not http://host:port ({error})") from None
        if self.url.scheme not in ("http", "https") or not self.url.host or any(c in url for c in "\r\n "):
            raise ServeError(f"url: {url!r} is not http://host:port/path")
        if self.url.path == "/":
            self.url = self.url.with_path("/infer")
        self._access = {"Authorization": f"Bearer {token}"} if token else {}

    async def __aenter__(self) -> HttpClient:
        connector = TCPConnector(limit=0)  # as many connections as requests are under way
        self._session = ClientSession(headers=self._access, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> Any:
        """Return the JSON at another address of the server."""
        async with self._session.get(self.url.with_path(path), raise_for_status=True) as answer:
            return await answer.json()

    async def post(self, body: bytes, **headers: str) -> bytes:
        """Return the body of the answer; raise `Refused` with the server's reason, or the connection's."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            async with self._session.post(self.url, data=body, headers=named) as answer:
                document = await answer.read()
        except ClientError as error:
            raise Refused(type(error).__name__) from error
        if answer.status != 200:
            raise Refused(refusal(answer.status, document))
        return document


async def served_input(url: str, token: str | None = None) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
    """Return the name of the model of a server, and the shape and dtype of its one input."""
    async with HttpClient(url, token) as client:
        try:
            [name, *_] = (await client.get("/v2/models"))["models"]
            [part] = (await client.get(f"/v2/models/{name}"))["inputs"]
            return name, tuple(part["shape"][1:]), np.dtype(NUMPY_NAMES[part["datatype"]])
        except (ClientError, ValueError, KeyError, TypeError) as error:
            raise ServeError(
                f"url: {url} describes no model with one tensor as its input ({error}); give --inputs "
                "FILE.npy"
            ) from error


def _body(x: npt.NDArray[Any], kind: str) -> bytes:
    if kind == "json":
        return json.dumps({"input": [round(value, 4) for value in x.flatten().tolist()]}).encode()
    file = io.BytesIO()
    np.save(file, x, allow_pickle=False)
    return file.getvalue()


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
    floor = {} if min_accuracy is None else {"x_min_accuracy": str(min_accuracy)}

    async def send(i: int, left_ms: float) -> Reply:
        answer = await client.post(bodies[i % len(bodies)], x_deadline_ms=f"{left_ms:.3f}", **floor)
        found = json.loads(answer)
        return Reply(found.get("class", -1), found["subnet"], found["accuracy"])

    async with HttpClient(url, token) as client:
        return await run_open_loop(arrivals_ms, send, slo_ms - reserve_ms, tell=tell)


def refusal(status: int, answer: bytes) -> str:
    """Return the name of the error that a server returned, or the HTTP status if the body names none."""
    try:
        return str(json.loads(answer)["error"])[:80]
    except (ValueError, TypeError, KeyError):
        return f"HTTP {status}"
