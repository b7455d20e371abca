"""The errors that requests end with, and after how long work is taken to hang.

Each error says what happened, what was allowed, and what to do next.
"""

from __future__ import annotations

from typing import TypeVar

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    OutputNotFinite,
    QueueFull,
    WorkerDied,
    WorkerHung,
    failure_text,
)
from subnetact.serving.scheduling.request import Job, Request

Failure = TypeVar("Failure", bound=BatchFailed)


def queue_full(max_queue: int) -> QueueFull:
    """The error of a request that is refused because `max_queue` requests already wait."""
    return QueueFull(
        f"queue: {max_queue} requests wait already, as many as max_queue allows; retry later, or raise "
        "max_queue"
    )


def share_full(max_queue: int) -> QueueFull:
    """The error of a request whose client has as many open requests as its share of `max_queue` allows."""
    return QueueFull(
        f"queue: this client has its share of the {max_queue} places of the queue; wait for answers first"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that torch or Python ran out of memory; its class name tells."""
    return any(kind.__name__ in ("OutOfMemoryError", "MemoryError") for kind in type(error).__mro__)


def patience_ms(
    watchdog_ms: float | None, expected_ms: float = 0.0, known: bool = False, least_ms: float = 1000.0
) -> float:
    """Return after how long work is taken to hang; if it did not run before (`known`), not within 30 s."""
    if watchdog_ms is not None:
        return watchdog_ms
    return max(least_ms if known else 30_000.0, 20.0 * expected_ms)


def deadline_passed(request: Request, now_ms: float, fastest_ms: float) -> DeadlinePassed:
    """The error of a dropped request, whose fastest subnet needs `fastest_ms`."""
    given_ms = request.deadline_ms - request.accepted_ms
    return DeadlinePassed(
        f"deadline_ms: {given_ms:g} ms were given, after {now_ms - request.accepted_ms:.1f} ms no subnet "
        f"could answer in time any more (the fastest needs {fastest_ms:.3g} ms); allow more, or send less"
    )


def alone_failed(job: Job, cause: BaseException) -> BatchFailed:
    """The error of a request on which the engine raised although the request was alone in its batch."""
    text = f"subnet {job.subnet} failed on this request, alone in its batch: {failure_text(cause)}"
    return _caused(BatchFailed(f"{text}; look at the input and the engine"), cause)


def policy_failed(cause: BaseException) -> BatchFailed:
    """The error of all requests that wait when the policy raises or returns an answer that cannot run."""
    text = f"the policy failed: {failure_text(cause)}; correct the policy, or give another one"
    return _caused(BatchFailed(text), cause)


def worker_died(cause: BaseException) -> WorkerDied:
    """The error of a request with which a second worker died."""
    text = f"a worker died over this request, twice: {failure_text(cause)}; look at the input and the engine"
    return _caused(WorkerDied(text), cause)


def worker_hung(job: Job, now_ms: float) -> WorkerHung:
    """The error of a request with which a second worker hung."""
    return WorkerHung(
        f"subnet {job.subnet}: a worker hung over this request, twice; the last was replaced after "
        f"{now_ms - job.started_ms:.0f} ms, but {job.expected_ms:.1f} ms were expected; look at the input "
        "and the engine, or raise watchdog_ms"
    )


def output_not_finite(job: Job) -> OutputNotFinite:
    """The error of a request whose output has NaN or an infinite number."""
    return OutputNotFinite(
        f"subnet {job.subnet}: the output for this request is not finite (NaN or infinite); look at the "
        "weights and the input, or open the batcher with check_outputs=False if such outputs are meant"
    )


def never_ran() -> BatcherClosed:
    """The error of a request that waits when the batcher is closed without draining or without a worker."""
    return BatcherClosed("the batcher was closed before this request ran; open another one")


def _caused(error: Failure, cause: BaseException) -> Failure:
    error.__cause__ = cause
    return error
