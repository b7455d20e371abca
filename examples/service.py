"""Shared by the two example servers: command line, batcher, and requests and answers as JSON.

Run `fastapi_server.py` or `threaded_server.py`; this file is no program of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from digits_engine import digits_engine, profiled
from torch import Tensor

from subnetact import Batcher, Engine, LatencyTable
from subnetact.errors import (
    BatcherClosed,
    DeadlinePassed,
    InvalidRequest,
    QueueFull,
    RequestError,
    SubnetActError,
    TableError,
)
from subnetact.serving import make_policy

__all__ = [
    "SCHEMA",
    "Ask",
    "Service",
    "error_reply",
    "health",
    "now_ms",
    "open_service",
    "options",
    "read_ask",
    "read_json",
    "reply",
]

RETRY_AFTER_S = 1
LONGEST_MS = 1e9
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["pixels", "deadline_ms"],
    "additionalProperties": False,
    "properties": {
        "pixels": {"type": "array", "description": "one input, nested like the engine's example, or flat"},
        "deadline_ms": {
            "type": "number",
            "description": "time that the request is given, in ms from its arrival",
        },
        "min_accuracy": {
            "type": "number",
            "description": "minimum accuracy of the answering subnet, percent",
        },
        "priority": {"type": "integer"},
    },
}
FIELDS = set(SCHEMA["properties"])


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the description as written."""


class Service(NamedTuple):
    """An engine behind a batcher, and how to serve it.

    Attributes:
        engine: the engine.
        batcher: the open batcher.
        host: address to listen at.
        port: port to listen at; 0 takes a free one.
        grace_s: how long to keep serving after SIGTERM while `/healthz` returns 503, in s.
    """

    engine: Engine
    batcher: Batcher
    host: str
    port: int
    grace_s: float


class Ask(NamedTuple):
    """One checked request, in the order of the arguments of `Batcher.submit`.

    Attributes:
        x: one input, without a batch dimension.
        deadline_ms: what is left of the request's time, in ms.
        min_accuracy: minimum accuracy of the answering subnet, in percent. If None, any subnet may answer.
        priority: the higher, the more important. If None, 0.
    """

    x: Tensor
    deadline_ms: float
    min_accuracy: float | None
    priority: int | None


def options(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a server's command line.

    Args:
        description: the help text, whose line breaks are kept.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=_Formatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free port and prints it")
    parser.add_argument("--bundle", type=Path, help="folder of a saved engine; default: the embedded digits")
    parser.add_argument("--table", type=Path, help="latency table; default: the bundle's, or a new profile")
    parser.add_argument("--policy", default="slackfit:4", help="for example slackfit:4, hullfit or fixed:0")
    parser.add_argument(
        "--slo-ms", type=float, default=36.0, help="the usual deadline, which the policy plans for"
    )
    parser.add_argument("--max-queue", type=int, default=2000)
    parser.add_argument(
        "--grace-s",
        type=float,
        default=0.0,
        help="after SIGTERM, /healthz returns 503 for so long while the server keeps serving",
    )
    return parser


def open_service(args: argparse.Namespace) -> Service:
    """Load an engine, profile it if it has no latency table, and open a batcher.

    Args:
        args: the parsed command line.

    Returns:
        The service. Close its batcher at the end.

    Raises:
        SystemExit: The engine, the table or the policy cannot be used; the message says why.
    """
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)  # the worker needs the GIL back after every short operation
    try:
        engine = Engine.load(args.bundle) if args.bundle else digits_engine()
        policy = make_policy(args.policy, _table(engine, args.table), args.slo_ms)
        batcher = Batcher(
            engine,
            policy=policy,
            slo_ms=args.slo_ms,
            max_queue=args.max_queue,
            threads_per_worker=1,
            check_finite=True,
        )
    except (SubnetActError, OSError) as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from error
    gc.collect()
    gc.freeze()  # a full collection of all that is loaded would stop the server for 0.1 s
    return Service(engine, batcher, args.host, args.port, args.grace_s)


