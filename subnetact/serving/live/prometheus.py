"""The counters of a batcher in Prometheus' text exposition format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Protocol

from subnetact.serving.live.histograms import HistogramSnapshot
from subnetact.serving.live.stats import OUTCOMES, BatcherStats

__all__ = ["Collector", "exposition"]

_COUNTERS = {
    "submitted": "Requests accepted.",
    "refused": "Requests refused at the door: invalid, or the queue was full.",
    "full": "Requests refused because the queue was full.",
    "batches": "Batches started.",
    "bisected": "Batches that raised and were split.",
    "out_of_memory": "Batches that ran out of memory and were split.",
    "hung": "Workers replaced because they hung.",
    "died": "Workers that died.",
    "revived": "Worker threads started again.",
    "retried": "Requests given a second try after a worker was lost.",
    "replanned": "Times the policy was given other latencies.",
}
_GAUGES = {
    "queued": "Requests waiting.",
    "running": "Requests on a worker.",
    "workers": "Workers there should be.",
    "workers_up": "Workers that are up.",
    "correction": "Measured latency over the table's, typical batch.",
}
_HISTOGRAMS = {
    "latency_ms": ("latency_seconds", "From submission to answer.", 1e-3),
    "slack_ms": ("slack_seconds", "Slack of the most urgent request at each decision.", 1e-3),
    "decision_ms": ("decision_seconds", "Time a decision took.", 1e-3),
    "run_ms": ("run_seconds", "Time a batch took.", 1e-3),
    "queue_depth": ("queue_depth", "Requests waiting at each decision.", 1.0),
    "batch": ("batch_requests", "Requests in a batch.", 1.0),
}


def exposition(stats: BatcherStats, accuracy: Mapping[int, float], prefix: str = "subnetact_") -> str:
    """Return the snapshot as text.

    Args:
        stats: the snapshot.
        accuracy: of each subnet, percent.
        prefix: of every metric's name.
    """
    lines: list[str] = []

    def metric(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> None:
        lines.append(f"# HELP {prefix}{name} {text}")
        lines.append(f"# TYPE {prefix}{name} {kind}")
        lines.extend(f"{prefix}{name}{suffix} {_number(value)}" for suffix, value in samples)

    outcomes = [(f'{{outcome="{name}"}}', getattr(stats, name)) for name in OUTCOMES]
    metric("requests_total", "counter", "Accepted requests by outcome.", outcomes)
    for name, text in _COUNTERS.items():
        metric(f"{name}_total", "counter", text, [("", getattr(stats, name))])
    for name, text in _GAUGES.items():
        metric(name, "gauge", text, [("", getattr(stats, name))])
    drifted = _by_subnet(stats.drifted)
    metric("drifted", "gauge", "Measured latency over the table's, subnets beyond the threshold.", drifted)
    limits = _by_subnet(stats.batch_limits)
    metric("batch_limit", "gauge", "Largest batch of subnets that ran out of memory.", limits)
    served = _by_subnet(stats.served_by)
    metric("served_total", "counter", "Requests answered by subnet.", served)
    percents = _by_subnet(accuracy)
    metric("subnet_accuracy_percent", "gauge", "Profiled accuracy of each subnet.", percents)
    metric(
        "accuracy_percent_sum_total",
        "counter",
        "Sum of profiled accuracy over requests that met their deadline.",
        [("", stats.accuracy_sum)],
    )
    for name, (shown, text, unit) in _HISTOGRAMS.items():
        metric(shown, "histogram", text, _histogram(stats.histograms[name], unit))
    return "\n".join(lines) + "\n"


class _Exposed(Protocol):
    def prometheus(self) -> str: ...


class Collector:
    """A batcher's metrics for a registry of `prometheus_client`: `REGISTRY.register(Collector(batcher))`.

    Args:
        batcher: a `Batcher`.
    """

    def __init__(self, batcher: _Exposed) -> None:
        self._batcher = batcher

    def collect(self) -> Iterable[Any]:
        """Return the metrics as they are now.

        Raises:
            ImportError: prometheus_client is not installed.
        """
        parser: Any = import_module("prometheus_client.parser")
        return list(parser.text_string_to_metric_families(self._batcher.prometheus()))


def _by_subnet(values: Mapping[int, float]) -> list[tuple[str, float]]:
    return [(f'{{subnet="{i}"}}', value) for i, value in values.items()]


def _histogram(histogram: HistogramSnapshot, unit: float) -> list[tuple[str, float]]:
    samples: list[tuple[str, float]] = []
    seen = 0
    for edge, count in zip(histogram.edges, histogram.counts, strict=False):
        seen += count
        samples.append((f'_bucket{{le="{edge * unit:.12g}"}}', seen))
    return [
        *samples,
        ('_bucket{le="+Inf"}', histogram.count),
        ("_sum", histogram.total * unit),
        ("_count", histogram.count),
    ]


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.12g}"
