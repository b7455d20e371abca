"""The counters of a batcher, and `BatcherStats`, the snapshot of them that users get."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from subnetact.serving.live.histograms import COUNTS, MILLISECONDS, Histogram

Kind = TypeVar("Kind")
#: every accepted request ends in exactly one of these
OUTCOMES = ("met", "late", "dropped", "failed", "cancelled", "closed")

_SLACKS = (0.0, *MILLISECONDS)
HISTOGRAMS = {
    "latency_ms": (MILLISECONDS, "latency_seconds", "Time from submission to answer."),
    "slack_ms": (_SLACKS, "slack_seconds", "Time left to the most urgent request at a decision, 0 if none."),
    "decision_ms": (MILLISECONDS, "decision_seconds", "Time a decision took."),
    "run_ms": (MILLISECONDS, "run_seconds", "Time a batch took."),
    "queue_depth": (COUNTS, "queue_depth", "Requests waiting at each decision."),
    "batch": (COUNTS, "batch_requests", "Requests per batch."),
}
"""What there is a histogram of: the edges of its buckets, the name of its metric, and what both say."""


def stat(kind: str, text: str, default: Any = 0, metric: str = "") -> Any:
    """Return a field: its text, which also explains the metric, and the metric's kind, if there is one."""
    facts = {"kind": kind, "text": text, "metric": metric}
    return field(default_factory=lambda: {} if default is dict else default, metadata=facts)


def documented(kind: type[Kind]) -> type[Kind]:
    """Put the texts of a class of `stat` fields into its docstring."""
    known: Any = kind
    texts = "".join(f"\n    {one.name}: {one.metadata['text']}" for one in fields(known))
    kind.__doc__ = f"{kind.__doc__}\n\nAttributes:{texts}\n"
    return kind


@documented
@dataclass(frozen=True)
class BatcherStats:
    """A snapshot of a batcher's counters."""

    submitted: int = stat("Counter", "accepted requests: those `queued`, `running`, or with an outcome.")
    met: int = stat("", "requests that were answered at or before their deadline, an outcome.")
    late: int = stat("", "answered after their deadline, an outcome like the next four.")
    dropped: int = stat("", "expired, and ended with `DeadlinePassed`.")
    failed: int = stat("", "ended with `BatchFailed`.")
    cancelled: int = stat("", "withdrawn by their client.")
    closed: int = stat("", "ended with `BatcherClosed`.")
    refused: int = stat("Counter", "requests that the batcher never accepted: invalid, or queue full.")
    full: int = stat("Counter", "requests that were refused because the queue was full.")
    queued: int = stat("Gauge", "requests that wait now, deferred ones included.")
    running: int = stat("Gauge", "requests that are on a worker now.")
    batches: int = stat("Counter", "batches that were started.")
    preempted: int = stat("Counter", "batches suspended between two blocks, while an urgent one went first.")
    bisected: int = stat("Counter", "batches that raised and were split.")
    out_of_memory: int = stat("Counter", "batches that ran out of memory and were split.")
    not_finite: int = stat("Counter", "requests that failed because their output was not finite.")
    hung: int = stat("Counter", "workers that took too long for a batch and were replaced.")
    died: int = stat("Counter", "workers whose thread or process ended.")
    revived: int = stat("Counter", "worker threads that were started again.")
    retried: int = stat("Counter", "requests that got a second try after their worker hung or died.")
    replanned: int = stat("Counter", "how often the policy was given other latencies.")
    workers: int = stat("Gauge", "number of workers of the batcher.")
    workers_up: int = stat("Gauge", "workers that can take a batch now or after the one that they run.")
    accuracy_sum: float = stat("", "sum of the profiled accuracy of all met requests, in percent.", 0.0)
    correction: float = stat("Gauge", "latency of the typical batch divided by that in the table.", 1.0)
    served_by: Mapping[int, int] = stat("Counter", "answered requests per subnet id.", dict, "served")
    batch_sizes: Mapping[int, int] = stat("", "answered batches per planned (padded) batch size.", dict)
    batch_limits: Mapping[int, int] = stat("Gauge", "largest batch within memory.", dict, "batch_limit")
    drifted: Mapping[int, float] = stat("Gauge", "corrections beyond their threshold.", dict, "drifted")
    histograms: Mapping[str, Histogram] = stat(
        "", " ".join(f"`{name}`: {text}" for name, (_, _, text) in HISTOGRAMS.items()), dict
    )

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
        return dict(json.loads(json.dumps({**asdict(self), **known})))

    def to_json(self) -> str:
        """Return the snapshot as JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)


class Counters:
    """The counters behind `BatcherStats`; `counts` are also those of the scheduler. The owner locks."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self.accuracy_sum = 0.0
        self.served_by: Counter[int] = Counter()
        self.batch_sizes: Counter[int] = Counter()
        self.histograms = {name: Histogram(edges) for name, (edges, _, _) in HISTOGRAMS.items()}

    def answered(self, subnet: int, accuracy: float, latencies_ms: Sequence[float], met: int) -> None:
        """Count the answers of one subnet, `met` of them in time."""
        self.histograms["latency_ms"].add_all(latencies_ms)
        self.counts["met"] += met
        self.counts["late"] += len(latencies_ms) - met
        self.accuracy_sum += met * accuracy
        self.served_by[subnet] += len(latencies_ms)

    def snapshot(self, **now: Any) -> BatcherStats:
        """Return a copy of the counters, with the fields that are not counted."""
        counts: dict[str, Any] = {name: n for name, n in self.counts.items() if name != "answered"}
        for name in ("served_by", "batch_sizes"):
            counts[name] = dict(sorted(vars(self)[name].items()))
        histograms = {name: one.snapshot() for name, one in self.histograms.items()}
        return BatcherStats(**counts, **now, accuracy_sum=self.accuracy_sum, histograms=histograms)
