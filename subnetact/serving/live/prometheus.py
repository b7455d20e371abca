"""The counters of a batcher as metrics of `prometheus_client`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from itertools import accumulate
from typing import Any, Protocol

from subnetact.errors import MissingExtra
from subnetact.serving.live.stats import OUTCOMES, BatcherStats

__all__ = ["Collector"]

_COUNTERS = {
    "submitted": "Requests accepted.",
    "refused": "Requests the batcher refused: invalid, or queue full. A server may refuse more on its own.",
    "full": "Requests refused because the queue was full.",
    "batches": "Batches started.",
    "preempted": "Batches suspended between two blocks for an urgent one.",
    "bisected": "Batches that raised and were split.",
    "out_of_memory": "Batches that ran out of memory and were split.",
    "hung": "Workers that hung and were replaced.",
    "died": "Workers that died.",
    "revived": "Worker threads started again.",
    "retried": "Requests given a second try after their worker was lost.",
    "replanned": "Times the policy was given other latencies.",
    "accuracy_sum": "Sum of profiled accuracy over requests that met their deadline.",
}
_GAUGES = {
    "queued": "Requests waiting.",
    "running": "Requests on a worker.",
    "workers": "Workers of the batcher.",
    "workers_up": "Workers that are up.",
    "correction": "Measured latency over the table's, typical batch.",
}
_HISTOGRAMS = {
    "latency_ms": ("latency_seconds", "Time from submission to answer.", 1e-3),
    "slack_ms": ("slack_seconds", "Slack of the most urgent request at each decision.", 1e-3),
    "decision_ms": ("decision_seconds", "Time a decision took.", 1e-3),
    "run_ms": ("run_seconds", "Time a batch took.", 1e-3),
    "queue_depth": ("queue_depth", "Requests waiting at each decision.", 1.0),
    "batch": ("batch_requests", "Requests per batch.", 1.0),
}


class _HasStats(Protocol):
    @property
    def accuracy(self) -> Mapping[int, float]: ...

    def stats(self) -> BatcherStats: ...


class Collector:
    """Offers a batcher's metrics to a registry: `REGISTRY.register(Collector(batcher))`.

    Args:
        batcher: a `Batcher`.
        prefix: first part of the name of every metric.

    Raises:
        MissingExtra: prometheus_client is not installed.
    """

    def __init__(self, batcher: _HasStats, prefix: str = "subnetact_") -> None:
        try:
            self._families: Any = import_module("prometheus_client.core")
            self._text_of: Any = import_module("prometheus_client").generate_latest
        except ImportError as error:
            raise MissingExtra("metrics need prometheus_client; pip install 'subnetact[serve]'") from error
        self._batcher = batcher
        self._prefix = prefix

    def text(self) -> str:
        """Return the current metrics in Prometheus' text format, version 0.0.4."""
        return str(self._text_of(self).decode())

    def collect(self) -> Iterable[Any]:
        """Yield the current metrics as families of `prometheus_client`; a registry calls this method."""
        counter, gauge = self._families.CounterMetricFamily, self._families.GaugeMetricFamily
        stats, prefix = self._batcher.stats(), self._prefix
        for kind, texts in ((counter, _COUNTERS), (gauge, _GAUGES)):
            for name, text in texts.items():
                shown = "accuracy_percent_sum" if name == "accuracy_sum" else name
                yield kind(prefix + shown, text, getattr(stats, name))
        outcomes = {name: getattr(stats, name) for name in OUTCOMES}
        drifted = "Measured latency over the table's, subnets beyond the threshold."
        limits = "Largest batch of subnets that ran out of memory."
        accuracy = "Profiled accuracy of each subnet."
        for kind, name, text, label, values in (
            (counter, "requests", "Accepted requests by outcome.", "outcome", outcomes),
            (gauge, "drifted", drifted, "subnet", stats.drifted),
            (gauge, "batch_limit", limits, "subnet", stats.batch_limits),
            (counter, "served", "Requests answered by subnet.", "subnet", stats.served_by),
            (gauge, "subnet_accuracy_percent", accuracy, "subnet", self._batcher.accuracy),
        ):
            family = kind(prefix + name, text, labels=[label])
            for key, value in values.items():
                family.add_metric([str(key)], value)
            yield family
        for name, (shown, text, unit) in _HISTOGRAMS.items():
            histogram = stats.histograms[name]
            edges = [*(f"{edge * unit:.12g}" for edge in histogram.edges), "+Inf"]
            buckets = list(zip(edges, accumulate(histogram.counts), strict=True))
            total = histogram.total * unit
            yield self._families.HistogramMetricFamily(prefix + shown, text, buckets, total)
