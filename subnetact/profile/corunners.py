"""Co-runners: processes that run a network on the device while latencies are measured.

Source: VELTAIR (ASPLOS'22, section 3) schedules by how much co-located layers slow each other down.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from subnetact.device import synchronize
from subnetact.errors import DeviceError
from subnetact.supernet.batches import call_with

STARTS_WITHIN_S = 120.0


class CoRunners:
    """Processes that run a network while the context lasts; `run(n)` lets the first n of them work."""

    def __init__(self, network: nn.Module, x: Any, count: int) -> None:
        spawn: Any = torch.multiprocessing.get_context("spawn")
        # For every process its turn, a lock that it holds while it runs, and the number of its passes.
        self._shared = [(spawn.Event(), spawn.Lock(), spawn.Value("q", 0)) for _ in range(count)]
        self._running = 0
        here = os.getpid(), torch.get_num_threads()
        arguments = [(network, x, *shared, *here) for shared in self._shared]
        self._processes = [spawn.Process(target=_work, args=args, daemon=True) for args in arguments]

    def __enter__(self) -> CoRunners:
        try:
            for process in self._processes:
                process.start()
            self.run(len(self._processes))
            self.run(0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.pid is not None:
                process.terminate()
                process.join()

    @property
    def passes(self) -> tuple[int, ...]:
        """The number of forward passes that each process has finished so far."""
        return tuple(int(passes.value) for _, _, passes in self._shared)

    def run(self, count: int) -> None:
        """Let the first processes run and the others pause; return once they do."""
        self.check()
        if count == self._running:
            return
        self._running = count
        for i, (turn, _, _) in enumerate(self._shared):
            turn.set() if i < count else turn.clear()
        before = self.passes
        self._wait(lambda: all(self.passes[i] >= before[i] + 2 for i in range(count)))
        for _, busy, _ in self._shared[count:]:
            self._wait(lambda busy=busy: busy.acquire(timeout=0.05))  # type: ignore[misc]
            busy.release()

    def _wait(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + STARTS_WITHIN_S
        while not done():
            self.check()
            if time.monotonic() > end:
                raise DeviceError(f"co-runners did not follow within {STARTS_WITHIN_S:g} s; use fewer")
            time.sleep(0.005)

    def check(self) -> None:
        """Raise DeviceError if a process has ended."""
        for i, process in enumerate(self._processes):
            if not process.is_alive():
                raise DeviceError(
                    f"co-runner {i + 1} of {len(self._processes)} ended with status {process.exitcode}; "
                    "its own message is above; use fewer, or a smaller subnet"
                )


def _work(network: nn.Module, x: Any, turn: Any, busy: Any, passes: Any, parent: int, threads: int) -> None:
    # A terminal sends SIGINT to every process; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    network = copy.deepcopy(network)  # parameters that are sent to a process share memory with the sender
    with torch.inference_mode():
        device = next(network.parameters()).device
        while os.getppid() == parent:
            with busy:
                if turn.is_set():
                    call_with(network, x)
                    synchronize(device)
                    passes.value += 1
            turn.wait(0.2)
