"""Sends a trace to a server, and asks the server what it takes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import ServeError
from subnetact.loadtest.http_client import HttpClient
from subnetact.loadtest.open_loop import Refused, Reply, Sent, run_open_loop

__all__ = ["BODIES", "ask_server", "refusal", "served_input"]

CONNECTIONS = 16
"""Connections that are opened in advance."""


def json_body(x: npt.NDArray[Any]) -> bytes:
    """Return an input as the JSON of `/infer`, with four digits behind the point."""
    return json.dumps({"input": [round(value, 4) for value in x.flatten().tolist()]}).encode()


def numpy_body(x: npt.NDArray[Any]) -> bytes:
    """Return an input as a NumPy file."""
    file = io.BytesIO()
    np.save(file, x, allow_pickle=False)
    return file.getvalue()


BODIES: dict[str, Callable[[npt.NDArray[Any]], bytes]] = {"npy": numpy_body, "json": json_body}
"""How inputs travel, by name."""


async def served_input(url: str, token: str | None = None) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
    """Return the name of the model of a server, and the shape and dtype of its one input."""
    client = HttpClient(url, token)
    try:
        names = await _get(client, "/v2/models")
        model = await _get(client, f"/v2/models/{names['models'][0]}")
        [part] = model["inputs"]
        dtype = np.dtype(NUMPY_NAMES[part["datatype"]])
        return str(model["name"]), tuple(part["shape"][1:]), dtype
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServeError(
            f"url: {url} describes no model with one tensor as its input ({error}); give --inputs FILE.npy"
        ) from error
    finally:
        client.close()


async def _get(client: HttpClient, path: str) -> Any:
    status, text = await client.get(path)
    if status != 200:
        raise ValueError(f"{path} returned status {status}: {refusal(status, text)}")
    return json.loads(text)


NUMPY_NAMES = {"BOOL": "bool", "FP16": "float16", "BF16": "float32", "FP32": "float32", "FP64": "float64"}
NUMPY_NAMES |= {f"{k.upper()}{n}": f"{k}{n}" for k in ("int", "uint") for n in (8, 16, 32, 64)}
"""The dtype to send by datatype."""


async def ask_server(
    url: str,
    inputs: Sequence[npt.NDArray[Any]],
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
    bodies = [BODIES[body](x) for x in inputs]
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
