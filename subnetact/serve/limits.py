"""What a server accepts from its clients: sizes, numbers and times. Every limit has a safe default."""

from __future__ import annotations

import math
from dataclasses import dataclass

from subnetact.errors import ServeError

MEGABYTE = 2**20
BYTES_PER_VALUE = 32  # the longest text of one number of an input in JSON, with its separators


@dataclass(frozen=True)
class Limits:
    """The limits of one server. A proxy in front of it holds those of slow clients: `examples/proxy`.

    Attributes:
        body_bytes: largest body of a request. If None, 1 MiB plus 32 bytes for every value of one input, and
            of `rows` inputs in the Open Inference Protocol, up to `bodies_bytes`.
        bodies_bytes: largest sum of all bodies that the server holds at one time; beyond it, requests are
            refused with status 503.
        header_bytes: largest head of a request: names and values of its headers.
        rows: largest number of inputs in one request of the Open Inference Protocol.
        deadline_ms: longest deadline that a request may name, in ms.
        connections: largest number of open connections; requests of further ones get status 503.
        body_s: time from the headers of a request to the end of its body, in s.
        idle_s: time that a connection may wait for its next request, in s.

    Raises:
        ServeError: a limit is not a positive number.
    """

    body_bytes: int | None = None
    bodies_bytes: int = 512 * MEGABYTE
    header_bytes: int = 32 * 1024
    rows: int = 256
    deadline_ms: float = 3_600_000.0
    connections: int = 1000
    body_s: float = 30.0
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None and name == "body_bytes":
                continue
            whole = not name.endswith(("_s", "_ms"))
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                kind = "whole number" if whole else "number"
                raise ServeError(f"{name}: got {value!r}; give a finite {kind} > 0")
