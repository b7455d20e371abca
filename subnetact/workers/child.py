"""The program of a worker process: it gets a runner, runs batches, and ends with its parent.

Only the standard library is imported before the process is protected from signals, so this file imports torch
and the rest of the package in functions.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import runpy
import select
import signal
import sys
import threading
import traceback
import types
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any, NamedTuple

from subnetact.errors import failure_text

if TYPE_CHECKING:
    from subnetact.workers.engine_snapshot import Parts
    from subnetact.workers.memory import SharedMemory

__all__ = ["CHANGE", "DONE", "FAILED", "RUN", "StartMessage", "is_worker", "main"]

RUN, CHANGE, DONE, FAILED = b"r", b"c", b"d", b"f"
"""The first byte of a message says its kind. File descriptors follow a change."""

WARM_UP_S = 2.0
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_worker = False


class StartMessage(NamedTuple):
    """What a worker process needs to start.

    `main` says where the main program of the parent is, if the runner needs it: `("module", name)` or
    `("path", file)`. `niceness` is how far the start gives way to other processes. Memories are descriptors
    and sizes; those of the runner's `segments` have numbers.
    """

    path: list[str]
    main: tuple[str, str] | None
    threads: int
    niceness: int
    batch_sizes: tuple[int, ...]
    requests: tuple[int, int]
    answers: tuple[int, int]
    segments: dict[int, tuple[int, int]]
    data: bytes


def is_worker() -> bool:
    """Return whether this process is a worker process."""
    return _worker


def main(channel: int, message: int, size: int, parent: int) -> None:
    """Run the program, given descriptors of the socket and of the start message; it does not return."""
    global _worker
    _worker = True
    for ignored in (signal.SIGINT, signal.SIGTERM):  # The parent decides when its processes end.
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    pipe = Connection(channel)
    _end_with(parent, pipe)
    faulthandler.enable()
    started: list[Any] = []
    starter = threading.Thread(target=_start, args=(message, size, started))
    starter.start()  # On Linux niceness belongs to threads; this one may be nice, and the others are not.
    starter.join()
    parts, requests, answers, threads = started or [None] * 4
    status = 1
    if isinstance(parts, BaseException) or parts is None:
        pipe.send_bytes(FAILED + _pickled(parts or RuntimeError("the start failed")))
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


def _start(message: int, size: int, started: list[Any]) -> None:
    """Import the package, unpack the runner and warm up."""
    try:
        import mmap

        with mmap.mmap(message, size, prot=mmap.PROT_READ) as text:
            content = StartMessage(*pickle.loads(text[:size]))
        os.close(message)
        if content.niceness and sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), content.niceness)
        import torch

        from subnetact.workers.batch_memory import BatchMemory
        from subnetact.workers.engine_snapshot import Package, Parts, unpack
        from subnetact.workers.memory import SharedMemory

        torch.set_num_threads(content.threads)
        if content.main is not None:
            _run_main(*content.main)
        segments = {number: _opened(place) for number, place in content.segments.items()}
        parts = Parts(*unpack(Package(content.data, segments)))
        for engine in parts.engines:
            engine.warm_up(content.batch_sizes, WARM_UP_S)
        requests, answers = (
            BatchMemory(SharedMemory(size, descriptor))
            for descriptor, size in (content.requests, content.answers)
        )
        started[:] = [parts, requests, answers, content.threads]
    except BaseException as error:
        started[:] = [error, None, None, None]


def _serve(pipe: Connection, parts: Parts, requests: Any, answers: Any) -> int:
    """Run batches until the parent closes the pipe."""
    run = parts.runner.run
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return 0
        kind, data = message[:1], message[1:]
        try:
            if kind == RUN:
                subnet, size, layout = pickle.loads(data)
                outputs = run(subnet, requests.read(layout, copy=False), size)
                pipe.send_bytes(DONE + answers.write(_as_list(outputs)))
            elif kind == CHANGE:
                _follow(pickle.loads(data), pipe, parts)
                pipe.send_bytes(DONE)
        except Exception as error:
            pipe.send_bytes(FAILED + _pickled(error))
            if kind == CHANGE:  # It may be half done.
                return 1


def _as_list(outputs: Any) -> list[Any]:
    if isinstance(outputs, dict):
        raise TypeError("the engine returned a mapping; run() returns one output per input")
    return list(outputs)


def _follow(content: tuple[str, int, bytes, dict[int, int]], pipe: Connection, parts: Parts) -> None:
    from subnetact.workers.engine_snapshot import Change, Package, apply

    kind, number, data, sizes = content
    segments = {n: _opened((recv_handle(pipe), size)) for n, size in sizes.items()}
    apply(Change(kind, number, Package(data, segments)), parts)


def _opened(place: tuple[int, int]) -> SharedMemory:
    from subnetact.workers.memory import SharedMemory

    descriptor, size = place
    memory = SharedMemory(size, descriptor)
    memory.close()  # What is mapped needs no descriptor.
    return memory


def _run_main(kind: str, name: str) -> None:
    """Run the parent's main program under another name, for the classes and functions that it defines."""
    if kind == "module":
        content = runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
    else:
        content = runpy.run_path(name, run_name="__mp_main__")
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(content)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


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
    """Pickle an error and its traceback; an error that cannot be pickled is replaced by one that can."""
    try:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:  # The error's own methods run here, and may do anything.
        trace = failure_text(error)
    try:
        data = pickle.dumps((error, trace))
        pickle.loads(data)
        return data
    except BaseException:
        exhausted = any(kind.__name__ in ("OutOfMemoryError", "MemoryError") for kind in type(error).__mro__)
        text = failure_text(error)
        return pickle.dumps((MemoryError(text) if exhausted else RuntimeError(text), trace))
