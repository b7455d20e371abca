"""The program of a worker process: it does what its parent asks for, and ends with its parent.

Functions import torch and the package, because the process must be protected from signals before that.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from multiprocessing.reduction import recv_handle
from multiprocessing.spawn import prepare
from typing import TYPE_CHECKING, Any

from subnetact.errors import failure_text

if TYPE_CHECKING:
    from subnetact.workers.engine_snapshot import Parts

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
in_worker = False  # whether this process is a worker process


def main(channel: int) -> None:
    """Serve the parent, which has the other end of the pipe `channel`; this does not return."""
    global in_worker
    in_worker = True
    gc.disable()  # Collections are a sixth of a start.
    for ignored in (signal.SIGINT, signal.SIGTERM):  # The parent decides when its processes end.
        signal.signal(ignored, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    with suppress(EOFError, OSError):  # The parent has closed the pipe.
        _serve(Connection(channel))
    os._exit(0)


def _serve(pipe: Connection) -> None:
    from subnetact.workers.memory import SharedMemory

    worker = Worker()
    while True:
        method, arguments, sizes = pipe.recv()
        try:
            memories = [SharedMemory(size, recv_handle(pipe)) for size in sizes]
            pipe.send((getattr(worker, method)(*arguments, *memories), None))
        except Exception as error:
            pipe.send((None, (_pickled(error), failure_text(error))))
            if method != "run":  # It may be half done.
                os._exit(1)


class Worker:
    """Does what `WorkerProcess` asks for; the memory that comes along is last among the arguments."""

    def start(self, main_program: dict[str, Any], batch_sizes: Sequence[int], *sent: Any) -> None:
        """Unpack the runner, and warm up."""
        from subnetact.workers.engine_snapshot import Package, unpack
        from subnetact.workers.memory import BatchMemory

        prepare(main_program)  # It runs under another name, for the classes and functions that it defines.
        data, places, requests, answers, *segments = sent
        self._requests, self._answers = BatchMemory(requests), BatchMemory(answers)
        self._parts: Parts = unpack(Package(data, places, segments))
        for engine in self._parts.engines:
            engine.warm_up(batch_sizes)
        gc.collect()
        gc.freeze()
        gc.enable()

    def follow(self, data: bytes, places: Any, *segments: Any) -> None:
        """Apply changes of the parent's runner."""
        from subnetact.workers.engine_snapshot import Package, apply

        apply(Package(data, places, segments), self._parts)

    def run(self, subnet: int, batch_size: int, layout: Any) -> Any:
        """Run one batch, and return the layout of its outputs."""
        outputs = self._parts.runner.run(subnet, self._requests.read(layout, copy=False), batch_size)
        return self._answers.write(outputs if isinstance(outputs, Mapping) else list(outputs))


def _pickled(error: Exception) -> bytes:
    """Pickle an error whose cause tells its traceback; nothing is left of one that cannot be pickled."""
    try:
        return pickle.dumps(ExceptionWithTraceback(error, error.__traceback__))
    except BaseException:  # The error's own methods run here, and may do anything.
        return b""
