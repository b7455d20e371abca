"""One measurement: how long a call takes on a device, and on what machine it was taken."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from subnetact.errors import DeviceError

__all__ = ["find_device", "machine", "measure", "ran_out_of_memory", "synchronize"]


def find_device(device: str | torch.device) -> torch.device:
    """Return a device that exists and whose work can be waited for: a CPU or a CUDA device.

    Raises:
        DeviceError: it is another one, or torch cannot reach it here.
    """
    here = f"torch {torch.__version__} here has cpu" + (
        " and cuda" if torch.cuda.is_available() else ", and no cuda device"
    )
    try:
        found = torch.device(device)
        if found.type in ("cpu", "cuda"):
            torch.empty(0, device=found)
            return found
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().splitlines()[0]
        raise DeviceError(f"device {str(device)!r} cannot be used ({first}); {here}") from error
    raise DeviceError(f"device {str(device)!r} cannot be timed, only cpu and cuda can; {here}")


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine, the device and the versions, to stamp measurements with."""
    described: dict[str, Any] = {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cpus": len(_affinity()),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }
    if device.type == "cuda":
        described["cuda"] = torch.version.cuda
    return described


def _affinity() -> set[int]:
    import os

    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")


def ran_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error is that of a device, or a host, without the memory asked for."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def measure(
    call: Callable[[], Any],
    device: torch.device,
    warmup_ms: float = 50.0,
    min_time_ms: float = 200.0,
    min_runs: int = 10,
    before: Callable[[], Any] | None = None,
) -> dict[str, np.ndarray]:
    """Time a call again and again.

    Args:
        call: what to time, without arguments.
        device: on cuda the call is bracketed by CUDA events and the host waits for it each time.
        warmup_ms: how long to run it untimed, at least once.
        min_time_ms: how long to go on timing.
        min_runs: the fewest timed runs.
        before: what to do, untimed, before each timed run.

    Returns:
        `host_ms`, of shape (runs,): synchronised wall-clock time as a caller sees it; on cuda also
        `device_ms`, of shape (runs,): time between the events.
    """
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
    while len(host) < min_runs or (time.perf_counter() - begun) * 1e3 < min_time_ms:
        if before is not None:
            before()
            synchronize(device)
        if cuda:
            first, last = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
        start = time.perf_counter()
        if cuda:
            first.record()
        call()
        if cuda:
            last.record()
        synchronize(device)
        host.append((time.perf_counter() - start) * 1e3)
        if cuda:
            on_device.append(first.elapsed_time(last))
    taken = {"host_ms": np.array(host)}
    return {**taken, "device_ms": np.array(on_device)} if cuda else taken
