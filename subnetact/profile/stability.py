"""Statistics of one cell's timing windows, and whether its median can be trusted.

A window is one visit to a cell: a warm-up and a few timed runs. The runs of one window resemble each other.
Windows lie apart in time, so the spread of their medians shows how well the median of the cell is known.
No run is discarded: on the machines that were tried, the median of all runs was more reproducible than the
median of the fastest windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCKS", "CLOCKS", "Window", "is_stable", "median_interval", "quantile_name", "statistics_of"]

Floats: TypeAlias = npt.NDArray[np.float64]
Window: TypeAlias = Mapping[str, Floats]
"""The times of one visit in ms, per clock: `host_ms`, on CUDA also `device_ms`; each of shape (runs,)."""

CONFIDENCE = 0.9
BLOCKS = 8
"""The least number of blocks into which many windows are grouped. A disturbance lasts longer than one window,
so consecutive windows are no independent samples. Blocks have at least three windows."""
CLOCKS = {"host_ms": "", "device_ms": "device_"}
"""The clocks of a window, and the prefix of their statistics."""


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that contains the median with 90 % confidence, whatever the distribution.

    Its ends are order statistics (the confidence interval of the sign test), so a minority of outliers does
    not widen it.

    Args:
        values: independent samples.

    Returns:
        The ends of the interval; with fewer than five values they are infinite.
    """
    rising, n = sorted(values), len(values)
    outside = 0.0
    for below in range(n // 2 + 1):
        outside += 2 * math.comb(n, below) / 2**n
        if outside > 1 - CONFIDENCE:
            break
    return (rising[below - 1], rising[n - below]) if below else (-math.inf, math.inf)


def is_stable(windows: Sequence[Window], tolerance: float) -> bool:
    """Return whether the median of a cell is known well enough.

    This is so if half the width of the median's 90 % confidence interval is at most `tolerance` percent of
    the median. The samples are the medians of the windows, or of blocks of windows if there are many; see
    `BLOCKS`.

    Args:
        windows: the windows of one cell, at least one, in the order they were measured in.
        tolerance: percent of the median.
    """
    medians = [float(np.median(window["host_ms"])) for window in windows]
    size = len(medians) // BLOCKS
    blocks = np.array_split(medians, len(medians) // size if size > 2 else len(medians))
    low, high = median_interval([float(np.median(block)) for block in blocks])
    return (high - low) / 2 <= tolerance / 100 * float(np.median(medians))


def statistics_of(
    windows: Sequence[Window], tolerance: float, quantiles: Sequence[float]
) -> dict[str, float]:
    """Return the statistics of a cell.

    Args:
        windows: the windows of one cell, at least one.
        tolerance: percent of the median; see `is_stable`.
        quantiles: in percent, for example 99 for p99.

    Returns:
        `mean`, `std`, `min` and the quantiles over all runs of all windows, in ms; the same with the prefix
        `device_` if the device measured times too; `stable` (1 or 0), and the counts `windows` and `runs`.
    """
    found = {"stable": float(is_stable(windows, tolerance)), "windows": float(len(windows))}
    for clock, prefix in CLOCKS.items():
        if clock not in windows[0]:
            continue
        times = np.concatenate([window[clock] for window in windows])
        values = {
            "mean": times.mean(),
            "std": times.std(),
            "min": times.min(),
            **{quantile_name(q): np.percentile(times, q) for q in quantiles},
        }
        found |= {f"{prefix}{key}": float(value) for key, value in values.items()}
        found["runs"] = float(len(times))
    return found


def quantile_name(quantile: float) -> str:
    """Return the name of a quantile: `p99` for 99, `p99.9` for 99.9.

    Args:
        quantile: in percent.
    """
    return f"p{quantile:g}"
