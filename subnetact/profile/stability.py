"""What a cell's timing windows say: its statistics, and whether they can be trusted.

A window is one visit to a cell: a warm-up and a few timed runs. Runs within a window are alike; windows are
apart in time, so how much their medians differ tells how well the cell's median is known. Nothing is thrown
away: on the machines tried, the median of all runs was reproduced better than that of the fastest windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCKS", "CLOCKS", "Window", "median_interval", "quantile_name", "stable", "statistics_of"]

Floats: TypeAlias = npt.NDArray[np.float64]
Window: TypeAlias = Mapping[str, Floats]
"""Times of one visit by clock: `host_ms`, on cuda also `device_ms`; each of shape (runs,)."""

CONFIDENCE = 0.9
BLOCKS = 8
"""How many blocks of at least three windows many are put together to, at least: what slows a machine down
lasts for more than a window, so windows that follow each other are no independent samples."""
CLOCKS = {"host_ms": "", "device_ms": "device_"}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that holds the median with 90 % confidence, whatever the distribution.

    It runs between order statistics (the sign test's interval), so a minority of outliers does not widen it.
    Fewer than five values say nothing: the interval is infinite.
    """
    rising, n = sorted(values), len(values)
    outside = 0.0
    for below in range(n // 2 + 1):
        outside += 2 * math.comb(n, below) / 2**n
        if outside > 1 - CONFIDENCE:
            break
    return (rising[below - 1], rising[n - below]) if below else (-math.inf, math.inf)


def stable(windows: Sequence[Window], stability: float) -> bool:
    """Tell whether the median of a cell is known: half its interval's width is at most `stability` of it.

    The interval is of the medians of windows, or of blocks of them where there are many; see `BLOCKS`.

    Args:
        windows: of one cell, at least one, in the order they were measured in.
        stability: relative to the median; 0.05 for 5 %.
    """
    medians = [float(np.median(window["host_ms"])) for window in windows]
    size = len(medians) // BLOCKS
    blocks = np.array_split(medians, len(medians) // size if size > 2 else len(medians))
    low, high = median_interval([float(np.median(block)) for block in blocks])
    return (high - low) / 2 <= stability * float(np.median(medians))


def statistics_of(
    windows: Sequence[Window], stability: float, quantiles: Sequence[float]
) -> dict[str, float]:
    """Return a cell's statistics, ms; `device_` in front where the device kept the time.

    `mean`, `std`, `min` and the quantiles are over all runs of all windows. `stable` is 1 or 0; `windows` and
    `runs` are counts.

    Args:
        windows: of one cell, at least one.
        stability: see `stable`.
        quantiles: percent, 99 for p99.
    """
    found = {"stable": float(stable(windows, stability)), "windows": float(len(windows))}
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
    """`p99` for 99, `p99.9` for 99.9."""
    return f"p{quantile:g}"
