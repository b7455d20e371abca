"""What the example servers share: their options, the batcher they open, and requests and answers as JSON."""

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
from subnetact.serving.policies.registry import make_policy

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
SCHEMA = {
    "type": "object",
    "required": ["pixels", "deadline_ms"],
    "additionalProperties": False,
    "properties": {
        "pixels": {"type": "array", "description": "one input, nested as the engine's example, or flat"},
        "deadline_ms": {"type": "number", "description": "time it is given, from its arrival"},
        "min_accuracy": {"type": "number", "description": "percent, of the subnet that may answer"},
        "priority": {"type": "integer"},
    },
}
FIELDS = {"pixels", "deadline_ms", "min_accuracy", "priority"}


class Service(NamedTuple):
    """An engine behind a batcher, and the addresses to serve it at."""

    engine: Engine
    batcher: Batcher
    host: str
    port: int
    grace_s: float


class Ask(NamedTuple):
    """One request: an input without a batch dimension, and what is left of its deadline."""

    x: Tensor
    deadline_ms: float
    min_accuracy: float | None
    priority: int | None


def options(description: str | None) -> argparse.ArgumentParser:
    """The command line of a server."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one and prints it")
    parser.add_argument("--bundle", type=Path, help="a saved engine of classifiers; default: digits")
    parser.add_argument("--table", type=Path, help="latency table; default: the bundle's, or profile now")
    parser.add_argument("--policy", default="slackfit:4", help="slackfit:4, hullfit, fixed:0 and so on")
    parser.add_argument("--slo-ms", type=float, default=36.0, help="the usual deadline")
    parser.add_argument("--max-queue", type=int, default=2000)
    parser.add_argument("--grace-s", type=float, default=0.0, help="serve on while /healthz says 503")
    return parser


def open_service(args: argparse.Namespace) -> Service:
    """Load, profile if need be, and start the batcher; exit with a message when that cannot work."""
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)  # the worker asks for the interpreter back after every operation
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
    gc.freeze()  # what is loaded stays: a full collection would stop the server for a tenth of a second
    return Service(engine, batcher, args.host, args.port, args.grace_s)


def _table(engine: Engine, path: Path | None) -> LatencyTable:
    if path is not None:
        return LatencyTable.load(path)
    table = next(iter(engine.tables.values()), None) or profiled(engine)
    if not all(map(math.isfinite, table.accuracy)):
        raise TableError("the bundle's subnets have no accuracy to choose by; give a --table with it")
    return table


def now_ms() -> float:
    """The clock that deadlines are made absolute with."""
    return time.perf_counter() * 1e3


def read_json(body: bytes) -> Any:
    """Decode a request's body.

    Raises:
        InvalidRequest: it is not JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"body: not JSON ({error}); send one JSON object") from error


def read_ask(body: Any, example: Tensor, arrived_ms: float) -> Ask:
    """Check one request; its deadline counts from `arrived_ms`.

    Args:
        body: `pixels`, nested as `example` or flat; `deadline_ms`, from its arrival; optionally
            `min_accuracy`, percent, and `priority`.
        example: one input.
        arrived_ms: when the request reached this host.

    Raises:
        InvalidRequest: a field that is missing, unknown or malformed.
        DeadlinePassed: reading it has taken all its time.
    """
    if not isinstance(body, Mapping) or not {"pixels", "deadline_ms"} <= set(body) <= FIELDS:
        raise InvalidRequest(
            "body: give a JSON object with pixels and deadline_ms, and no more than "
            f"{', '.join(sorted(FIELDS))}"
        )
    numbers = {name: body.get(name) for name in FIELDS - {"pixels"}}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise InvalidRequest(f"{name}: {value!r} is not a number; give one, or leave it out")
        try:
            math.isfinite(value or 0)
        except OverflowError as error:
            raise InvalidRequest(f"{name}: an integer beyond every float; give a smaller one") from error
    deadline_ms = numbers["deadline_ms"]
    if deadline_ms is None or not 0 < deadline_ms < math.inf:
        raise InvalidRequest(f"deadline_ms: {deadline_ms} must be finite and > 0, in milliseconds")
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
    return Ask(x, left_ms, numbers["min_accuracy"], numbers["priority"])


def reply(answer: Any, deadline_ms: float, arrived_ms: float) -> dict[str, Any]:
    """The JSON of one answer; latency and deadline count from `arrived_ms`."""
    latency_ms = now_ms() - arrived_ms
    return {
        "class": int(answer.output.argmax()),
        "subnet": answer.subnet,
        "accuracy": round(answer.accuracy, 2),
        "latency_ms": round(latency_ms, 3),
        "met": latency_ms <= deadline_ms,
    }


def health(service: Service, closing: bool) -> tuple[int, dict[str, str]]:
    """Status and JSON for /healthz: whether requests are welcome here."""
    if closing:
        return 503, {"status": "closing"}
    if not service.batcher.stats().workers_up:
        return 503, {"status": "no worker"}
    return 200, {"status": "ok"}


def error_reply(error: RequestError) -> tuple[int, dict[str, str], dict[str, str]]:
    """Status, JSON and headers that tell a client what became of its request."""
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
