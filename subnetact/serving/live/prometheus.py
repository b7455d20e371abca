"""The counters of batchers as metrics of `prometheus_client`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from itertools import accumulate
from typing import Any, Protocol

from subnetact import __version__
from subnetact.errors import extra_needed
from subnetact.serving.live.histograms import Histogram
from subnetact.serving.live.stats import HISTOGRAMS, OUTCOMES, BatcherStats

Metric = tuple[str, str, str, Sequence[str], list[Any]]
"""Kind, name, text and labels of a metric, and its samples: values of labels, and numbers."""


class HasStats(Protocol):
    """What has the metrics of a batcher."""

    @property
    def accuracy(self) -> Mapping[int, float]:
        """Percent per subnet id."""

    def stats(self) -> BatcherStats:
        """Return the counters."""


class Collector:
    """Offers the metrics of batchers to a registry: `REGISTRY.register(Collector(batcher))`.

    Args:
        batchers: a `Batcher`, or several by name; those that are added to the mapping later count, too.
        prefix: first part of the name of every metric.
        label: the label that tells several batchers apart; its values are their names.

    Raises:
        MissingExtra: prometheus_client is not installed.

    Example:
        >>> REGISTRY.register(Collector({"digits": digits, "faces": faces}))
    """

    def __init__(
        self,
        batchers: HasStats | Mapping[str, HasStats],
        prefix: str = "subnetact_",
        label: str = "model",
    ) -> None:
        with extra_needed("metrics need prometheus_client; pip install 'subnetact[serve]'"):
            self._text_of: Any = import_module("prometheus_client").generate_latest
        self._prefix, self._labels = prefix, [label] if isinstance(batchers, Mapping) else []
        self._batchers = batchers if isinstance(batchers, Mapping) else {"": batchers}

    def text(self) -> str:
        """Return the current metrics in Prometheus' text format, version 0.0.4."""
        return str(self._text_of(self).decode())

    def collect(self) -> Iterable[Any]:
        """Yield the current metrics as families of `prometheus_client`; a registry calls this method."""
        batchers = dict(self._batchers)
        names = [[name][: len(self._labels)] for name in batchers]
        for metrics in zip(*(metrics_of(one, one.stats()) for one in batchers.values()), strict=True):
            kind, metric, text, labels, _ = metrics[0]
            samples = [
                ([*name, *values], *numbers)
                for name, (*_, rows) in zip(names, metrics, strict=True)
                for values, *numbers in rows
            ]
            yield family_of(kind, self._prefix + metric, text, [*self._labels, *labels], samples)


def family_of(kind: str, name: str, text: str, labels: Sequence[str], samples: Iterable[Any]) -> Any:
    """Return a metric as a family of `prometheus_client`; its samples are values of labels, and numbers."""
    core = import_module("prometheus_client.core")
    family = getattr(core, f"{kind}MetricFamily")(name, text, labels=labels)
    for values, *numbers in samples:
        family.add_metric([str(value) for value in values], *numbers)
    return family


def stat_metrics(stats: Any) -> Iterator[Metric]:
    """Yield the metrics that the fields of a class of `stat` fields are."""
    for one in fields(stats):
        kind, text, metric = (one.metadata[key] for key in ("kind", "text", "metric"))
        value = getattr(stats, one.name)
        if isinstance(value, Mapping) and kind:
            yield kind, metric, text, ["subnet"], [((key,), number) for key, number in value.items()]
        elif kind:
            yield kind, one.name, text, (), [((), value)]


def metrics_of(batcher: Any, stats: BatcherStats) -> Iterator[Metric]:
    """Yield the metrics of a batcher."""
    yield from stat_metrics(stats)
    outcomes = [((name,), getattr(stats, name)) for name in OUTCOMES]
    yield "Counter", "requests", "accepted requests by outcome.", ["outcome"], outcomes
    text = "profiled accuracy, 0 to 1, of the subnets that met requests."
    yield "Summary", "accuracy_ratio", text, (), [((), stats.met, stats.accuracy_sum / 100.0)]
    ratios = [((key,), percent / 100.0) for key, percent in batcher.accuracy.items()]
    yield "Gauge", "subnet_accuracy_ratio", "profiled accuracy per subnet id, 0 to 1.", ["subnet"], ratios
    keys = [(pair, 1) for pair in enumerate(getattr(batcher, "subnets", ()))]
    yield "Gauge", "subnet_info", "the specification of every subnet id.", ["subnet", "name"], keys
    facts = [(__version__, getattr(batcher, "fingerprint", ""))]
    text = "the version of subnetact, and the fingerprint of the supernet if it is known."
    yield "Gauge", "info", text, ["version", "fingerprint"], [(pair, 1) for pair in facts]
    for name, (_, shown, text) in HISTOGRAMS.items():
        unit = 1e-3 if name.endswith("_ms") else 1.0
        yield "Histogram", shown, text, (), [((), *buckets(stats.histograms[name], unit))]


def buckets(histogram: Histogram, unit: float) -> tuple[list[tuple[str, int]], float]:
    """Return the buckets and the sum of a histogram as `prometheus_client` takes them, in another unit."""
    edges = [*(f"{edge * unit:.12g}" for edge in histogram.edges), "+Inf"]
    return list(zip(edges, accumulate(histogram.counts), strict=True)), histogram.total * unit
