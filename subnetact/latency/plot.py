"""Figures of a latency table. They need matplotlib, the extra `plot`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from subnetact.errors import extra_needed
from subnetact.latency.table import LatencyTable

LABELLED = 16
"""A heat map of at most this many subnets shows the latency of every cell as a number."""


def plot_heat_map(table: LatencyTable, path: str | os.PathLike[str]) -> None:
    """Draw latency over batch size and subnet.

    Subnets ascend in accuracy, or in latency if an accuracy is not known. Cells that cannot run stay white.

    Args:
        table: the latencies.
        path: the image file; its ending selects the format.

    Raises:
        MissingExtra: matplotlib is not installed.

    Source:
        SuperServe, NSDI'25, Fig. 6.
    """
    known = not np.isnan(table.accuracy).any()
    by = np.asarray(table.accuracy) if known else np.nan_to_num(table.latency_ms[:, 0], nan=np.inf)
    order = np.argsort(by, kind="stable")
    cells = table.latency_ms[order]
    count = len(order)
    figure, axes = _figure(5.5, 2.0 + min(7.0, 0.35 * count))
    from matplotlib.colors import LogNorm

    drawn = axes.imshow(cells, aspect="auto", origin="lower", cmap="viridis", norm=LogNorm())
    bar = figure.colorbar(drawn, label="latency (ms)", format="{x:g}")
    bar.ax.yaxis.set_minor_formatter("{x:g}")
    axes.set_xticks(range(len(table.batch_sizes)), labels=list(map(str, table.batch_sizes)))
    shown = range(0, count, max(1, count // LABELLED))
    labels = [f"{table.accuracy[order[i]]:.2f}" if known else str(order[i]) for i in shown]
    axes.set_yticks(list(shown), labels=labels)
    axes.set(
        xlabel="batch size",
        ylabel="accuracy (%)" if known else "subnet (accuracy not known), by latency",
        title=f"{count} subnets",
    )
    figure.suptitle(table.conditions, fontsize="small", wrap=True)
    if count <= LABELLED:
        middle = np.sqrt(np.nanmin(cells) * np.nanmax(cells))
        for i, j in np.argwhere(~np.isnan(cells)):
            colour = "white" if cells[i, j] < middle else "black"
            axes.text(j, i, f"{cells[i, j]:.3g}", ha="center", va="center", fontsize=7, color=colour)
    figure.savefig(path, dpi=130)


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
    figure, axes = _figure(6.5, 4.5)
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


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure = need_matplotlib()(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()
