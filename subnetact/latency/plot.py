"""The figure of a latency table, which needs matplotlib, the extra `plot`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from subnetact.errors import extra_needed
from subnetact.latency.table import LatencyTable


def plot_front(table: LatencyTable, path: str | os.PathLike[str]) -> None:
    """Draw accuracy over latency, with one Pareto front per batch size; dominated subnets are single points.

    Args:
        table: the latencies; every accuracy must be known.
        path: the image file; its ending selects the format.

    Raises:
        MissingExtra: matplotlib is not installed.
        TableError: an accuracy is not known, or the table mixes modes, as `LatencyTable.front` says.
    """
    accuracy = np.array(table.known_accuracy())
    figure = need_matplotlib()(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for j, size in enumerate(table.batch_sizes):
        ms, front = table.latency_ms[:, j], table.front(size)
        if not front:
            continue
        (line,) = axes.plot(ms[front], accuracy[front], marker="o", markersize=3, label=f"batch {size}")
        axes.scatter(ms, accuracy, s=6, color=line.get_color(), alpha=0.4)
    axes.set(xlabel="latency (ms)", ylabel="accuracy (%)", xscale="log")
    axes.set_title(table.conditions, fontsize="small", wrap=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)


def need_matplotlib() -> Any:
    """Return matplotlib's class `Figure`, or raise MissingExtra."""
    with extra_needed("figures need matplotlib; pip install 'subnetact[plot]'"):
        from matplotlib.figure import Figure
    return Figure
