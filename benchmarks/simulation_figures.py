"""Figures of simulations, in the style of SuperServe (NSDI'25, Figs. 8-11)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from subnetact import LatencyTable
from subnetact.serving import SimulationResult

__all__ = ["plot_dynamics"]


def plot_dynamics(
    result: SimulationResult, arrivals_ms: npt.ArrayLike, table: LatencyTable, path: Path, title: str
) -> None:
    """Draw arrival rate, accuracy and batch size over time; the result was simulated with decisions=True."""
    bin_ms = 250.0
    arrivals = np.asarray(arrivals_ms, dtype=np.float64)
    start = float(arrivals[0])
    edges = np.arange(start, float(arrivals[-1]) + 2 * bin_ms, bin_ms)
    seconds = (edges[:-1] - start) / 1000.0
    times = np.array([decision.t_ms for decision in result.decisions or ()])
    counts = np.array([decision.k for decision in result.decisions or ()], dtype=np.float64)
    accuracy = np.array([table.accuracy[decision.subnet] for decision in result.decisions or ()])
    served = np.histogram(times, edges, weights=counts)[0]
    figure = Figure(figsize=(7.0, 6.0), layout="constrained")
    for axes, label, values in zip(
        figure.subplots(3, sharex=True),
        ("arrivals (1/s)", "accuracy (%)", "batch size"),
        (
            np.histogram(arrivals, edges)[0] * 1000.0 / bin_ms,
            _ratio(np.histogram(times, edges, weights=counts * accuracy)[0], served),
            _ratio(served, np.histogram(times, edges)[0]),
        ),
        strict=True,
    ):
        axes.plot(seconds, values, linewidth=0.9)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    figure.axes[0].set_title(title)
    figure.axes[-1].set_xlabel("time (s)")
    figure.savefig(path, dpi=130)


def _ratio(above: npt.NDArray[Any], below: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    ratio: npt.NDArray[np.float64] = np.full(len(above), np.nan)
    np.divide(above, below, out=ratio, where=below > 0)
    return ratio
