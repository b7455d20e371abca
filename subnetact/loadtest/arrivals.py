"""Arrival times of a load test: synthetic, recorded, or from a file."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from subnetact.serving import bursty, load_trace, poisson, time_varying
from subnetact.serving.simulation.traces import from_timestamps

__all__ = ["trace"]


def trace(name: str, rate: float, seconds: float, cv2: float = 4.0, seed: int = 0) -> npt.NDArray[np.float64]:
    """Return the arrival times of a trace, in ms, ascending.

    `name` is `poisson`; `bursty`, half of whose rate is steady and the other half has gaps of `cv2`;
    `time_varying`, whose rate rises from half to one and a half times the mean; a recorded trace (`maf`,
    `azure_llm`, `servegen`); or the path of a file of time stamps, `.npy` or text. The mean `rate` is per
    second, and what comes after `seconds` is cut.
    """
    if name == "poisson":
        return poisson(rate, seconds, seed)
    if name == "bursty":
        return bursty(rate / 2, rate / 2, cv2, seconds, seed)
    if name == "time_varying":
        return time_varying(rate / 2, 1.5 * rate, 2 * rate / seconds, cv2, seconds / 4, seconds / 4, seed)
    arrivals = from_timestamps(load_trace(name, seed=seed), mean_qps=rate)
    return arrivals[arrivals < seconds * 1e3]
