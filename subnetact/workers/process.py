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
from multiprocessing.spawn import get_preparation_data
from typing import Any

from subnetact.errors import WorkerDied
from subnetact.files.fork import hear_of_forks
from subnetact.workers.engine_snapshot import Package, States
from subnetact.workers.memory import BatchMemory, SharedMemory

START_LIMIT_S = 300.0
_PROGRAM = "import sys; sys.path[:] = {path!r}; from subnetact.workers.child import main; main({channel})"


class WorkerProcess:
    """A process that runs batches, one at a time; Linux ends it with the thread that made this object."""

    def __init__(self, threads: int) -> None:
        self.states: States = ()
        self.is_awaited = True  # whether somebody waits for its answer, and is told how it ends
        self._killed = ""
        self.pipe, theirs = Pipe()
        program = _PROGRAM.format(path=list(map(str, sys.path)), channel=theirs.fileno())
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-u", "-X", "faulthandler", "-c", program],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the parent alone.
            )
        self.pid = self._popen.pid
        hear_of_forks(self)

    def note_fork(self) -> None:
        """Close what is shared with a process: it would look alive as long as the forked process lives."""
        self.pipe.close()

    @property
    def ended(self) -> int | None:
        """How the process has ended, as `subprocess.Popen.returncode`."""
        return self._popen.poll()

    def start(self, package: Package, states: States, batch_sizes: Sequence[int]) -> None:
        """Send the runner, and wait until it is ready; raise what the start raised, or WorkerDied."""
        memories = SharedMemory(1), SharedMemory(1)
        self._requests, self._answers = map(BatchMemory, memories)
        facts = get_preparation_data("subnetact") if b"__main__" in package.data else {}
        main_program = {name: value for name, value in facts.items() if name.startswith("init_main")}
        arguments = main_program, tuple(batch_sizes), package.data, package.places
        self._ask("start", arguments, [*memories, *package.segments])
        self.states = states

    def follow(self, package: Package, states: States) -> None:
        """Apply changes of the runner; a process in which one fails ends."""
        self._ask("follow", (package.data, package.places), package.segments)
        self.states = states

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Any:
        """Run one batch; raise what the runner raised, or WorkerDied."""
        layout = self._ask("run", (subnet, batch_size, self._requests.write(inputs)))
        return self._answers.read(layout, copy=True)

    def _ask(self, method: str, arguments: Any, memories: Sequence[SharedMemory] = ()) -> Any:
        """Let the process call a method of `child.Worker`; return what that returns, or raise its error."""
        self.is_awaited = True
        try:
            self.pipe.send((method, arguments, list(map(len, memories))))
            for memory in memories:
                send_handle(self.pipe, memory.descriptor, self.pid)
            if method == "start" and not self.pipe.poll(START_LIMIT_S):
                self.kill(f"because it had not started after {START_LIMIT_S:g} s")
            answer, failure = self.pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied(f"worker process {self.pid} {self.reason()}") from None
        self.is_awaited = False
        if failure is None:
            return answer
        data, text = failure
        try:
            error = pickle.loads(data)
        except Exception:  # This process may lack its class.
            error = RuntimeError(text)
        raise error

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

    def wait(self) -> None:
        """Wait until the process has ended, and end the wait for its answer, if there is one."""
        self._popen.wait()
        # A program that it started may hold the other end of its pipe.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.pipe.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)
