"""Sends a trace to a server, and asks the server what it takes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np
import numpy.typing as npt

from subnetact.errors import ServeError
from subnetact.loadtest.http_client import HttpClient
from subnetact.loadtest.open_loop import Refused, Reply, Sent, run_open_loop

__all__ = ["BODIES", "ask_server", "refusal", "served_input"]

CONNECTIONS = 16
"""Connections that are opened in advance."""


BODIES = ("json", "npy")
"""How inputs travel: as the JSON of `/infer`, with four digits behind the point, or as NumPy files."""


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


NUMPY_NAMES = {"BOOL": "bool", "FP16": "float16", "BF16": "float32", "FP32": "float32", "FP64": "float64"}
NUMPY_NAMES |= {f"{k.upper()}{n}": f"{k}{n}" for k in ("int", "uint") for n in (8, 16, 32, 64)}
"""The dtype to send by datatype."""


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
    """Send a trace to a server; return what became of every request.

    Request i has `inputs[i % len(inputs)]` and `slo_ms` from its time in the trace, of which the server is
    told `reserve_ms` less, for the network. `tell` is called with what became of a request.
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
