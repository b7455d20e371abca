"""One window of a measurement: a warm-up and a few timed runs of one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from subnetact.device import synchronize

Window: TypeAlias = Mapping[str, npt.NDArray[np.float64]]
"""The times of one visit in ms, per clock: `host_ms`, on CUDA also `device_ms`; each of shape (runs,)."""
CLOCKS = {"host_ms": "", "device_ms": "device_"}
"""The clocks of a window, and the prefix of their statistics."""
FEWEST_RUNS = 3
"""The least number of timed runs of a window, however long one of them takes."""


def measure(call: Callable[[], Any], device: torch.device, warmup_ms: float, min_time_ms: float) -> Window:
    """Time a call for `min_time_ms` after an untimed `warmup_ms`; the host waits after every run."""
    cuda = device.type == "cuda"
    start = time.perf_counter()
    call()
    synchronize(device)
    while (time.perf_counter() - start) * 1e3 < warmup_ms:
        call()
        synchronize(device)
    host: list[float] = []
    on_device: list[float] = []
    begun = time.perf_counter()
    while len(host) < FEWEST_RUNS or (time.perf_counter() - begun) * 1e3 < min_time_ms:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []  # type: ignore[no-untyped-call]
        start = time.perf_counter()
        if cuda:
            events[0].record()
        call()
        if cuda:
            events[1].record()
        synchronize(device)
        host.append((time.perf_counter() - start) * 1e3)
        if cuda:
            on_device.append(events[0].elapsed_time(events[1]))
    taken = {"host_ms": np.array(host)}
    return {**taken, "device_ms": np.array(on_device)} if cuda else taken
