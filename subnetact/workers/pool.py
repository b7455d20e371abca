"""ProcessPool: the worker processes of one runner. Those that die or hang are replaced; a spare is ready."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from subnetact.errors import EngineError, WorkerDied
from subnetact.workers import child
from subnetact.workers.engine_snapshot import EngineSnapshot
from subnetact.workers.process import WorkerProcess

START_LIMIT_S = 300.0
STOP_LIMIT_S = 5.0
TICK_S = 0.05
NICENESS = 5
PAUSE_S = 30.0  # until a process that nobody waits for is started again, after one did not start
_log = logging.getLogger("subnetact.workers")


class ProcessRunner:
    """The runner of one worker of a batcher: it runs batches in a process, and takes another if that dies."""

    def __init__(self, pool: ProcessPool, process: WorkerProcess) -> None:
        self._pool = pool
        self.process: WorkerProcess | None = process

    @property
    def pid(self) -> int | None:
        """The id of the process, or None if there is none now."""
        return getattr(self.process, "pid", None)

    @property
    def is_ready(self) -> bool:
        """Whether a batch can run now: the process lives, or a spare takes over."""
        process = self.process
        return (process is not None and process.ended is None) or self._pool.has_spare()

    def enter_worker(self, threads: int | None) -> None:  # noqa: ARG002
        """Wait for a process if there is none. A process gets its number of threads when it starts."""
        if self.process is None or self.process.ended is not None:
            self.process = self._pool.take()

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> list[Any]:
        """Run one batch in the process, after everything that has changed in the parent's runner."""
        process = self.process
        if process is not None and process.ended is not None:
            process = self.process = self._pool.take_spare()  # It died while it had nothing to do.
        if process is None:
            raise WorkerDied("a worker process died while it had nothing to do, and no spare is ready")
        try:
            if not self._pool.snapshot.is_current(process.states):
                process.follow(*self._pool.snapshot.changes(process.states))
            return process.run(subnet, inputs, batch_size)
        except WorkerDied:
            if self.process is process:
                self.process = None
            process.kill("because its pipe is closed")
            raise

    def abandon(self) -> None:
        """Kill the process, because its batch hangs."""
        process, self.process = self.process, None
        if process is not None:
            process.kill("after it hung")


