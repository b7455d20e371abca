"""The account of a batcher: who got which outcome, exactly one each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subnetact.errors import RequestError
from subnetact.serving.live.decision_log import DecisionLog
from subnetact.serving.live.failures import deadline_passed, never_ran
from subnetact.serving.live.jobs import Job
from subnetact.serving.live.requests import Answer, Outcome, Request
from subnetact.serving.live.stats import Observation

__all__ = ["Outcomes"]

_new = tuple.__new__  # half the time of calling a named tuple's class


class Outcomes:
    """Closes requests and counts how. Its owner locks.

    Attributes:
        seen: the counters.
        log: told of everything, if there is one.
        delivering: calls that made outcomes which are not settled yet.
    """

    def __init__(self) -> None:
        self.seen = Observation()
        self.log: DecisionLog | None = None
        self.delivering = 0

    @property
    def settled(self) -> bool:
        """Whether every accepted request has its outcome, and got it."""
        return not self.seen.unfinished and not self.delivering

    def answer(self, job: Job, outputs: Sequence[Any], accuracy: float, now_ms: float) -> list[Outcome]:
        """The job's current part was answered."""
        seen, size, subnet = self.seen, job.size, job.subnet
        outcomes: list[Outcome] = []
        latencies: list[float] = []
        met = 0
        for request, output in zip(job.part, outputs, strict=True):
            if request.open:
                request.open = False
                in_time = now_ms <= request.deadline_ms
                met += in_time
                latency_ms = now_ms - request.accepted_ms
                latencies.append(latency_ms)
                answer = _new(Answer, (output, subnet, accuracy, latency_ms, in_time, size))
                outcomes.append((request, answer, None))
        seen.latency_ms.add_all(latencies)
        seen.met += met
        seen.late += len(outcomes) - met
        seen.accuracy_sum += met * accuracy
        seen.served_by[subnet] += len(outcomes)
        seen.batch_sizes[size] += 1
        seen.run_ms.add(now_ms - job.started_ms)
        if self.log is not None:
            self.log.batch(job, [request for request, _, _ in outcomes], now_ms - job.started_ms, met)
        return self.owed(outcomes)

    def drop(self, request: Request, now_ms: float, fastest_ms: float) -> Outcome:
        """No subnet can answer it in time any more."""
        self._close(request, "dropped")
        self.seen.dropped += 1
        return request, None, deadline_passed(request, now_ms, fastest_ms)

    def fail(self, request: Request, error: RequestError) -> Outcome:
        """The engine, its worker or the policy failed on it."""
        self._close(request, "failed")
        self.seen.failed += 1
        return request, None, error

    def refuse(self, request: Request) -> Outcome:
        """The batcher closes before it could run."""
        self._close(request, "closed")
        self.seen.closed += 1
        return request, None, never_ran()

    def cancel(self, request: Request) -> None:
        """Its client has gone."""
        self._close(request, "cancelled")
        self.seen.cancelled += 1

    def full(self, request: Request) -> None:
        """It was not accepted: the queue is full."""
        self.seen.refused += 1
        self.seen.full += 1
        if self.log is not None:
            self.log.outcome("full", request)

    def owed(self, outcomes: list[Outcome]) -> list[Outcome]:
        """The outcomes of one call, from now on to be delivered."""
        if outcomes:
            self.delivering += 1
        return outcomes

    def _close(self, request: Request, outcome: str) -> None:
        request.open = False
        if self.log is not None:
            self.log.outcome(outcome, request)
