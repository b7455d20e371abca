"""What a batcher counts of itself, and the snapshot it gives out."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from subnetact.serving.live.histograms import (
    COUNTS,
    MILLISECONDS,
    Histogram,
    HistogramSnapshot,
)

__all__ = ["OUTCOMES", "BatcherStats", "Observation"]

#: every accepted request ends in exactly one of these
OUTCOMES = ("met", "late", "dropped", "failed", "cancelled", "closed")


@dataclass(frozen=True)
class BatcherStats:
    """A snapshot of the counters: submitted = the six outcomes + queued + running.

    Attributes:
        submitted: requests accepted.
        met: answered at or before the deadline.
        late: answered after it.
        dropped: ended with `DeadlinePassed`.
        failed: ended with `BatchFailed`.
        cancelled: cancelled by the client.
        closed: ended with `BatcherClosed`.
        refused: not accepted: invalid, or the queue was full.
        full: how many of those because the queue was full.
        queued: waiting now.
        running: on a worker now.
        batches: batches started.
        bisected: batches that raised and were split.
        out_of_memory: batches that ran out of memory and were split.
        hung: workers replaced because they hung.
        died: workers that ended by an exception that is no `Exception`.
        revived: worker threads started again.
        retried: requests given a second try after a worker hung or died.
        replanned: times the policy was given other latencies, because those it planned with were found to be
            more than 5 % wrong or because a subnet ran out of memory.
        workers: workers there should be.
        workers_up: workers that can take a batch, now or after the one they run.
        accuracy_sum: sum over met requests of the profiled accuracy of their subnet, percent.
        served_by: requests answered, by subnet.
        batch_sizes: batches answered, by the size they were padded to.
        batch_limits: largest batch a subnet still gets, where it ran out of memory.
        correction: how much slower (> 1) or faster than the table this machine is; the median batch.
        drifted: the same of each subnet beyond the threshold of drift.
        histograms: latency_ms, slack_ms (of the head, at each decision), decision_ms, run_ms, queue_depth
            and batch (requests in one).
    """

    submitted: int = 0
    met: int = 0
    late: int = 0
    dropped: int = 0
    failed: int = 0
    cancelled: int = 0
    closed: int = 0
    refused: int = 0
    full: int = 0
    queued: int = 0
    running: int = 0
    batches: int = 0
    bisected: int = 0
    out_of_memory: int = 0
    hung: int = 0
    died: int = 0
    revived: int = 0
    retried: int = 0
    replanned: int = 0
    workers: int = 0
    workers_up: int = 0
    accuracy_sum: float = 0.0
    correction: float = 1.0
    served_by: Mapping[int, int] = field(default_factory=dict)
    batch_sizes: Mapping[int, int] = field(default_factory=dict)
    batch_limits: Mapping[int, int] = field(default_factory=dict)
    drifted: Mapping[int, float] = field(default_factory=dict)
    histograms: Mapping[str, HistogramSnapshot] = field(default_factory=dict)

    @property
    def attainment(self) -> float:
        """Share of finished requests that met their deadline; NaN before the first."""
        done = self.met + self.late + self.dropped + self.failed
        return self.met / done if done else math.nan

    @property
    def mean_accuracy(self) -> float:
        """Mean profiled accuracy over met requests, percent; NaN before the first."""
        return self.accuracy_sum / self.met if self.met else math.nan

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as plain numbers, strings, lists and dictionaries with string keys."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        plain["attainment"] = None if math.isnan(self.attainment) else self.attainment
        plain["mean_accuracy"] = None if math.isnan(self.mean_accuracy) else self.mean_accuracy
        return plain

    def to_json(self) -> str:
        """The snapshot as JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)


class Observation:
    """The running counters behind `BatcherStats`. Its owner locks."""

    def __init__(self) -> None:
        self.submitted = self.met = self.late = self.dropped = self.failed = self.cancelled = 0
        self.closed = self.refused = self.full = self.batches = self.bisected = self.out_of_memory = 0
        self.hung = self.died = self.revived = self.retried = 0
        self.accuracy_sum = 0.0
        self.served_by: Counter[int] = Counter()
        self.batch_sizes: Counter[int] = Counter()
        self.latency_ms = Histogram(MILLISECONDS)
        self.slack_ms = Histogram((0.0, *MILLISECONDS))
        self.decision_ms = Histogram(MILLISECONDS)
        self.run_ms = Histogram(MILLISECONDS)
        self.queue_depth = Histogram(COUNTS)
        self.batch = Histogram(COUNTS)

    @property
    def unfinished(self) -> int:
        """Accepted requests without an outcome."""
        ended = self.met + self.late + self.dropped + self.failed + self.cancelled + self.closed
        return self.submitted - ended

    def snapshot(self, **more: Any) -> BatcherStats:
        """A copy, completed by what the owner knows."""
        values: dict[str, Any] = {
            k: v.snapshot() if isinstance(v, Histogram) else v for k, v in vars(self).items()
        }
        histograms = {k: v for k, v in values.items() if isinstance(v, HistogramSnapshot)}
        counters: dict[str, Any] = {k: v for k, v in values.items() if k not in histograms}
        counters["served_by"] = dict(sorted(self.served_by.items()))
        counters["batch_sizes"] = dict(sorted(self.batch_sizes.items()))
        return BatcherStats(**counters, **more, histograms=histograms)
