"""What a cell's timing windows say: its statistics, and whether they can be trusted.

A window is one visit to a cell: a warm-up and a few timed runs. Visits are apart in time, so whatever else
the machine does disturbs some windows and not others, and can only make them slower. The windows that agree
with one another at the fastest speed are called calm: what they say can be measured again. What all windows
say, disturbed ones too, is what a server sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["CALM", "CLOCKS", "NEEDED", "Window", "agreeing", "statistics_of", "summaries"]

Floats: TypeAlias = npt.NDArray[np.float64]
Window: TypeAlias = Mapping[str, Floats]
"""Times of one visit by clock: `host_ms`, on cuda also `device_ms`; each of shape (runs,)."""

NEEDED = 3
"""Windows that must agree before a cell is stable, as of NVIDIA's perf_analyzer."""

CALM = "calm_"
CLOCKS = {"host_ms": "", "device_ms": "device_"}


def agreeing(windows: Sequence[Window], tolerance: float) -> tuple[list[int], bool]:
    """Return the windows whose medians agree, and whether that makes the cell stable.

    Sorted by their medians, the first three within the tolerance of one another count, and with them every
    other one within the tolerance of the first of the three. Where no three agree, the three closest count,
    and the cell is not stable.

    Args:
        windows: at least one.
        tolerance: relative, 0.05 for 5 %.
    """
    medians = np.array([np.median(window["host_ms"]) for window in windows])
    order = np.argsort(medians, kind="stable")
    rising = medians[order]
    needed = min(NEEDED, len(order))
    spans = [rising[i + needed - 1] / rising[i] for i in range(len(order) - needed + 1)]
    first = next((i for i, span in enumerate(spans) if span <= 1.0 + tolerance), None)
    if first is None:
        first = int(np.argmin(spans))
        return [int(i) for i in order[first : first + needed]], False
    kept = order[first:][rising[first:] <= rising[first] * (1.0 + tolerance)]
    return [int(i) for i in kept], len(order) >= NEEDED


def statistics_of(
    windows: Sequence[Window], tolerance: float, quantiles: Sequence[float]
) -> dict[str, float]:
    """Return a cell's statistics, ms; `device_` in front where the device kept the time.

    `mean`, `std`, `min` and the quantiles are over all runs of all windows; with `calm_` in front, over
    those of the windows that agree. `stable` is 1 or 0; `windows` and `runs` are counts.

    Args:
        windows: of one cell, at least one.
        tolerance: between the medians of windows that agree, relative.
        quantiles: percent, 99 for p99.
    """
    kept, stable = agreeing(windows, tolerance)
    found = {
        "stable": float(stable),
        "windows": float(len(windows)),
        "runs": float(sum(len(window["host_ms"]) for window in windows)),
    }
    for clock, prefix in CLOCKS.items():
        if clock not in windows[0]:
            continue
        for name, chosen in (("", range(len(windows))), (CALM, kept)):
            times = np.concatenate([windows[i][clock] for i in chosen])
            values = {
                "mean": times.mean(),
                "std": times.std(),
                "min": times.min(),
                **{quantile_name(q): np.percentile(times, q) for q in quantiles},
            }
            found |= {f"{prefix}{name}{key}": float(value) for key, value in values.items()}
    return found


def summaries(quantiles: Sequence[float]) -> list[str]:
    """The statistics that may stand for a cell: the mean and the quantiles, of all windows or calm ones."""
    names = ["mean", *map(quantile_name, quantiles)]
    return [*names, *(CALM + name for name in names)]


def quantile_name(quantile: float) -> str:
    """`p99` for 99, `p99.9` for 99.9."""
    return f"p{quantile:g}"
