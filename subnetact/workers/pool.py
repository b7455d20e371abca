"""ProcessPool: the worker processes of one runner. Those that die or hang are replaced; a spare is ready."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from subnetact.errors import EngineError, WorkerDied
from subnetact.workers.child import is_worker
from subnetact.workers.engine_snapshot import EngineSnapshot
from subnetact.workers.process import WorkerProcess

__all__ = ["ProcessPool", "ProcessRunner"]

START_LIMIT_S = 300.0
STOP_LIMIT_S = 5.0
TICK_S = 0.2
NICENESS = 5
LONGEST_PAUSE_S = 60.0
_log = logging.getLogger("subnetact.workers")


class ProcessRunner:
    """The runner of one worker of a batcher: it runs batches in a process, and takes another if that dies."""

    def __init__(self, pool: ProcessPool, process: WorkerProcess) -> None:
        self._pool = pool
        self.process: WorkerProcess | None = process

    @property
    def pid(self) -> int | None:
        """The id of the process, or None if there is none now."""
        process = self.process
        return None if process is None else process.pid

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
            self._pool.update(process)
            return process.run(subnet, inputs, batch_size)
        except WorkerDied:
            if self.process is process:
                self.process = None
            process.kill()
            raise

    def abandon(self) -> None:
        """Kill the process, because its batch hangs."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()


