"""WorkerProcess: one worker process as its parent sees it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from multiprocessing.reduction import send_handle
from multiprocessing.spawn import get_executable
from typing import Any

from subnetact.errors import EngineError, WorkerDied, failure_text
from subnetact.workers.batch_memory import BatchMemory
from subnetact.workers.child import CHANGE, FAILED, RUN, StartMessage
from subnetact.workers.engine_snapshot import Change, Package, States
from subnetact.workers.memory import SharedMemory

__all__ = ["WorkerProcess"]

FIRST_BYTES = 2**16
_PROGRAM = (
    "import json, sys; arguments = json.loads(sys.argv[1]); sys.path[:] = arguments.pop(); "
    "from subnetact.workers.child import main; main(*arguments)"
)
_processes: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


class RemoteTraceback(Exception):
    """The traceback of an error in a worker process, as text."""


class WorkerProcess:
    """A process with an interpreter of its own that runs batches, one at a time.

    The thread that makes this object must live as long as the process: Linux ends the process with it.
    `states` are those of the runner's parts; `ended` is as `subprocess.Popen.returncode`.
    """

    def __init__(
        self,
        package: Package,
        states: States,
        threads: int,
        niceness: int,
        batch_sizes: Sequence[int],
    ) -> None:
        self.states = states
        self.ended: int | None = None
        self._over = threading.Event()
        self._requests = BatchMemory(SharedMemory(FIRST_BYTES))
        self._answers = BatchMemory(SharedMemory(FIRST_BYTES))
        memories = {"requests": self._requests.memory, "answers": self._answers.memory}
        message = pickle.dumps(
            tuple(
                StartMessage(
                    path=list(sys.path),
                    main=_main_program() if b"__main__" in package.data else None,
                    threads=threads,
                    niceness=niceness,
                    batch_sizes=tuple(batch_sizes),
                    requests=(memories["requests"].descriptor, FIRST_BYTES),
                    answers=(memories["answers"].descriptor, FIRST_BYTES),
                    segments={n: (s.descriptor, s.size) for n, s in package.segments.items()},
                    data=package.data,
                )
            )
        )
        self._popen = self._start(message, [*memories.values(), *package.segments.values()], threads)
        self.pid = self._popen.pid
        _processes.add(self)

    def _start(
        self, message: bytes, memories: Sequence[SharedMemory], threads: int
    ) -> subprocess.Popen[bytes]:
        self.pipe, theirs = Pipe()
        written = SharedMemory(len(message))
        written.map[: len(message)] = message
        arguments = [theirs.fileno(), written.descriptor, len(message), os.getpid(), sys.path]
        count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        try:
            return subprocess.Popen(
                [os.fsdecode(get_executable()), "-c", _PROGRAM, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **count},
                pass_fds=[theirs.fileno(), written.descriptor, *(m.descriptor for m in memories)],
            )
        except (OSError, TypeError) as error:
            self.pipe.close()
            raise EngineError(
                f"a worker process cannot be started: {error}; run threads instead: process=False"
            ) from error
        finally:
            theirs.close()
            written.close()

    def wait_until_ready(self) -> None:
        """Read the first message, in the thread that started the process; raise what the start raised."""
        try:
            answer = self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.wait(2.0)
            raise EngineError(f"a worker process {self.reason()} while it started") from None
        _content(answer)

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> list[Any]:
        """Run one batch; raise what the runner raised, or WorkerDied."""
        layout = self._requests.write(inputs)
        answer = self._ask(RUN + pickle.dumps((subnet, batch_size, layout)))
        return self._answers.read(answer, copy=True)

    def follow(self, changes: Sequence[Change], states: States) -> None:
        """Apply changes of the runner; a process in which one fails ends."""
        for kind, number, package in changes:
            sizes = {n: segment.size for n, segment in package.segments.items()}
            content = pickle.dumps((kind, number, package.data, sizes))
            self._ask(CHANGE + content, [segment.descriptor for segment in package.segments.values()])
        self.states = states

    def _ask(self, message: bytes, descriptors: Sequence[int] = ()) -> bytes:
        try:
            self.pipe.send_bytes(message)
            for descriptor in descriptors:
                send_handle(self.pipe, descriptor, self.pid)
            answer = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise WorkerDied(f"worker process {self.pid} {self.reason()}") from None
        return _content(answer)

    def reason(self) -> str:
        """Return how the process has ended, in words; wait for a moment until that is known."""
        self._over.wait(2.0)
        status = self.ended
        if status is None:
            return "closed its pipe"
        if status >= 0:
            return f"ended with status {status}"
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"

    def poll(self) -> bool:
        """Return whether the process has ended; the thread that started the process asks this."""
        if self.ended is None and self._popen.poll() is not None:
            self.ended = self._popen.returncode
            self._over.set()
            self._shut()
        return self.ended is not None

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        self._popen.kill()

    def stop(self) -> None:
        """Let the process end when it has finished its batch."""
        self._shut()

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has ended, and kill it after the timeout."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._popen.wait()
        self.poll()

    def close(self) -> None:
        """Close the descriptors of a process that has ended. No thread may wait for its answer any more."""
        self.pipe.close()
        for memory in (self._requests.memory, self._answers.memory):
            memory.close()

    def _shut(self) -> None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.pipe.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)  # The other end may have closed it.


def _main_program() -> tuple[str, str]:
    """Return how a worker process finds the classes that the main program defines.

    Raises:
        EngineError: the main program is no file.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return "module", spec.name
    path = getattr(main, "__file__", None)
    if path is None:
        raise EngineError(
            "the engine needs a class or function of the interactive session, which a worker process does "
            "not have; define it in a module"
        )
    return "path", os.path.abspath(path)


def _content(answer: bytes) -> bytes:
    """Return what an answer has behind its first byte, or raise the error that it is."""
    if answer[:1] == FAILED:
        raise _error(answer[1:])
    return answer[1:]


def _error(data: bytes) -> BaseException:
    try:
        error, trace = pickle.loads(data)
    except Exception as failure:
        text = failure_text(failure)
        return RuntimeError(f"a worker process failed, and its error cannot be read here: {text}")
    if not isinstance(error, Exception):
        error = EngineError(f"in a worker process: {failure_text(error)}")
    error.__cause__ = RemoteTraceback(trace)
    found: BaseException = error
    return found


def _note_fork() -> None:
    for process in list(_processes):
        process.close()  # Otherwise it would look alive as long as the forked process lives.


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
