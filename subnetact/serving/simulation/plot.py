"""Figures of simulations, in the style of SuperServe (NSDI'25, Figs. 8-11); they need matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import MissingExtra, TraceError
from subnetact.latency.table import LatencyTable
from subnetact.serving.simulation.result import SimulationResult

__all__ = ["plot_comparison", "plot_dynamics"]


def plot_comparison(
    results: Mapping[str, SimulationResult],
    path: str | os.PathLike[str],
    title: str = "",
    bound: float | None = None,
) -> None:
    """Draw SLO attainment against mean serving accuracy, one point per policy.

    Args:
        results: results by the name of the policy.
        path: the file of the figure.
        title: title of the figure.
        bound: an upper bound on effective accuracy, percent, drawn as a line. If None, no line is drawn.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figure, axes = _figure(1)
    for at, (name, result) in enumerate(results.items()):
        if result.met:
            axes.scatter(result.mean_accuracy, result.attainment, marker="o" if at % 2 else "D", label=name)
    if bound is not None:
        axes.axvline(bound, color="0.6", linestyle=":", label="fluid bound (effective accuracy)")
    axes.set(xlabel="mean serving accuracy (%)", ylabel="SLO attainment", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", loc="best")
    _save(figure, path)


def plot_dynamics(
    result: SimulationResult | Mapping[str, SimulationResult],
    arrivals_ms: npt.ArrayLike,
    table: LatencyTable,
    path: str | os.PathLike[str],
    title: str = "",
    bin_ms: float = 250.0,
) -> None:
    """Draw arrival rate, accuracy and batch size over time.

    Args:
        result: the result of a simulation or of a live run, with `decisions`; or several results by name.
        arrivals_ms: the arrivals that the results share, ms, shape (n,).
        table: the latency table.
        path: the file of the figure.
        title: title of the figure.
        bin_ms: width of the bins over which values are averaged, ms.

    Raises:
        TraceError: a result holds no decisions.
        MissingExtra: matplotlib is not installed.
    """
    results = {"": result} if isinstance(result, SimulationResult) else result
    arrivals = np.asarray(arrivals_ms, dtype=np.float64)
    start = float(arrivals[0])
    edges = np.arange(start, float(arrivals[-1]) + 2 * bin_ms, bin_ms)
    seconds = (edges[:-1] - start) / 1000.0
    figure, axes = _figure(3)
    axes[0].plot(seconds, np.histogram(arrivals, edges)[0] * 1000.0 / bin_ms, linewidth=0.9, color="0.4")
    for name, one in results.items():
        if not one.decisions:
            raise TraceError("result: it holds no decisions; simulate with decisions=True")
        times = np.array([decision.t_ms for decision in one.decisions])
        counts = np.array([decision.k for decision in one.decisions], dtype=np.float64)
        accuracy = np.array([table.accuracy[decision.subnet] for decision in one.decisions])
        served = np.histogram(times, edges, weights=counts)[0]
        mean_accuracy = _ratio(np.histogram(times, edges, weights=counts * accuracy)[0], served)
        axes[1].plot(seconds, mean_accuracy, linewidth=0.9, label=name)
        axes[2].plot(seconds, _ratio(served, np.histogram(times, edges)[0]), linewidth=0.9, label=name)
    for axis, label in zip(axes, ("arrivals (1/s)", "accuracy (%)", "batch size"), strict=True):
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    if len(results) > 1:
        axes[1].legend(fontsize="x-small", loc="best")
    axes[0].set_title(title)
    axes[-1].set_xlabel("time (s)")
    _save(figure, path)


def _ratio(above: npt.NDArray[Any], below: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    ratio: npt.NDArray[np.float64] = np.full(len(above), np.nan)
    np.divide(above, below, out=ratio, where=below > 0)
    return ratio


def _figure(rows: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("figures need matplotlib; pip install 'subnetact[plot]'") from error
    figure = Figure(figsize=(7.0, 4.5 if rows == 1 else 2.0 * rows), layout="constrained")
    return figure, figure.subplots(rows, sharex=True)


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    figure.savefig(path, dpi=130)
