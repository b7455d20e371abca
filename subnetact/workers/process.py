"""WorkerProcess: one worker process as its parent sees it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from multiprocessing.reduction import send_handle
from multiprocessing.spawn import get_executable, get_preparation_data
from typing import Any

from subnetact.errors import EngineError, WorkerDied, failure_text
from subnetact.files.fork import hear_of_forks
from subnetact.workers.child import CHANGE, FAILED, RUN
from subnetact.workers.engine_snapshot import Package, States
from subnetact.workers.memory import BatchMemory, SharedMemory, new_file

_PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from subnetact.workers.child import main; main()"
)


class WorkerProcess:
    """A process that runs batches, one at a time; Linux ends it with the thread that made this object."""

    def __init__(
        self, package: Package, states: States, threads: int, niceness: int, batch_sizes: Sequence[int]
    ) -> None:
        self.states, self.niceness = states, niceness
        self.is_awaited = True  # whether somebody waits for its answer, and is told how it ends
        self._killed = ""
        self._requests, self._answers = (BatchMemory(SharedMemory(1)) for _ in range(2))
        memories = [self._requests.memory, self._answers.memory, *package.segments.values()]
        self.pipe, theirs = Pipe()
        sent = pickle.dumps((self._requests, self._answers, package))
        main_program = _main_program(package.data)
        content = (theirs.fileno(), os.getpid(), threads, niceness, tuple(batch_sizes), main_program, sent)
        try:
            with theirs, os.fdopen(new_file(), "w+b") as written:
                written.write(pickle.dumps(list(sys.path)) + pickle.dumps(content))
                written.seek(0)
                self._popen = subprocess.Popen(
                    [os.fsdecode(get_executable()), "-c", _PROGRAM],
                    stdin=written,
                    env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
                    pass_fds=[theirs.fileno(), *(m.descriptor for m in memories)],
                )
        except (OSError, TypeError) as error:
            self.pipe.close()
            raise EngineError(
                f"a worker process cannot be started: {error}; run threads instead: process=False"
            ) from error
        self.pid = self._popen.pid
        hear_of_forks(self)

    def note_fork(self) -> None:
        """Close what is shared with a process: it would look alive as long as the forked process lives."""
        self.pipe.close()
        for memory in (self._requests.memory, self._answers.memory):
            memory.close_descriptor()

    @property
    def ended(self) -> int | None:
        """How the process has ended, as `subprocess.Popen.returncode`."""
        return self._popen.poll()

    def wait_until_ready(self) -> None:
        """Read the first message, in the thread that started the process; raise what the start raised."""
        try:
            answer = self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.wait(2.0)
            raise EngineError(f"a worker process {self.reason()} while it started") from None
        _content(answer)
        self.is_awaited = False

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> list[Any]:
        """Run one batch; raise what the runner raised, or WorkerDied."""
        layout = self._requests.write(inputs)
        answer = self._ask(RUN + pickle.dumps((subnet, batch_size, layout)))
        return self._answers.read(answer, copy=True)

    def follow(self, package: Package, states: States) -> None:
        """Apply changes of the runner; a process in which one fails ends."""
        sizes = {number: len(segment) for number, segment in package.segments.items()}
        content = pickle.dumps((package.data, sizes))
        self._ask(CHANGE + content, [segment.descriptor for segment in package.segments.values()])
        self.states = states

    def _ask(self, message: bytes, descriptors: Sequence[int] = ()) -> bytes:
        self.is_awaited = True
        try:
            self.pipe.send_bytes(message)
            for descriptor in descriptors:
                send_handle(self.pipe, descriptor, self.pid)
            answer = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise WorkerDied(f"worker process {self.pid} {self.reason()}") from None
        self.is_awaited = False
        return _content(answer)

    def reason(self) -> str:
        """Return how the process has ended, in words; wait for a moment until that is known."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(2.0)
        status = self.ended
        if status is None or self._killed:
            return self._killed or "closed its pipe"
        if status >= 0:
            return f"ended with status {status}"
        return f"was killed by {next((s.name for s in signal.Signals if s == -status), f'signal {-status}')}"

    def kill(self, why: str) -> None:
        """End the process at once, whatever it does; `why` says what it was killed for."""
        if self.ended is None:
            self._killed = f"was killed {why}"
            self._popen.kill()

    def stop(self) -> None:
        """Let the process end when it has finished its batch, and nobody wait for one that has ended."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.pipe.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)  # The other end may have closed it.

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has ended, and kill it after the timeout."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill("because it did not end")
            self._popen.wait()


def _main_program(data: bytes) -> dict[str, Any]:
    """Return how a worker process finds the classes that the main program defines, if the data need it."""
    facts = get_preparation_data("subnetact") if b"__main__" in data else {"init_main": None}
    found = {name: value for name, value in facts.items() if name.startswith("init_main")}
    if not found:
        raise EngineError(
            "the engine needs a class or function of the interactive session, which a worker process does "
            "not have; define it in a module"
        )
    return found


def _content(answer: bytes) -> bytes:
    """Return what an answer has behind its first byte, or raise the error that it is."""
    if answer[:1] != FAILED:
        return answer[1:]
    try:
        error = pickle.loads(answer[1:])
    except Exception as failure:
        text = failure_text(failure)
        raise RuntimeError(f"a worker process failed, and its error cannot be read here: {text}") from None
    if not isinstance(error, Exception):
        raise EngineError(f"in a worker process: {failure_text(error)}") from error
    raise error
