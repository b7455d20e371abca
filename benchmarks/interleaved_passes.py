"""Times of contenders that run in turn, in a random order: the machine is equally fast for all of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

__all__ = ["interleaved_ms", "ratios"]


def interleaved_ms(
    runs: Mapping[str, Callable[[], Any]],
    seconds: float,
    passes: int = 7,
    wait: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Run all contenders, pass by pass.

    Args:
        runs: name of a contender -> what is timed.
        seconds: time in s after which no further pass begins.
        passes: the least number of passes.
        wait: returns as soon as the device has done what a run has asked of it.

    Returns:
        Name of a contender -> the time of each of its runs, in ms.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, end, rng, done = list(runs), time.perf_counter() + seconds, random.Random(0), 0
    while done < passes or time.perf_counter() < end:
        rng.shuffle(order)
        for name in order:
            start = time.perf_counter()
            runs[name]()
            wait()
            times[name].append((time.perf_counter() - start) * 1e3)
        done += 1
    return times


def ratios(times: Mapping[str, list[float]], base: str) -> dict[str, float]:
    """Return the median, over the passes, of the time of every contender divided by that of the base."""
    return {
        name: median(a / b for a, b in zip(taken, times[base], strict=True)) for name, taken in times.items()
    }
