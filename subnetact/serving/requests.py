"""What goes into the batcher and what comes out: requests, answers, counters."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

__all__ = ["Answer", "BatcherStats", "Decided", "Outcome", "Request", "Runner", "settle"]


class Runner(Protocol):
    """What the batcher needs from an engine. Called from worker threads."""

    @property
    def keys(self) -> Sequence[str]:
        """Subnet keys in id order."""
        ...

    def check(self, x: Any) -> None:
        """Refuse one input at the door by raising `InvalidRequest`."""
        ...

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Sequence[Any]:
        """One output per input; `batch_size` >= len(inputs) is the size to pad to."""
        ...


class Answer(NamedTuple):
    """The result of one request.

    Attributes:
        output: what the runner returned for this input.
        subnet: id of the subnet that ran.
        accuracy: profiled accuracy of that subnet, percent.
        latency_ms: from submission to answer.
        met: whether that was within the deadline.
        batch_size: the size the batch was padded to.
    """

    output: Any
    subnet: int
    accuracy: float
    latency_ms: float
    met: bool
    batch_size: int


class Decided(NamedTuple):
    """One decision, for `on_decision`: k requests of `queued` run on `subnet`, padded to `batch_size`."""

    t_ms: float
    queued: int
    slack_ms: float
    subnet: int
    batch_size: int
    k: int


@dataclass(frozen=True)
class BatcherStats:
    """A snapshot of the counters; every request ends in exactly one of met to cancelled."""

    submitted: int
    met: int
    late: int
    dropped: int
    failed: int
    cancelled: int
    refused: int
    closed: int
    queued: int
    batches: int
    accuracy_sum: float
    served_by: dict[int, int]
    batch_sizes: dict[int, int]

    @property
    def attainment(self) -> float:
        """Share of finished requests that met their deadline; NaN before the first."""
        done = self.met + self.late + self.dropped + self.failed
        return self.met / done if done else math.nan


class Request:
    """One accepted input and who waits for it: an event loop, or (loop None) threads."""

    __slots__ = ("accepted_ms", "future", "loop", "x")

    def __init__(
        self, x: Any, accepted_ms: float, future: Any, loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self.x = x
        self.accepted_ms = accepted_ms
        self.future = future
        self.loop = loop


Outcome = tuple[Request, Answer | None, BaseException | None]


def settle(outcomes: list[Outcome]) -> None:
    """Hand outcomes to their waiters: threads directly, each event loop in one call."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        request, answer, error = outcome
        if request.loop is not None:
            by_loop.setdefault(request.loop, []).append(outcome)
            continue
        try:
            if error is None:
                request.future.set_result(answer)
            else:
                request.future.set_exception(error)
        except concurrent.futures.InvalidStateError:
            continue
    for loop, settled in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle_on_loop, settled)
        except RuntimeError:  # the loop was closed, and its waiters with it
            continue


def _settle_on_loop(outcomes: list[Outcome]) -> None:
    for request, answer, error in outcomes:
        if request.future.done():
            continue
        if error is None:
            request.future.set_result(answer)
        else:
            request.future.set_exception(error)
