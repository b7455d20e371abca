"""The counters of a batcher, and `BatcherStats`, the snapshot of them that users get."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from subnetact.serving.live.histograms import COUNTS, MILLISECONDS, Histogram

#: every accepted request ends in exactly one of these
OUTCOMES = ("met", "late", "dropped", "failed", "cancelled", "closed")


@dataclass(frozen=True)
class BatcherStats:
    """A snapshot of a batcher's counters.

    Attributes:
        submitted: requests that were accepted; always the sum of the next six outcomes, `queued` and
            `running`.
        met: answered at or before their deadline.
        late: answered after their deadline.
        dropped: expired, and ended with `DeadlinePassed`.
        failed: ended with `BatchFailed`.
        cancelled: withdrawn by their client.
        closed: ended with `BatcherClosed`.
        refused: requests that the batcher never accepted: invalid, or queue full. A server may refuse more.
        full: how many of these were refused because the queue was full.
        queued: requests that wait now, deferred ones included.
        running: requests that are on a worker now.
        batches: batches that were started.
        preempted: batches that were suspended between two blocks, while an urgent batch went first.
        bisected: batches that raised and were split.
        out_of_memory: batches that ran out of memory and were split.
        hung: workers that hung and were replaced.
        died: workers that ended because of an exception that is no `Exception`.
        revived: worker threads that were started again.
        retried: requests that got a second try after their worker hung or died.
        replanned: how often the policy was given other latencies.
        workers: number of workers of the batcher.
        workers_up: workers that can take a batch now or after the one that they run.
        accuracy_sum: sum over all met requests of the profiled accuracy of their subnet, in percent.
        correction: latency of the typical batch divided by its latency in the table.
        served_by: number of answered requests per subnet id.
        batch_sizes: number of answered batches per planned batch size (a compiled engine pads to it).
        batch_limits: largest batch size of every subnet that ran out of memory.
        drifted: the correction of every subnet beyond the drift threshold (see `Corrections`).
        histograms: `latency_ms` of the answers, `slack_ms` of the most urgent request at each decision,
            `decision_ms` and `run_ms` per batch, `queue_depth` at each decision, and `batch`, the number of
            requests per batch.
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
    preempted: int = 0
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
    histograms: Mapping[str, Histogram] = field(default_factory=dict)

    @property
    def attainment(self) -> float:
        """Share, 0 to 1, of the met requests among those met, late, dropped or failed; NaN without any."""
        done = self.met + self.late + self.dropped + self.failed
        return self.met / done if done else math.nan

    @property
    def mean_accuracy(self) -> float:
        """Mean profiled accuracy over the met requests, in percent; NaN before the first."""
        return self.accuracy_sum / self.met if self.met else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot as numbers, strings, lists and dictionaries with string keys."""
        shares = {"attainment": self.attainment, "mean_accuracy": self.mean_accuracy}
        known = {name: None if math.isnan(value) else value for name, value in shares.items()}
        plain: dict[str, Any] = json.loads(json.dumps({**asdict(self), **known}))
        return plain

    def to_json(self) -> str:
        """Return the snapshot as JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)


class Counters:
    """The counters behind `BatcherStats` that the scheduler does not keep. The owner holds the lock."""

    def __init__(self) -> None:
        self.met = self.late = self.refused = self.full = 0
        self.accuracy_sum = 0.0
        self.served_by: Counter[int] = Counter()
        self.batch_sizes: Counter[int] = Counter()
        self.latency_ms = Histogram(MILLISECONDS)
        self.slack_ms = Histogram((0.0, *MILLISECONDS))
        self.decision_ms = Histogram(MILLISECONDS)
        self.run_ms = Histogram(MILLISECONDS)
        self.queue_depth = Histogram(COUNTS)
        self.batch = Histogram(COUNTS)

    def snapshot(self, scheduled: Mapping[str, int], **more: Any) -> BatcherStats:
        """Return a copy of the counters, with those of the scheduler and the other fields."""
        histograms, counters = {}, {**scheduled, **more}
        counters.pop("answered", None)
        for name, value in vars(self).items():
            if isinstance(value, Histogram):
                histograms[name] = value.snapshot()
            else:
                counters[name] = dict(sorted(value.items())) if isinstance(value, Counter) else value
        return BatcherStats(**counters, histograms=histograms)
