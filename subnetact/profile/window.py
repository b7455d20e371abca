"""One window of a measurement: a warm-up and a few timed runs of one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from subnetact.device import synchronize

Window: TypeAlias = Mapping[str, npt.NDArray[np.float64]]
"""The times of one visit in ms, per clock: `host_ms`, on CUDA also `device_ms`; each of shape (runs,).
Beside them is `busy`, of shape (1,): the share of the window that this process waited for a CPU."""
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
    waited_s, begun = _waited_s(device), time.perf_counter()
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
    busy = (_waited_s(device) - waited_s).max() / (time.perf_counter() - begun)
    taken = {"host_ms": np.array(host), "busy": np.clip([busy], 0.0, 1.0)}
    return {**taken, "device_ms": np.array(on_device)} if cuda else taken


def _waited_s(device: torch.device) -> npt.NDArray[np.float64]:
    """Return for how long this process has waited for a CPU, s, in two ways that begin anywhere.

    A thread that runs a network on a CPU without a pause uses as much CPU time as time passes, unless other
    work, or another guest of the host, has its CPU. It waits for CUDA, and for threads of its own, without
    being disturbed; how long threads wait until they get a CPU says the kernel, where there is /proc.
    """
    own = time.perf_counter() - time.thread_time() if device.type == "cpu" else 0.0
    queued = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, IndexError):  # The thread has ended, or the kernel does not count.
            queued += int(file.read_text().split()[1])
    return np.array([own, queued / 1e9])
