"""What a load test shows: a live line, a table at the end, and a figure."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib import import_module
from os import PathLike
from typing import Any, TextIO

import numpy as np

from subnetact.errors import MissingExtra
from subnetact.loadtest.open_loop import Sent

__all__ = ["LiveLine", "plot", "table"]

INTERVAL_S = 0.5
BINS = 60


class LiveLine:
    """One line that is written anew twice per second while the test runs; nothing if there is no terminal.

    Args:
        total: number of requests of the trace.
        slo_ms: an answer is in time if its latency is at most this, in ms.
        file: where to write. If None, standard error.
    """

    def __init__(self, total: int, slo_ms: float, file: TextIO | None = None) -> None:
        self._total = total
        self._slo_ms = slo_ms
        self._file = file or sys.stderr
        self._shown = self._file.isatty()
        self._next_s = 0.0
        self._done = self._met = 0
        self._accuracy = 0.0

    def add(self, sent: Sent) -> None:
        """Count one request and write the line if it is time.

        Args:
            sent: what became of the request.
        """
        self._done += 1
        if sent.reply is not None and sent.latency_ms <= self._slo_ms:
            self._met += 1
            self._accuracy += sent.reply.accuracy
        now = time.monotonic()
        if self._shown and now >= self._next_s:
            self._next_s = now + INTERVAL_S
            self._file.write(f"\r{self.text()}\033[K")
            self._file.flush()

    def text(self) -> str:
        """Return the line."""
        in_time = 100 * self._met / max(self._done, 1)
        accuracy = self._accuracy / max(self._met, 1)
        return (
            f"{self._done} of {self._total} done, {in_time:.2f} % in time, accuracy served {accuracy:.2f} %"
        )

    def end(self) -> None:
        """Remove the line."""
        if self._shown:
            self._file.write("\r\033[K")
            self._file.flush()


def table(report: dict[str, Any]) -> str:
    """Return the table of a report.

    Args:
        report: what `summary` returned, with the settings of the test.
    """
    latency, lag = report["latency_ms"], report["lag_ms"]

    def times(found: dict[str, float]) -> str:
        return "  ".join(f"{name} {ms:.1f}" for name, ms in found.items()) or "-"

    rows = [
        ("requests", f"{report['requests']}"),
        ("answered in time", f"{100 * report['attainment']:.2f} %"),
        ("accuracy served", f"{report['profiled_accuracy']:.2f} % by the table"),
    ]
    if "measured_accuracy" in report:
        rows += [
            ("right, of those", f"{report['measured_accuracy']:.2f} %"),
            ("right and in time", f"{report['effective_accuracy']:.2f} % of all requests"),
        ]
    rows += [
        ("latency, ms", times(latency)),
        ("sent late by, ms", times(lag)),
        ("outcomes", "  ".join(f"{name} {n}" for name, n in report["outcomes"].items())),
        ("subnets in time", "  ".join(f"{name}: {n}" for name, n in report["subnets"].items()) or "-"),
    ]
    return "\n".join(f"{name:<20}{text}" for name, text in rows)


def plot(
    arrivals_ms: Sequence[float], sent: Sequence[Sent], slo_ms: float, path: str | PathLike[str]
) -> None:
    """Draw arrivals, the accuracy of the answers in time, and missed requests over time.

    Args:
        arrivals_ms: times at which the trace demanded requests, in ms.
        sent: what became of every request.
        slo_ms: an answer is in time if its latency is at most this, in ms.
        path: file of the figure.

    Raises:
        MissingExtra: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        figure_class = import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise MissingExtra("figures need matplotlib; pip install 'subnetact[plot]'") from error
    times = np.asarray(arrivals_ms) / 1e3
    met = np.array([s.reply is not None and s.latency_ms <= slo_ms for s in sent])
    accuracy = np.array([float("nan") if s.reply is None else s.reply.accuracy for s in sent])
    edges = np.linspace(0.0, max(float(times[-1]), 1e-3), BINS + 1)
    counts, _ = np.histogram(times, edges)
    in_time, _ = np.histogram(times[met], edges)
    served, _ = np.histogram(times[met], edges, weights=accuracy[met])
    middle, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    figure: Any = figure_class(figsize=(8, 6), layout="constrained")
    top, centre, bottom = figure.subplots(3, 1, sharex=True)
    top.bar(middle, counts / width, width, color="#9aa7b4")
    top.set_ylabel("arrivals per second")
    centre.plot(middle, np.where(in_time > 0, served / np.maximum(in_time, 1), np.nan), ".-")
    centre.set_ylabel("accuracy served, %")
    bottom.bar(middle, 100 * (counts - in_time) / np.maximum(counts, 1), width, color="#c0392b")
    bottom.set_ylabel("missed, %")
    bottom.set_ylim(0, 100)
    bottom.set_xlabel("seconds")
    figure.savefig(path, dpi=120)