class ProcessPool:
    """Worker processes of one runner, and spares that take over at once when one dies.

    A thread of its own starts the processes and notices when one ends. They start by spawn: a new interpreter
    each, which imports what it needs. (A forked process would have copies of locks that threads of the parent
    hold at that moment, and of CUDA contexts that do not work there.) A start takes 2 s of CPU time, 1.2 s of
    them for importing torch, and as much longer as other programs use the cores: spares hide that. Each
    process uses so many CPU `threads`, and warms up for the `batch_sizes`, for at most two seconds.
    """

    def __init__(
        self, runner: Any, workers: int, *, threads: int | None, batch_sizes: Sequence[int], spares: int
    ) -> None:
        if os.name == "nt":
            raise EngineError("process: worker processes need Linux or macOS; run threads: process=False")
        if is_worker():
            raise EngineError(
                "a worker process opens a batcher with worker processes: the main program runs again in it "
                "because the engine needs its classes. Put what the program does under `if __name__ == "
                '"__main__":`, or define the classes in a module'
            )
        self._snapshot = EngineSnapshot(runner)
        self._threads = torch.get_num_threads() if threads is None else threads
        self._batch_sizes = tuple(batch_sizes)
        self._workers, self._spares = workers, spares
        self._changed = threading.Condition()
        self._starting: dict[WorkerProcess, tuple[float, int]] = {}
        self._ready: list[WorkerProcess] = []
        self._serving: set[WorkerProcess] = set()
        self._waiting = workers
        self.runners: list[ProcessRunner] = []
        self._failures = 0
        self._failure: BaseException | None = None
        self._next_start = 0.0
        self._opened = self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_in, False)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._watched: dict[WorkerProcess, int] = {}
        self._keeper = threading.Thread(target=self._keep, name="subnetact-worker-processes", daemon=True)
        self._keeper.start()
        try:
            for _ in range(workers):
                self.runners.append(ProcessRunner(self, self._wait(0)))
        except BaseException:
            self.close()
            raise
        with self._changed:
            self._opened = True
        self._wake()

    def take(self) -> WorkerProcess:
        """Wait for a process that has nothing to do; raise what the runner raised while it started."""
        with self._changed:
            self._waiting += 1
            failures = self._failures
        self._wake()
        return self._wait(failures)

    def take_spare(self) -> WorkerProcess | None:
        """Return a process that has nothing to do, or None if there is none now."""
        with self._changed:
            process = self._pop_ready()
        self._wake()
        return process

    def has_spare(self) -> bool:
        """Return, without the lock, whether a process lives that has nothing to do."""
        return any(process.ended is None for process in list(self._ready))

    def update(self, process: WorkerProcess) -> None:
        """Let a process follow what has changed in the runner."""
        if not self._snapshot.is_current(process.states):
            process.follow(*self._snapshot.changes(process.states))

    def close(self) -> None:
        """End all processes: those that run a batch are given a few seconds to finish it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wake()
        if threading.current_thread() is not self._keeper:
            self._keeper.join()

    def _wait(self, failures: int) -> WorkerProcess:
        with self._changed:
            try:
                while True:
                    process = self._pop_ready()
                    if process is not None:
                        return process
                    if self._closed:
                        raise EngineError("the worker processes were stopped; open another batcher")
                    if self._failures > failures and self._failure is not None:
                        raise self._failure
                    self._changed.wait()
            finally:
                self._waiting -= 1

    def _pop_ready(self) -> WorkerProcess | None:
        while self._ready:
            process = self._ready.pop(0)
            if process.ended is None:
                self._serving.add(process)
                return process
        return None

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # It is awake already, or has ended.
            os.write(self._wake_in, b".")

    # -- the keeper's thread ----------------------------------------------------------------------

    def _keep(self) -> None:
        if hasattr(signal, "pthread_sigmask"):  # Processes inherit this until they ignore these signals.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            while not self._closed:
                try:
                    self._start_missing()
                    self._watch()
                except Exception:
                    _log.exception("the worker processes are kept although an error was raised")
                    time.sleep(TICK_S)
        finally:
            self._end_all()

    def _start_missing(self) -> None:
        with self._changed:
            missing = self._workers - len(self._ready) - len(self._serving)
            niceness = 0
            if missing > 0:  # A spare that is just starting gives way to others, so it is no replacement.
                missing -= sum(not nice for _, nice in self._starting.values())
            elif self._opened:  # Spares do not slow down the start of what is waited for.
                missing, niceness = missing + self._spares - len(self._starting), NICENESS
            now = time.monotonic()
            if missing <= 0 or (not self._waiting and now < self._next_start):
                return
        for _ in range(missing):
            try:
                package, states = self._snapshot.whole()
                process = WorkerProcess(package, states, self._threads, niceness, self._batch_sizes)
            except Exception as error:
                self._failed(error)
                return
            self._starting[process] = time.monotonic() + START_LIMIT_S, niceness
            self._selector.register(process.pipe, selectors.EVENT_READ, process)
            if hasattr(os, "pidfd_open"):
                self._watched[process] = os.pidfd_open(process.pid)
                self._selector.register(self._watched[process], selectors.EVENT_READ)

    def _watch(self) -> None:
        everyone = (*self._starting, *self._ready, *self._serving)
        patient = not self._starting and all(process in self._watched for process in everyone)
        pause = max(0.0, self._next_start - time.monotonic())
        events = self._selector.select(TICK_S if not patient else (pause or None))
        for key, _ in events:
            if key.fd == self._wake_out:
                os.read(self._wake_out, 4096)
            elif key.data in self._starting:
                self._started(key.data)
        for process in everyone:
            if process.poll():
                self._lost(process)
        for process, (limit, _) in list(self._starting.items()):
            if time.monotonic() > limit:
                process.kill()

    def _started(self, process: WorkerProcess) -> None:
        self._selector.unregister(process.pipe)
        process.poll()
        try:
            process.wait_until_ready()
        except Exception as error:
            self._starting.pop(process)
            self._serving.add(process)  # until it has ended
            process.kill()
            self._failed(error)
            return
        with self._changed:
            self._starting.pop(process)
            self._ready.append(process)
            self._failures, self._next_start = 0, 0.0
            self._changed.notify_all()

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            self._failures += 1
            self._failure = error
            pause = min(LONGEST_PAUSE_S, 2.0 ** min(self._failures, 10))
            self._next_start = time.monotonic() + pause
            if not self._waiting:
                _log.warning("a spare worker process does not start, next try in %.0f s: %s", pause, error)
            self._changed.notify_all()

    def _lost(self, process: WorkerProcess) -> None:
        with self._changed:
            started = self._starting.pop(process, None)
            if process in self._ready:
                self._ready.remove(process)
            self._serving.discard(process)
        if started is not None:
            self._selector.unregister(process.pipe)
            self._failed(EngineError(f"a worker process ended while it started: it {process.reason()}"))
        self._forget(process)
        _log.warning("worker process %d %s", process.pid, process.reason())

    def _forget(self, process: WorkerProcess) -> None:
        watched = self._watched.pop(process, None)
        if watched is not None:
            self._selector.unregister(watched)
            os.close(watched)

    def _end_all(self) -> None:
        with self._changed:
            everyone = [*self._starting, *self._ready, *self._serving]
        for process in everyone:
            process.stop()
        limit = time.monotonic() + STOP_LIMIT_S
        for process in everyone:
            if process in self._starting:
                process.kill()
            process.wait(max(0.0, limit - time.monotonic()))
            self._forget(process)
        self._selector.close()
        os.close(self._wake_out)
        idle = [*self._starting, *self._ready, *(runner.process for runner in self.runners)]
        for process in filter(None, idle):  # A thread may still wait for the answer of an abandoned one.
            process.close()
        with self._changed:
            os.close(self._wake_in)
            self._wake_in = -1
            self._starting.clear()
            self._ready.clear()
            self._serving.clear()
