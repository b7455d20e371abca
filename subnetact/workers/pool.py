"""ProcessPool: the worker processes of one runner. Those that die or hang are replaced; a spare is ready."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from subnetact.errors import EngineError, WorkerDied, failure_text
from subnetact.workers import child
from subnetact.workers.engine_snapshot import EngineSnapshot
from subnetact.workers.process import WorkerProcess

PAUSE_S = 30.0  # until a process that nobody waits for is started again, after one did not start
STOPPED = "the worker processes were stopped; open another batcher"
CLOSED = "because its batcher was closed"
_log = logging.getLogger("subnetact.workers")


class ProcessRunner:
    """The runner of one worker of a batcher: it runs batches in a process, and takes another if that dies."""

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool
        self.process: WorkerProcess | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process, or None if there is none now."""
        return getattr(self.process, "pid", None)

    @property
    def is_ready(self) -> bool:
        """Whether a batch can run now: the process lives, or a spare takes over."""
        process = self.process
        return (process is not None and process.ended is None) or bool(self._pool.ready)

    def enter_worker(self, threads: int | None) -> None:  # noqa: ARG002
        """Wait for a process if there is none. A process gets its number of threads when it starts."""
        if self.process is None or self.process.ended is not None:
            self.process = self._pool.take().result()

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Any:
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

    A thread per process starts it as a new interpreter (a fork would copy locks that other threads hold, and
    CUDA contexts that do not work there), waits until it ends, and starts the next one. A start takes 2 s of
    CPU time, 1.2 s of them for importing torch: spares hide that.
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
        self.runners = [ProcessRunner(self) for _ in range(workers)]
        self._threads = torch.get_num_threads() if threads is None else threads
        self._batch_sizes = tuple(batch_sizes)
        self._changed = threading.Condition()
        self._processes: set[WorkerProcess] = set()  # all that run
        self.ready: list[WorkerProcess] = []  # those that have nothing to do
        self._waiting: list[Future[WorkerProcess]] = []  # for a process each
        self._starting = 0
        self._closed = False
        first = [self.take() for _ in self.runners]
        self._keepers = [
            threading.Thread(target=self._keep, name="subnetact-worker-process", daemon=True)
            for _ in range(workers + spares)
        ]
        for keeper in self._keepers:
            keeper.start()
        try:
            for one, process in zip(self.runners, first, strict=True):
                one.process = process.result()
        except BaseException:
            self.close()
            raise

    def take(self) -> Future[WorkerProcess]:
        """Return a process as soon as one has nothing to do, or what the start of one raised."""
        taken = Future[WorkerProcess]()
        with self._changed:
            self._waiting.append(taken)
            self._settle(EngineError(STOPPED) if self._closed else None)
        return taken

    def take_spare(self) -> WorkerProcess | None:
        """Return a process that has nothing to do, or None if there is none now."""
        with self._changed:
            return self.ready.pop(0) if self.ready else None

    def close(self) -> None:
        """End all processes, which run no batches any more."""
        with self._changed:
            self._closed = True
            self._settle(EngineError(STOPPED))
            for process in self._processes:
                process.kill(CLOSED)
        for keeper in self._keepers:
            keeper.join()
        for runner in self.runners:
            runner.process = None  # Descriptors and memory are closed with the last reference.

    def _settle(self, failure: Exception | None = None) -> None:
        """Give processes to those who wait, or a failure if there is one; keepers look what is wanted now."""
        while self._waiting and self.ready:
            self._waiting.pop(0).set_result(self.ready.pop(0))
        while self._waiting and failure is not None:
            self._waiting.pop(0).set_exception(failure)
        self._changed.notify_all()

    # -- the keepers' threads ---------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._closed:
            try:
                self._run_process()
            except Exception as error:
                self._note_failure(error)

    def _run_process(self) -> None:
        """Start a process, give it away, and wait until it ends; raise why it does not start."""
        with self._changed:  # A spare starts when nobody waits.
            self._changed.wait_for(lambda: not self._waiting or self._starting < len(self._waiting))
            self._starting += 1
        package, states = self.snapshot.package()
        process = WorkerProcess(self._threads)
        with self._changed:
            self._processes.add(process)
            if self._closed:
                process.kill(CLOSED)
        try:
            process.start(package, states, self._batch_sizes)
            with self._changed:
                self._starting -= 1
                self.ready.append(process)
                self._settle()
            process.wait()
            if not (process.is_awaited or self._closed):
                _log.warning("worker process %d %s", process.pid, process.reason())
        finally:
            process.kill("because it does not start")
            process.wait()
            with self._changed:
                self._processes.remove(process)
                self.ready = [one for one in self.ready if one is not process]

    def _note_failure(self, error: Exception) -> None:
        """Tell those who wait why there is no process, and pause unless somebody waits for one again."""
        if not isinstance(error, EngineError):
            failure = EngineError(
                f"a worker process does not start: {failure_text(error)}; define what the engine needs in a "
                "module, or run threads: process=False"
            )
            failure.__cause__ = error
            error = failure
        with self._changed:
            self._starting -= 1
            if not (self._waiting or self._closed):
                _log.warning("no spare worker process, next try in %d s: %s", PAUSE_S, error)
            self._settle(error)
            self._changed.wait_for(lambda: self._closed or self._waiting, PAUSE_S)
