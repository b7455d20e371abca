"""Runners without a network, which stand in the place of an engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from virtual_time import VirtualTime

from subnetact.errors import InvalidRequest
from subnetact.latency.table import LatencyTable

__all__ = ["FOREVER", "TABLE", "Echo", "NeverDecides", "Ran", "Sleeping", "Timed", "batcher_threads"]

TABLE = LatencyTable(["a", "b"], [70.0, 80.0], [1, 4], [[1.0, 2.0], [3.0, 6.0]])
FOREVER = 1e7


class Echo:
    """Answers every input with itself, or, if it can be called, with what it returns.

    `entered` is released when a batch begins, which waits until `gate` is set, as it is at first; `ran` has
    (subnet, inputs, batch size) of every batch, and `threads` what each worker was told of its threads.
    """

    def __init__(self, table: LatencyTable = TABLE) -> None:
        self.table, self.keys = table, table.subnets
        self.ran: list[tuple[int, list[Any], int]] = []
        self.threads: list[int | None] = []
        self.gate, self.entered = threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def check(self, x: Any, finite: bool = False) -> None:
        """Refuse the input "refused", and NaN if only finite numbers are allowed."""
        if isinstance(x, str) and x == "refused":
            raise InvalidRequest("input: refused")
        if finite and x != x:
            raise InvalidRequest("input: not finite")

    def enter_worker(self, threads: int | None) -> None:
        self.threads.append(threads)

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Any:
        self.entered.release()
        assert self.gate.wait(60)
        self.ran.append((subnet, list(inputs), batch_size))
        return [x() if callable(x) else x for x in inputs]

    def held(self, batcher: Any, deadline_ms: float = FOREVER) -> Any:
        """Occupy the only worker until the gate is set, so that further requests wait in the queue."""
        self.gate.clear()
        future = batcher.submit("first", deadline_ms)
        assert self.entered.acquire(timeout=60)
        return future


class Timed(Echo):
    """Takes `factor` times the latency of its table on a clock of its own, whose time is `now`."""

    def __init__(self, table: LatencyTable = TABLE, factor: float = 1.0) -> None:
        super().__init__(table)
        self.now, self.factor = 0.0, factor

    def clock_ms(self) -> float:
        return self.now

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Any:
        outputs = super().run(subnet, inputs, batch_size)
        self.now += self.factor * float(self.table.latency_ms[subnet, self.table.pad_index[batch_size]])
        return outputs


class Ran(NamedTuple):
    """A batch of `Sleeping`, in ms of virtual time."""

    subnet: int
    inputs: list[Any]
    began_ms: float
    ended_ms: float


class Sleeping(Echo):
    """Takes `scale` times the latency of its table of virtual time, in `blocks` of equal length.

    An input that can be called is called with the number of blocks that have run, after each step. Between
    blocks, a look for what is more urgent takes `look_ms`. `finished` has all batches that ended.
    """

    def __init__(
        self,
        time: VirtualTime,
        table: LatencyTable = TABLE,
        scale: float = 1.0,
        look_ms: float = 0.0,
        blocks: int = 10,
    ) -> None:
        super().__init__(table)
        self.time, self.scale, self.look_ms, self.blocks = time, scale, look_ms, blocks
        self.finished: list[Ran] = []

    def run(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> Any:
        run = self.start(subnet, inputs, batch_size)
        run.step(self.blocks)
        return run.outputs()

    def start(self, subnet: int, inputs: Sequence[Any], batch_size: int) -> _SleepingRun:
        return _SleepingRun(self, subnet, list(inputs), batch_size)


class _SleepingRun:
    def __init__(self, runner: Sleeping, subnet: int, inputs: list[Any], size: int) -> None:
        self.runner, self.subnet, self.inputs = runner, subnet, inputs
        self.blocks, self.position, self.began_ms = runner.blocks, 0, runner.time.now
        takes_ms = float(runner.table.latency_ms[subnet, runner.table.pad_index[size]])
        self.block_ms = runner.scale * takes_ms / self.blocks

    def step(self, blocks: int = 1) -> bool:
        number = min(blocks, self.blocks - self.position)
        self.position += number
        look_ms = self.runner.look_ms * (self.position < self.blocks)
        self.runner.time.sleep(self.block_ms * number + look_ms)
        for x in self.inputs:
            if callable(x):
                x(self.position)
        return self.position == self.blocks

    def outputs(self) -> list[Any]:
        self.runner.finished.append(Ran(self.subnet, self.inputs, self.began_ms, self.runner.time.now))
        return self.inputs


class NeverDecides:
    """A policy that waits for more requests, whatever happens."""

    table = TABLE

    def decide(self, context: Any) -> None:
        """Return nothing."""


def batcher_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("subnetact-batcher")}
