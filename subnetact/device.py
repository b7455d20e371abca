"""The device in use: finding it, describing its machine, and timing a call on it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from subnetact.errors import DeviceError

__all__ = ["find_device", "machine", "measure", "raise_if_out_of_memory", "ran_out_of_memory", "synchronize"]


def find_device(device: str | torch.device) -> torch.device:
    """Return a CPU or CUDA device, after checking that torch can use it.

    Args:
        device: for example `"cpu"`, `"cuda"` or `"cuda:1"`.

    Raises:
        DeviceError: the device is of another type, or torch cannot use it on this machine.
    """
    here = f"torch {torch.__version__} here has cpu" + (
        " and cuda" if torch.cuda.is_available() else ", and no cuda device"
    )
    try:
        found = torch.device(device)
        if found.type in ("cpu", "cuda"):
            torch.empty(0, device=found)
            return found
    except (RuntimeError, AssertionError, TypeError) as error:
        first = str(error).strip().splitlines()[0]
        raise DeviceError(f"device {str(device)!r} cannot be used ({first}); {here}") from error
    raise DeviceError(f"device {str(device)!r} cannot be timed, only cpu and cuda can; {here}")


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine, the device and the versions, for the stamp of a measurement.

    Args:
        device: the device that the measurement used.

    Returns:
        `device` (its type), `device_name`, `cpus` (the number this process may use), `threads` (of torch),
        `torch`, `python`, `system` and, on CUDA devices, `cuda`.
    """
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
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all work that was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")


def ran_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that the device or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def raise_if_out_of_memory(error: BaseException) -> None:
    """Raise an error again that says nothing about what was tried, only that memory was short."""
    if ran_out_of_memory(error):
        raise error


def measure(
    call: Callable[[], Any],
    device: torch.device,
    warmup_ms: float = 50.0,
    min_time_ms: float = 200.0,
    min_runs: int = 10,
    before: Callable[[], Any] | None = None,
) -> dict[str, np.ndarray]:
    """Time a call repeatedly.

    Args:
        call: the function to time; it takes no arguments.
        device: the device that the call uses. The host waits for the device after every run.
        warmup_ms: the call runs untimed for at least this many milliseconds, and at least once.
        min_time_ms: the shortest time, in ms, that the timed runs take together.
        min_runs: the smallest number of timed runs.
        before: a function to call, untimed, before each timed run.

    Returns:
        `host_ms`, of shape (runs,): wall-clock time in ms until the device has finished. On CUDA devices also
        `device_ms`, of shape (runs,): time in ms between CUDA events before and after the call.
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