class ProcessPool:
    """Worker processes of one runner, and spares that take over at once when one dies.

    A thread starts the processes, each as a new interpreter (a fork would copy locks that other threads hold,
    and CUDA contexts that do not work there), and notices when one ends. A start takes 2 s of CPU time, 1.2 s
    of them for importing torch: spares hide that.
    """

    def __init__(
        self, runner: Any, workers: int, *, threads: int | None, batch_sizes: Sequence[int], spares: int
    ) -> None:
        if os.name == "nt":
            raise EngineError("process: worker processes need Linux or macOS; run threads: process=False")
        if child.in_worker:
            raise EngineError(
                "a worker process opens a batcher with worker processes: the main program runs again in it "
                "because the engine needs its classes. Put what the program does under `if __name__ == "
                '"__main__":`, or define the classes in a module'
            )
        self.snapshot = EngineSnapshot(runner)
        self._threads = torch.get_num_threads() if threads is None else threads
        self._batch_sizes = tuple(batch_sizes)
        self._workers, self._spares = workers, spares
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._starting: dict[WorkerProcess, float] = {}
        self._ready: list[WorkerProcess] = []
        self._serving: set[WorkerProcess] = set()
        self._waiting = workers
        self.runners: list[ProcessRunner] = []
        self._failures = 0
        self._failure: BaseException | None = None
        self._next_start = 0.0
        self._closed = False
        self._keeper = threading.Thread(target=self._keep, name="subnetact-worker-processes", daemon=True)
        self._keeper.start()
        try:
            for _ in range(workers):
                self.runners.append(ProcessRunner(self, self._wait(0)))
        except BaseException:
            self.close()
            raise
        self._wake.set()

    def take(self) -> WorkerProcess:
        """Wait for a process that has nothing to do; raise what the runner raised while it started."""
        with self._changed:
            self._waiting += 1
            failures = self._failures
        self._wake.set()
        return self._wait(failures)

    def take_spare(self) -> WorkerProcess | None:
        """Return a process that has nothing to do, or None if there is none now."""
        self._wake.set()
        with self._changed:
            while self._ready:
                process = self._ready.pop(0)
                if process.ended is None:
                    self._serving.add(process)
                    return process
        return None

    def has_spare(self) -> bool:
        """Return, without the lock, whether a process lives that has nothing to do."""
        return any(process.ended is None for process in list(self._ready))

    def close(self) -> None:
        """End all processes: those that run a batch are given a few seconds to finish it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wake.set()
        if threading.current_thread() is not self._keeper:
            self._keeper.join()

    def _wait(self, failures: int) -> WorkerProcess:
        with self._changed:
            try:
                while (process := self.take_spare()) is None:
                    if self._closed:
                        raise EngineError("the worker processes were stopped; open another batcher")
                    if self._failures > failures and self._failure is not None:
                        raise self._failure
                    self._changed.wait()
                return process
            finally:
                self._waiting -= 1

    # -- the keeper's thread ----------------------------------------------------------------------

    def _keep(self) -> None:
        # Processes inherit this until they ignore these signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        while not self._closed:
            try:
                self._start_missing()
                self._look()
            except Exception:
                _log.exception("the worker processes are kept although an error was raised")
            self._wake.wait(TICK_S)
            self._wake.clear()
        self._end_all()

    def _start_missing(self) -> None:
        with self._changed:
            missing = self._workers - len(self._ready) - len(self._serving)
            niceness = 0
            if missing > 0:  # A spare that is just starting gives way to others, so it is no replacement.
                missing -= sum(not process.niceness for process in self._starting)
            elif not self._waiting:  # Spares do not slow down the start of what is waited for.
                missing, niceness = missing + self._spares - len(self._starting), NICENESS
            if not self._waiting and time.monotonic() < self._next_start:
                return
        for _ in range(missing):
            try:
                package, states = self.snapshot.whole()
                process = WorkerProcess(package, states, self._threads, niceness, self._batch_sizes)
            except Exception as error:
                self._failed(error)
                return
            self._starting[process] = time.monotonic() + START_LIMIT_S

    def _look(self) -> None:
        """See which processes have started or ended."""
        for process, limit in list(self._starting.items()):
            if process.pipe.poll():
                self._started(process)
            elif time.monotonic() > limit:
                process.kill(f"because it had not started after {START_LIMIT_S:g} s")
        for process in (*self._starting, *self._ready, *self._serving):
            if process.ended is not None:
                process.stop()  # A program that it started may hold the other end of its pipe.
                if process not in self._starting:  # Whoever starts one reads its message, or that it ended.
                    with self._changed:
                        self._ready = [one for one in self._ready if one is not process]
                        self._serving.discard(process)
                    if not process.is_awaited:
                        _log.warning("worker process %d %s", process.pid, process.reason())

    def _started(self, process: WorkerProcess) -> None:
        try:
            process.wait_until_ready()
        except Exception as error:
            self._serving.add(process)  # until it has ended
            del self._starting[process]
            process.kill("because it does not start")
            self._failed(error)
            return
        with self._changed:
            del self._starting[process]
            self._ready.append(process)
            self._next_start = 0.0
            self._changed.notify_all()

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            self._failures += 1
            self._failure = error
            self._next_start = time.monotonic() + PAUSE_S
            if not self._waiting:
                _log.warning("a spare worker process does not start, next try in %d s: %s", PAUSE_S, error)
            self._changed.notify_all()

    def _end_all(self) -> None:
        everyone = [*self._starting, *self._ready, *self._serving]
        for process in everyone:
            process.stop()
        limit = time.monotonic() + STOP_LIMIT_S
        for process in everyone:
            if process in self._starting:
                process.kill("because its batcher was closed")
            process.wait(max(0.0, limit - time.monotonic()))
        with self._changed:
            for runner in self.runners:
                runner.process = None  # Descriptors and memory are closed with the last reference.
            for processes in (self._starting, self._ready, self._serving):
                processes.clear()
