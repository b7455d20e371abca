"""The errors that requests end with, each with what happened, what was allowed, and what to do."""

from __future__ import annotations

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    QueueFull,
    WorkerHung,
)
from subnetact.serving.live.jobs import Job
from subnetact.serving.live.requests import Request

__all__ = [
    "alone_failed",
    "deadline_passed",
    "never_ran",
    "policy_failed",
    "queue_full",
    "worker_died",
    "worker_hung",
]


def queue_full(bound: int) -> QueueFull:
    """At the door."""
    return QueueFull(
        f"queue: {bound} requests wait already, as many as max_queue allows; retry later, or raise max_queue"
    )


def deadline_passed(request: Request, now_ms: float, fastest_ms: float) -> DeadlinePassed:
    """Given up by the hopeless rule."""
    given_ms = request.deadline_ms - request.accepted_ms
    return DeadlinePassed(
        f"deadline_ms: {given_ms:g} ms were given, after {now_ms - request.accepted_ms:.1f} ms no subnet "
        f"could answer in time any more (the fastest needs {fastest_ms:.3g} ms); allow more, or send less"
    )


def alone_failed(job: Job, cause: BaseException) -> BatchFailed:
    """The engine raised on this request and no other."""
    error = BatchFailed(
        f"subnet {job.subnet} failed on this request, alone in its batch: {type(cause).__name__}: {cause}; "
        "look at the input and the engine"
    )
    error.__cause__ = cause
    return error


def policy_failed(cause: BaseException) -> BatchFailed:
    """The policy raised, or gave an answer that cannot run."""
    error = BatchFailed(f"the policy failed: {type(cause).__name__}: {cause}; mend it, or give another one")
    error.__cause__ = cause
    return error


def worker_died(cause: BaseException) -> BatchFailed:
    """The second worker ended over this request, too."""
    error = BatchFailed(
        f"a worker died over this request, twice: {type(cause).__name__}: {cause}; look at the input and the "
        "engine"
    )
    error.__cause__ = cause
    return error


def worker_hung(job: Job, now_ms: float) -> WorkerHung:
    """The second worker did not come back from this request, either."""
    return WorkerHung(
        f"subnet {job.subnet}: a worker hung over this request, twice; the last was replaced after "
        f"{now_ms - job.started_ms:.0f} ms, where {job.expected_ms:.1f} ms were expected; look at the input "
        "and the engine, or raise watchdog_ms"
    )


def never_ran() -> BatcherClosed:
    """Closed without draining, or with no worker left."""
    return BatcherClosed("the batcher was closed before this request ran; open another one")
