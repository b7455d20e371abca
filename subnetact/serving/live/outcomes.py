"""Gives every request of a batcher exactly one outcome and counts the outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from subnetact.errors import RequestError
from subnetact.serving.live.batch_job import BatchJob
from subnetact.serving.live.decision_log import DecisionLog
from subnetact.serving.live.failures import deadline_passed, never_ran
from subnetact.serving.live.requests import Answer, Outcome, Request
from subnetact.serving.live.stats import Counters

__all__ = ["Outcomes"]

_new = tuple.__new__  # takes half the time of calling a named tuple's class


class Outcomes:
    """Closes requests, each with one outcome, and counts them. The owner holds the lock.

    A method that returns outcomes does not deliver them: the caller does, after it has released the lock.

    Attributes:
        counters: the counters behind `BatcherStats`.
        log: the decision log, if there is one.
        undelivered: number of calls whose outcomes were not delivered yet.
        tell: called with every request that ends. If None, nobody is told.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self.log: DecisionLog | None = None
        self.undelivered = 0
        self.tell: Callable[[Request], None] | None = None

    @property
    def settled(self) -> bool:
        """Whether every accepted request has its outcome and every outcome was delivered."""
        return not self.counters.unfinished and not self.undelivered

    def answer(self, job: BatchJob, outputs: Sequence[Any], accuracy: float, now_ms: float) -> list[Outcome]:
        """Answer the requests of a job's current part.

        Args:
            job: the job.
            outputs: one output per request of the part.
            accuracy: profiled accuracy of the job's subnet, in percent.
            now_ms: the time, in ms.

        Returns:
            The outcomes of the requests that were still open.
        """
        counters, size, subnet = self.counters, job.size, job.subnet
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
                waited_ms = job.started_ms - request.accepted_ms
                answer = _new(Answer, (output, subnet, accuracy, latency_ms, in_time, size, waited_ms))
                outcomes.append((request, answer, None))
        counters.latency_ms.add_all(latencies)
        counters.met += met
        counters.late += len(outcomes) - met
        counters.accuracy_sum += met * accuracy
        counters.served_by[subnet] += len(outcomes)
        counters.batch_sizes[size] += 1
        counters.run_ms.add(now_ms - job.started_ms - job.paused_ms)
        if self.log is not None:
            self.log.batch(job, [request for request, _, _ in outcomes], now_ms - job.started_ms, met)
        if self.tell is not None:
            for request, _, _ in outcomes:
                self.tell(request)
        return self.owe(outcomes)

    def drop(self, request: Request, now_ms: float, fastest_ms: float) -> Outcome:
        """End a request with `DeadlinePassed`, because it has expired.

        Args:
            request: the request.
            now_ms: the time, in ms.
            fastest_ms: least latency of a subnet that the request accepts, in ms.
        """
        self._end(request, "dropped")
        self.counters.dropped += 1
        return request, None, deadline_passed(request, now_ms, fastest_ms)

    def fail(self, request: Request, error: RequestError) -> Outcome:
        """End a request with an error, because the engine, its worker or the policy failed.

        Args:
            request: the request.
            error: the error that its client gets.
        """
        self._end(request, "failed")
        self.counters.failed += 1
        return request, None, error

    def close(self, request: Request) -> Outcome:
        """End a request with `BatcherClosed`, because the batcher is closed before the request could run.

        Args:
            request: the request.
        """
        self._end(request, "closed")
        self.counters.closed += 1
        return request, None, never_ran()

    def cancel(self, request: Request) -> None:
        """End a request that its client has cancelled; nobody waits for an outcome.

        Args:
            request: the request.
        """
        self._end(request, "cancelled")
        self.counters.cancelled += 1

    def refuse_full(self, request: Request) -> None:
        """Count a request that is refused because the queue is full.

        Args:
            request: the request, which was never queued.
        """
        self.counters.refused += 1
        self.counters.full += 1
        if self.log is not None:
            self.log.outcome("full", request)

    def owe(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Note that the outcomes of one call have to be delivered.

        Args:
            outcomes: the outcomes of the call; there may be none.

        Returns:
            The same list.
        """
        if outcomes:
            self.undelivered += 1
        return outcomes

    def _end(self, request: Request, outcome: str) -> None:
        request.open = False
        if self.tell is not None:
            self.tell(request)
        if self.log is not None:
            self.log.outcome(outcome, request)
