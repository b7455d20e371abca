"""Statistics of one cell's windows, and whether its median can be trusted.

A median that is well known may still be wrong: beside other work, all windows are slow alike. So a cell is
not stable either if this process waited for a CPU for longer than the tolerance, in half of its windows.

The runs of one window resemble each other. Windows lie apart in time, so the spread of their medians shows
how well the median of the cell is known. No run is discarded: on the machines that were tried, the median of
all runs was more reproducible than the median of the fastest windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from subnetact.profile.window import CLOCKS, Window

CONFIDENCE = 0.9
BLOCKS = 8
"""The least number of blocks into which many windows are grouped. A disturbance lasts longer than one window,
so consecutive windows are no independent samples. Blocks have at least three windows."""


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that has the median with 90 % confidence (sign test); infinite below five values."""
    rising, n = sorted(values), len(values)  # Order statistics: a minority of outliers widens nothing.
    outside = 0.0
    for below in range(n // 2 + 1):
        outside += 2 * math.comb(n, below) / 2**n
        if outside > 1 - CONFIDENCE:
            break
    return (rising[below - 1], rising[n - below]) if below else (-math.inf, math.inf)


def is_stable(windows: Sequence[Window], tolerance: float) -> bool:
    """Tell whether half the width of the median's interval is at most `tolerance` percent of the median.

    Windows in which this process waited for a CPU for longer than that, by their median, tell nothing.
    """
    if busy_share(windows) > tolerance / 100:
        return False
    medians = [float(np.median(window["host_ms"])) for window in windows]
    size = len(medians) // BLOCKS
    blocks = np.array_split(medians, len(medians) // size if size > 2 else len(medians))
    low, high = median_interval([float(np.median(block)) for block in blocks])
    return (high - low) / 2 <= tolerance / 100 * float(np.median(medians))


def busy_share(windows: Sequence[Window]) -> float:
    """Return the median share of the windows for which this process waited for a CPU; NaN if none says."""
    shares = [float(window["busy"][0]) for window in windows if "busy" in window]
    return float(np.median(shares)) if shares else math.nan


def statistics_of(windows: list[Window], tolerance: float, quantiles: Sequence[float]) -> dict[str, float]:
    """Return statistics over all runs of all windows in ms, and `stable`, `busy`, `windows` and `runs`."""
    found = {"stable": float(is_stable(windows, tolerance)), "windows": float(len(windows))}
    if (busy := busy_share(windows)) == busy:
        found["busy"] = busy
    for clock, prefix in CLOCKS.items():
        if clock not in windows[0]:
            continue
        times = np.concatenate([window[clock] for window in windows])
        values = {"mean": times.mean(), "std": times.std(), "min": times.min()}
        values |= {quantile_name(q): np.percentile(times, q) for q in quantiles}
        found |= {f"{prefix}{key}": float(value) for key, value in values.items()}
        found["runs"] = float(len(times))
    return found


def quantile_name(quantile: float) -> str:
    """Return the name of a quantile in percent: `p99` for 99, `p99.9` for 99.9."""
    return f"p{quantile:g}"
