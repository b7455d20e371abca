"""The counters of a batcher as metrics of `prometheus_client`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from inspect import cleandoc
from itertools import accumulate
from typing import Any, Protocol

from subnetact.errors import extra_needed
from subnetact.serving.live.stats import OUTCOMES, BatcherStats

_COUNTERS = (
    *("submitted", "refused", "full", "batches", "preempted", "bisected", "out_of_memory", "hung", "died"),
    *("revived", "retried", "replanned", "accuracy_sum"),
)
_GAUGES = ("queued", "running", "workers", "workers_up", "correction")
_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
_DOCUMENTED = _ATTRIBUTE.findall(cleandoc(BatcherStats.__doc__ or ""))
_HELP = {name: " ".join(text.split()) for name, text in _DOCUMENTED}
"""What the documentation of `BatcherStats` says of each attribute; nothing under `python -OO`."""
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
        with extra_needed("metrics need prometheus_client; pip install 'subnetact[serve]'"):
            self._families: Any = import_module("prometheus_client.core")
            self._text_of: Any = import_module("prometheus_client").generate_latest
        self._batcher = batcher
        self._prefix = prefix

    def text(self) -> str:
        """Return the current metrics in Prometheus' text format, version 0.0.4."""
        return str(self._text_of(self).decode())

    def collect(self) -> Iterable[Any]:
        """Yield the current metrics as families of `prometheus_client`; a registry calls this method."""
        counter, gauge = self._families.CounterMetricFamily, self._families.GaugeMetricFamily
        stats, prefix = self._batcher.stats(), self._prefix
        for kind, names in ((counter, _COUNTERS), (gauge, _GAUGES)):
            for name in names:
                shown = "accuracy_percent_sum" if name == "accuracy_sum" else name
                yield kind(prefix + shown, _HELP.get(name, ""), getattr(stats, name))
        outcomes = {name: getattr(stats, name) for name in OUTCOMES}
        accuracy = "profiled accuracy per subnet id, in percent."
        for kind, name, text, label, values in (
            (counter, "requests", "accepted requests by outcome.", "outcome", outcomes),
            (gauge, "drifted", _HELP.get("drifted"), "subnet", stats.drifted),
            (gauge, "batch_limit", _HELP.get("batch_limits"), "subnet", stats.batch_limits),
            (counter, "served", _HELP.get("served_by"), "subnet", stats.served_by),
            (gauge, "subnet_accuracy_percent", accuracy, "subnet", self._batcher.accuracy),
        ):
            family = kind(prefix + name, text or "", labels=[label])
            for key, value in values.items():
                family.add_metric([str(key)], value)
            yield family
        for name, (shown, text, unit) in _HISTOGRAMS.items():
            histogram = stats.histograms[name]
            edges = [*(f"{edge * unit:.12g}" for edge in histogram.edges), "+Inf"]
            buckets = list(zip(edges, accumulate(histogram.counts), strict=True))
            total = histogram.total * unit
            yield self._families.HistogramMetricFamily(prefix + shown, text, buckets, total)