def _table(engine: Engine, path: Path | None) -> LatencyTable:
    if path is not None:
        return LatencyTable.load(path)
    tables = engine.tables
    table = tables.get("scheduler") or next(iter(tables.values()), None) or profiled(engine)
    if not all(map(math.isfinite, table.accuracy)):
        raise TableError("table: the subnets of the bundle have no accuracy; give a --table that has them")
    return table


def now_ms() -> float:
    """Return the time of the monotonic clock that the servers use, in ms."""
    return time.perf_counter() * 1e3


def read_json(body: bytes) -> Any:
    """Decode the body of a request.

    Args:
        body: the bytes.

    Raises:
        InvalidRequest: The body is not JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"body: not JSON ({error}); send one JSON object") from error


def read_ask(body: Any, example: Tensor, arrived_ms: float) -> Ask:
    """Read one request, whose time counts from its arrival at this host; the batcher checks what is left.

    Args:
        body: the decoded body, which has the fields of `SCHEMA`.
        example: one input of the engine, without a batch dimension.
        arrived_ms: time of the arrival by `now_ms`, in ms.

    Returns:
        The request, with the time that is left.

    Raises:
        InvalidRequest: A field is missing, unknown or malformed.
        DeadlinePassed: The request was read only after its deadline.
    """
    if not isinstance(body, Mapping) or not {"pixels", "deadline_ms"} <= set(body) <= FIELDS:
        raise InvalidRequest(
            "body: give a JSON object with pixels and deadline_ms, and no more than "
            f"{', '.join(sorted(FIELDS))}"
        )
    deadline_ms = body["deadline_ms"]
    if type(deadline_ms) not in (int, float) or not 0 < deadline_ms < LONGEST_MS:
        raise InvalidRequest(f"deadline_ms: {deadline_ms!r} is not a number > 0 and < {LONGEST_MS:g}, in ms")
    try:
        x = torch.tensor(body["pixels"], dtype=example.dtype)
        x = x.reshape(example.shape) if x.dim() == 1 else x
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidRequest(
            f"pixels: give numbers of shape {tuple(example.shape)}, or all {example.numel()} in a row"
        ) from error
    left_ms = deadline_ms - (now_ms() - arrived_ms)
    if left_ms <= 0:
        raise DeadlinePassed(f"deadline_ms: {deadline_ms} ms passed before the request was read; allow more")
    return Ask(x, left_ms, body.get("min_accuracy"), body.get("priority"))


def reply(answer: Any, deadline_ms: float, arrived_ms: float) -> dict[str, Any]:
    """Return the JSON of one answer.

    Args:
        answer: an `Answer` whose output has one score per class.
        deadline_ms: time that the request was given, in ms from its arrival.
        arrived_ms: time of the arrival by `now_ms`, in ms.
    """
    latency_ms = now_ms() - arrived_ms
    return {
        "class": int(answer.output.argmax()),
        "subnet": answer.subnet,
        "accuracy": round(answer.accuracy, 2),
        "latency_ms": round(latency_ms, 3),
        "met": latency_ms <= deadline_ms,
    }


def health(service: Service, closing: bool) -> tuple[int, dict[str, str]]:
    """Return HTTP status and JSON for `/healthz`, by which load balancers decide whether to send requests.

    Args:
        service: the service.
        closing: whether the server is shutting down.
    """
    if closing:
        return 503, {"status": "closing"}
    if not service.batcher.stats().workers_up:
        return 503, {"status": "no worker"}
    return 200, {"status": "ok"}


def error_reply(error: RequestError) -> tuple[int, dict[str, str], dict[str, str]]:
    """Return HTTP status, JSON and headers for a request that ended with an error.

    Args:
        error: the error.
    """
    status = 500
    if isinstance(error, InvalidRequest):
        status = 400
    elif isinstance(error, QueueFull):
        status = 429
    elif isinstance(error, BatcherClosed):
        status = 503
    elif isinstance(error, DeadlinePassed):
        status = 504
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return status, {"error": type(error).__name__, "message": str(error)}, headers
