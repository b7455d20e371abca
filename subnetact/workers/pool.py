"""ProcessPool: the worker processes of one runner. Those that die or hang are replaced; a spare is ready."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
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
STOPPED = "the worker processes were stopped; open another batcher"
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
                process.follow(*self._pool.snapshot.package(process.states))
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
        self._lock = threading.RLock()
        self._starting: dict[WorkerProcess, float] = {}
        self._ready: list[WorkerProcess] = []
        self._serving: set[WorkerProcess] = set()
        first = [Future[WorkerProcess]() for _ in range(workers)]
        self._waiting = list(first)  # for a process each
        self.runners: list[ProcessRunner] = []
        self._next_start = 0.0
        self._closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="subnetact-worker-processes", daemon=True)
        self._keeper.start()
        try:
            for waiting in first:
                self.runners.append(ProcessRunner(self, waiting.result()))
        except BaseException:
            self.close()
            raise

    def take(self) -> WorkerProcess:
        """Wait for a process that has nothing to do; raise what the runner raised while it started."""
        with self._lock:
            if (process := self.take_spare()) is not None:
                return process
            if self._closed.is_set():
                raise EngineError(STOPPED)
            waiting = Future[WorkerProcess]()
            self._waiting.append(waiting)
        return waiting.result()

    def take_spare(self) -> WorkerProcess | None:
        """Return a process that has nothing to do, or None if there is none now."""
        with self._lock:
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
        self._closed.set()
        if threading.current_thread() is not self._keeper:
            self._keeper.join()

    # -- the keeper's thread ----------------------------------------------------------------------

    def _keep(self) -> None:
        # Processes inherit this until they ignore these signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        while True:
            try:
                self._start_missing()
                self._look()
            except Exception:
                _log.exception("the worker processes are kept although an error was raised")
            if self._closed.wait(TICK_S):
                break
        self._end_all()

    def _start_missing(self) -> None:
        with self._lock:
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
                package, states = self.snapshot.package()
                process = WorkerProcess(package, states, self._threads, niceness, self._batch_sizes)
            except Exception as error:
                self._fail(error)
                return
            self._starting[process] = time.monotonic() + START_LIMIT_S

    def _look(self) -> None:
        """See which processes have started or ended."""
        for process, limit in list(self._starting.items()):
            if process.pipe.poll():
                self._note_start(process)
            elif time.monotonic() > limit:
                process.kill(f"because it had not started after {START_LIMIT_S:g} s")
        for process in (*self._starting, *self._ready, *self._serving):
            if process.ended is not None:
                process.stop()  # A program that it started may hold the other end of its pipe.
                if process not in self._starting:  # Whoever starts one reads its message, or that it ended.
                    with self._lock:
                        self._ready = [one for one in self._ready if one is not process]
                        self._serving.discard(process)
                    if not process.is_awaited:
                        _log.warning("worker process %d %s", process.pid, process.reason())

    def _note_start(self, process: WorkerProcess) -> None:
        """Give a process that has started to whoever waits first, or keep it as a spare."""
        del self._starting[process]
        try:
            process.wait_until_ready()
        except Exception as error:
            self._serving.add(process)  # until it has ended
            process.kill("because it does not start")
            self._fail(error)
            return
        with self._lock:
            self._next_start = 0.0
            self._ready.append(process)
            if self._waiting and (spare := self.take_spare()) is not None:
                self._waiting.pop(0).set_result(spare)

    def _fail(self, error: Exception) -> None:
        """Tell those who wait why there is no process."""
        with self._lock:
            self._next_start = time.monotonic() + PAUSE_S
            if not self._waiting:
                _log.warning("a spare worker process does not start, next try in %d s: %s", PAUSE_S, error)
            while self._waiting:
                self._waiting.pop().set_exception(error)

    def _end_all(self) -> None:
        with self._lock:
            if self._waiting:
                self._fail(EngineError(STOPPED))
        everyone = [*self._starting, *self._ready, *self._serving]
        for process in everyone:
            process.stop()
        limit = time.monotonic() + STOP_LIMIT_S
        for process in everyone:
            if process in self._starting:
                process.kill("because its batcher was closed")
            process.wait(max(0.0, limit - time.monotonic()))
        with self._lock:
            for runner in self.runners:
                runner.process = None  # Descriptors and memory are closed with the last reference.
            for processes in (self._starting, self._ready, self._serving):
                processes.clear()
