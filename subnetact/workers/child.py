"""The program of a worker process: it gets a runner, runs batches, and ends with its parent.

Functions import torch and the package, because the process must be protected from signals before that.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from multiprocessing.reduction import recv_handle
from multiprocessing.spawn import prepare
from typing import TYPE_CHECKING, Any

from subnetact.errors import failure_text

if TYPE_CHECKING:
    from subnetact.workers.engine_snapshot import Parts
    from subnetact.workers.memory import BatchMemory


RUN, CHANGE, DONE, FAILED = b"r", b"c", b"d", b"f"
"""The first byte of a message says its kind. File descriptors follow a change."""

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
in_worker = False  # whether this process is a worker process


def main() -> None:
    """Run the program, which standard input describes as `WorkerProcess` wrote it; it does not return."""
    global in_worker
    in_worker = True
    for ignored in (signal.SIGINT, signal.SIGTERM):  # The parent decides when its processes end.
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    channel, parent, threads, *rest = pickle.load(sys.stdin.buffer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    pipe = Connection(channel)
    _end_with(parent, pipe)
    faulthandler.enable()
    status = 1
    try:  # On Linux niceness belongs to threads; the one that starts may be nice, and the others are not.
        with ThreadPoolExecutor(1) as starter:
            parts, requests, answers = starter.submit(_start, threads, *rest).result()
    except BaseException as error:
        pipe.send_bytes(FAILED + _pickled(error))
    else:
        import torch

        torch.set_num_threads(threads)
        gc.collect()
        gc.freeze()
        pipe.send_bytes(DONE)
        status = _serve(pipe, parts, requests, answers)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _start(
    threads: int,
    niceness: int,
    batch_sizes: Sequence[int],
    main_program: dict[str, Any],
    sent: bytes,
) -> tuple[Parts, BatchMemory, BatchMemory]:
    """Import the package, unpack the runner and warm up."""
    if niceness and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    import torch

    from subnetact.workers.engine_snapshot import unpack

    torch.set_num_threads(threads)
    prepare(main_program)  # It runs under another name, for the classes and functions that it defines.
    requests, answers, package = pickle.loads(sent)
    parts: Parts = unpack(package)
    for engine in parts.engines:
        engine.warm_up(batch_sizes)
    return parts, requests, answers


def _serve(pipe: Connection, parts: Parts, requests: BatchMemory, answers: BatchMemory) -> int:
    """Run batches until the parent closes the pipe."""
    from subnetact.workers.engine_snapshot import Package, apply
    from subnetact.workers.memory import SharedMemory

    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return 0
        kind, data = message[:1], message[1:]
        try:
            if kind == RUN:
                subnet, size, layout = pickle.loads(data)
                outputs = parts.runner.run(subnet, requests.read(layout, copy=False), size)
                if isinstance(outputs, dict):
                    raise TypeError("the engine returned a mapping; run() returns one output per input")
                pipe.send_bytes(DONE + answers.write(list(outputs)))
            elif kind == CHANGE:
                content, sizes = pickle.loads(data)
                segments = {n: SharedMemory(size, recv_handle(pipe)) for n, size in sizes.items()}
                apply(Package(content, segments), parts)
                pipe.send_bytes(DONE)
        except Exception as error:
            pipe.send_bytes(FAILED + _pickled(error))
            if kind == CHANGE:  # It may be half done.
                return 1


def _end_with(parent: int, pipe: Connection) -> None:
    """Make sure that this process ends when its parent does, however that ends, and whatever runs here."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    else:
        watch = select.poll()
        watch.register(pipe, 0)  # No event but that the other end is closed.
        threading.Thread(target=lambda: (watch.poll(), os._exit(1)), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _pickled(error: BaseException) -> bytes:
    """Pickle an error whose cause tells its traceback; one that cannot be pickled is replaced."""
    try:
        data = pickle.dumps(ExceptionWithTraceback(error, error.__traceback__))
        pickle.loads(data)
        return data
    except BaseException:  # The error's own methods run here, and may do anything.
        exhausted = any(kind.__name__ in ("OutOfMemoryError", "MemoryError") for kind in type(error).__mro__)
        other = (MemoryError if exhausted else RuntimeError)(failure_text(error))
        return pickle.dumps(ExceptionWithTraceback(other, error.__traceback__))
