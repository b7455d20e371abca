"""The counters of a batcher, and `BatcherStats`, the snapshot of them that users get."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from subnetact.serving.live.histograms import COUNTS, MILLISECONDS, Histogram

#: every accepted request ends in exactly one of these
OUTCOMES = ("met", "late", "dropped", "failed", "cancelled", "closed")

_HISTOGRAMS = """`latency_ms` of the answers, `slack_ms` of the most urgent request at each decision (0 if
        none is left), `decision_ms` and `run_ms` per batch, `queue_depth` at each decision, and `batch`, the
        number of requests per batch."""


def _field(kind: str, text: str, default: Any = 0, metric: str = "") -> Any:
    """Return a field: its text, which also explains the metric, and the metric's kind, if there is one."""
    facts = {"kind": kind, "text": text, "metric": metric}
    return field(default_factory=lambda: {} if default is dict else default, metadata=facts)


@dataclass(frozen=True)
class BatcherStats:
    """A snapshot of a batcher's counters."""

    submitted: int = _field("Counter", "accepted requests: those `queued`, `running`, or with an outcome.")
    met: int = _field("", "requests that were answered at or before their deadline, an outcome.")
    late: int = _field("", "answered after their deadline, an outcome like the next four.")
    dropped: int = _field("", "expired, and ended with `DeadlinePassed`.")
    failed: int = _field("", "ended with `BatchFailed`.")
    cancelled: int = _field("", "withdrawn by their client.")
    closed: int = _field("", "ended with `BatcherClosed`.")
    refused: int = _field("Counter", "requests that the batcher never accepted: invalid, or queue full.")
    full: int = _field("Counter", "requests that were refused because the queue was full.")
    queued: int = _field("Gauge", "requests that wait now, deferred ones included.")
    running: int = _field("Gauge", "requests that are on a worker now.")
    batches: int = _field("Counter", "batches that were started.")
    preempted: int = _field(
        "Counter", "batches suspended between two blocks, while an urgent one went first."
    )
    bisected: int = _field("Counter", "batches that raised and were split.")
    out_of_memory: int = _field("Counter", "batches that ran out of memory and were split.")
    not_finite: int = _field("Counter", "requests that failed because their output was not finite.")
    hung: int = _field("Counter", "workers that took too long for a batch and were replaced.")
    died: int = _field("Counter", "workers whose thread or process ended.")
    revived: int = _field("Counter", "worker threads that were started again.")
    retried: int = _field("Counter", "requests that got a second try after their worker hung or died.")
    replanned: int = _field("Counter", "how often the policy was given other latencies.")
    workers: int = _field("Gauge", "number of workers of the batcher.")
    workers_up: int = _field("Gauge", "workers that can take a batch now or after the one that they run.")
    accuracy_sum: float = _field("", "sum of the profiled accuracy of all met requests, in percent.", 0.0)
    correction: float = _field("Gauge", "latency of the typical batch divided by that in the table.", 1.0)
    served_by: Mapping[int, int] = _field("Counter", "answered requests per subnet id.", dict, "served")
    batch_sizes: Mapping[int, int] = _field("", "answered batches per planned (padded) batch size.", dict)
    batch_limits: Mapping[int, int] = _field("Gauge", "largest batch within memory.", dict, "batch_limit")
    drifted: Mapping[int, float] = _field("Gauge", "corrections beyond their threshold.", dict, "drifted")
    histograms: Mapping[str, Histogram] = _field("", _HISTOGRAMS, dict)

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


_TEXTS = "".join(f"\n    {one.name}: {one.metadata['text']}" for one in fields(BatcherStats))
BatcherStats.__doc__ = f"{BatcherStats.__doc__}\n\nAttributes:{_TEXTS}\n"


class Counters:
    """The counters behind `BatcherStats` that the scheduler does not keep. The owner holds the lock."""

    def __init__(self) -> None:
        self.met = self.late = self.refused = self.full = self.not_finite = 0
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
