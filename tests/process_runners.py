"""Runners for worker processes: an input tells what happens to the process that runs it.

Worker processes import this module by its name.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.engine.engine import Engine
from subnetact.latency.table import LatencyTable
from subnetact.supernet.load import held_tensors

__all__ = ["TABLE", "CommandRunner", "TellingRunner", "command", "crash", "shared_memory_of"]

TABLE = LatencyTable(["a", "b"], [70.0, 80.0], [1, 2, 4], [[1.0, 1.5, 2.0], [3.0, 4.0, 6.0]])
KINDS = ("double", "crash", "hang", "raise", "memory", "exit", "pid", "unpicklable", "unprintable")

Array = npt.NDArray[np.float64]


class Unpicklable(ValueError):
    """An error that cannot be pickled, because its constructor takes two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


class Unprintable(ValueError):
    """An error whose message cannot be made."""

    def __str__(self) -> str:
        raise AttributeError("detail")

    __repr__ = __str__


def command(kind: str, value: float = 0.0) -> Array:
    """Return an input that makes `CommandRunner` do something."""
    return np.array([KINDS.index(kind), value])


def crash() -> None:
    ctypes.string_at(0)


class CommandRunner:
    """Doubles the value of every input, or does what the input says.

    Args:
        folder: what happens to a process happens once per value: a file in this folder says that it has.
    """

    keys = TABLE.subnets

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check(self, x: Any, finite: bool = False) -> None:
        """Accept everything."""

    def _first_time(self, value: float) -> bool:
        path = self.folder / str(value)
        if value < 0:  # It happens every time.
            return True
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> list[Any]:
        """Do what the inputs say, and return one output per input."""
        outputs: list[Any] = []
        for x in inputs:
            kind, value = KINDS[int(x[0])], float(x[1])
            if kind == "crash" and self._first_time(value):
                crash()
            if kind == "hang" and self._first_time(value):
                time.sleep(600)
            if kind == "exit" and self._first_time(value):
                raise SystemExit("a worker leaves")
            if kind == "raise":
                raise ValueError("poisoned")
            if kind == "unpicklable":
                raise Unpicklable("one", "two")
            if kind == "unprintable":
                raise Unprintable
            if kind == "memory" and len(inputs) > 1:
                raise MemoryError("too many")
            outputs.append(np.array([os.getpid() if kind == "pid" else 2.0 * value]))
        return outputs


class TellingRunner:
    """Runs an engine, and tells facts about it and its weights in this process.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.keys = engine.keys

    def check(self, x: Any, finite: bool = False) -> None:
        """Accept everything."""

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> list[Any]:
        """Return per input the output and four facts.

        They are how many weights and statistics rows are in shared memory and how many there are, whether the
        subnet is a fused program, and whether it is pinned.
        """
        outputs = self.engine.run(subnet, inputs, batch_size)
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in lines if "memfd:subnetact" in line]
        addresses = [tensor.data_ptr() for tensor in held_tensors(self.engine.supernet)]
        inside = sum(any(int(a, 16) <= at < int(b, 16) for a, b in spans) for at in addresses)
        state = self.engine.is_fused(subnet), subnet in self.engine.pinned
        return [(output, np.array([inside, len(addresses), *state])) for output in outputs]


def shared_memory_of(processes: Iterable[int]) -> set[Path]:
    """Return the files in `/dev/shm` that processes have mapped or open, whether they have a name still."""
    found: set[str] = set()
    for pid in processes:
        here = Path("/proc") / str(pid)
        found.update(line.split(maxsplit=5)[-1] for line in (here / "maps").read_text().splitlines())
        found.update(os.readlink(link) for link in (here / "fd").iterdir() if link.is_symlink())
    return {Path(name.removesuffix(" (deleted)")) for name in found if name.startswith("/dev/shm/")}
