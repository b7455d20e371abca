"""The device in use: finding it, describing its machine, and waiting for it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from subnetact.errors import DeviceError, first_line

_LIBRARIES = ("numpy", "scipy", "torchvision", "timm")
"""Libraries whose versions a stamp has where they are installed."""
_UNITS = frozenset(("vnni", "bf16", "amx"))
_SHORT: frozenset[str] = frozenset(("vnni", "bf16"))
_LIMITS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE"), frozenset()),
    "AVX512_CORE_VNNI": frozenset(("vnni",)),
    **dict.fromkeys(("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512", "AVX10_2_512"), _SHORT),
}
"""What oneDNN uses below a limit of the environment. It takes no notice of a limit that it does not know."""


@dataclass(frozen=True)
class MachineFacts:
    """What torch and oneDNN use of a machine: its device, processor and instructions."""

    device: str = "cpu"
    architecture: str = "x86_64"
    aten: str = "AVX512"  # the instructions of torch's own loops
    onednn: bool = True
    limit: str = ""  # ONEDNN_MAX_CPU_ISA
    units: frozenset[str] = frozenset()  # of `_UNITS`
    cuda: tuple[int, int] = (0, 0)  # compute capability
    reference: bool = False  # products in float64, exact on every machine: for tests

    def uses(self, unit: str) -> bool:
        """Tell whether the processor has `vnni`, `bf16` or `amx`, and no limit keeps oneDNN from it."""
        allowed = _LIMITS.get(self.limit.upper(), _UNITS)
        return self.onednn and self.aten.startswith("AVX512") and unit in self.units & allowed

    def __str__(self) -> str:
        if self.device == "cuda":
            return f"CUDA device of compute capability {self.cuda[0]}.{self.cuda[1]}"
        if self.device != "cpu":
            return f"device of type {self.device}"
        used = ", ".join(unit for unit in sorted(_UNITS) if self.uses(unit))
        limit = f", ONEDNN_MAX_CPU_ISA={self.limit}" if self.limit else ""
        return f"{self.architecture} CPU, {self.aten}, {used or 'no vnni, bf16 or amx'}{limit}"


def find_device(device: str | torch.device) -> torch.device:
    """Return a CPU or CUDA device; DeviceError if torch cannot use it on this machine."""
    here = f"torch {torch.__version__} here has cpu" + (
        " and cuda" if torch.cuda.is_available() else ", and no cuda device"
    )
    try:
        found = torch.device(device)
        if found.type in ("cpu", "cuda"):
            torch.empty(0, device=found)
            return found
    except (RuntimeError, AssertionError, TypeError) as error:
        raise DeviceError(f"device {str(device)!r} cannot be used ({first_line(error)}); {here}") from error
    raise DeviceError(f"device {str(device)!r} cannot be timed, only cpu and cuda can; {here}")


@cache
def machine_facts(device: str) -> MachineFacts:
    """Return what torch and oneDNN use of this machine with a type of device; it is read once."""
    has = {
        "vnni": getattr(torch.cpu, "_is_vnni_supported", bool)(),
        "bf16": getattr(torch.cpu, "_is_avx512_bf16_supported", bool)(),
        "amx": getattr(torch.cpu, "_is_amx_tile_supported", bool)(),
    }
    return MachineFacts(
        device,
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", ""),
        frozenset(unit for unit, there in has.items() if there),
        torch.cuda.get_device_capability() if device == "cuda" else (0, 0),
    )


def moment() -> dict[str, Any]:
    """Describe what may differ between two measurements that count as the same: build, clock and load."""
    average = [round(number, 2) for number in os.getloadavg()] if hasattr(os, "getloadavg") else []
    return {
        "commit": _commit(Path(__file__).parents[1]),
        "versions": {name: one.version for name in _LIBRARIES for one in distributions(name=name)},
        "clock_mhz": float(_processor().get("cpu MHz", 0)),
        "load_average": average,
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine, the device and the versions, for the stamp of a measurement."""
    facts, names = _processor(), ("cpu family", "model", "stepping")  # "AMD EPYC" is of all generations.
    described: dict[str, Any] = {
        "device": device.type,
        "device_name": facts.get("model name") or platform.processor(),
        "processor": " ".join(f"{name} {facts[name]}" for name in names if name in facts),
        "instructions": str(machine_facts(device.type)),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }
    if device.type == "cuda":
        described |= {"device_name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return described


def _commit(folder: Path) -> str:
    """Return the commit of a checkout, or else that from which pip installed this package; "" if neither."""
    git = folder / ".git"
    try:
        place = folder / git.read_text().split()[1] if git.is_file() else git  # A file is that of a worktree.
        return (place / "logs" / "HEAD").read_text().splitlines()[-1].split()[1]
    except (OSError, IndexError):
        texts = [one.read_text("direct_url.json") for one in distributions(name="subnetact")]
        sources = [json.loads(text).get("vcs_info", {}) for text in texts if text]
        return next((source["commit_id"] for source in sources if source), "")


def _processor() -> dict[str, str]:
    """Return the facts of the first processor, as /proc/cpuinfo names them: "cpu MHz"; none without it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines)}


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


def raise_if_explained(error: BaseException, *kinds: type[BaseException]) -> None:
    """Raise an error again that needs no further words: it is of these kinds, or memory was short."""
    if isinstance(error, kinds) or ran_out_of_memory(error):
        raise error


@contextmanager
def tolerated() -> Iterator[None]:
    """Leave what fails, unless memory was short; whoever tried it goes on behind this context without it."""
    try:
        yield
    except Exception as error:
        raise_if_explained(error)
