"""The event loop for policies that preempt running batches between two layer blocks."""

from __future__ import annotations

import math
from heapq import heapify, heappush
from typing import Any, NamedTuple

import numpy as np

from subnetact.serving.scheduling.checks import check_count, check_margin
from subnetact.serving.scheduling.dispatch import Batch
from subnetact.serving.simulation.event_loop import EventLoop, Running
from subnetact.serving.simulation.scenario import Scenario

__all__ = ["BlockLoop"]


class _Suspended(NamedTuple):
    """A suspended batch.

    Attributes:
        running: the batch as it ran before.
        left_ms: how long it still runs, ms.
    """

    running: Running
    left_ms: float


class BlockLoop(EventLoop):
    """An event loop in which a batch consists of equal layer blocks and may be suspended between blocks.

    At the end of a block, if requests wait and no worker is idle, the policy may let the worker run another
    batch first. The suspended batch continues on the same worker as soon as that batch ends. The live
    batcher does the same with engines that run in blocks.

    Args:
        scenario: the input; its policy has a method `preempt`.
        rng: the source of the noise.
        blocks: number of layer blocks of a batch.
        look_ms: time that a batch loses between two blocks, ms.
        options: the other arguments of `EventLoop`.

    Raises:
        PolicyError: `blocks` is not a positive integer, or `look_ms` is out of range.
    """

    watches_arrivals = True

    def __init__(
        self, scenario: Scenario, *, rng: np.random.Generator, blocks: int, look_ms: float, **options: Any
    ) -> None:
        super().__init__(scenario, rng=rng, **options)
        self._blocks = check_count(blocks, "blocks")
        self._look_ms = check_margin(look_ms, "look_ms")
        self._block_ms: dict[int, float] = {}
        self._suspended: dict[int, _Suspended] = {}
        self._at_end_of_block: list[int] = []

    def start(
        self, worker: int, batch: Batch, remaining_ms: float | None = None, lost_ms: float = 0.0
    ) -> None:
        """Start or continue a batch, and note when its first block ends."""
        if worker in self._suspended:  # an urgent batch, which is not interrupted itself
            super().start(worker, batch, remaining_ms, lost_ms)
            self.free_at[worker] += self._suspended[worker].left_ms
            return
        if remaining_ms is not None:
            super().start(worker, batch, remaining_ms, lost_ms)
            return
        length: Any = getattr(self.scenario.policy, "block_length", None)
        each = 1 if length is None else max(1, int(length(self._blocks, batch.expected_ms)))
        lost_ms += self._look_ms * (math.ceil(self._blocks / each) - 1)
        super().start(worker, batch, None, lost_ms)
        running = self.running[worker]
        if running is not None:
            self._block_ms[worker] = (running.finish_ms - running.start_ms) * each / self._blocks
            self._next_block(worker, running.serial)

    def _go_on(self, worker: int, suspended: _Suspended) -> None:
        """Continue a batch that was suspended."""
        before = suspended.running
        self.start(worker, before.batch, suspended.left_ms)
        running = self.running[worker]
        if running is not None:
            began = before.start_ms if before.began_ms is None else before.began_ms
            self.running[worker] = running._replace(began_ms=began, ran_ms=before.ran_ms)
            self._next_block(worker, running.serial)

    def _next_block(self, worker: int, serial: int) -> None:
        running = self.running[worker]
        end = self.now + self._block_ms[worker]
        if running is not None and end < running.finish_ms - 1e-9:
            heappush(self.busy, (end, worker, -serial))

    def _complete(self, finish: float, worker: int, serial: int) -> None:
        if serial > 0:
            running = self.running[worker]
            ended = running is not None and running.serial == serial
            super()._complete(finish, worker, serial)
            if ended and worker in self._suspended:
                self.idle.remove(worker)
                heapify(self.idle)
                self._go_on(worker, self._suspended.pop(worker))
            return
        running = self.running[worker]
        if running is not None and running.serial == -serial:
            self._at_end_of_block.append(worker)

    def serve(self) -> None:
        """Form batches for idle workers, then let the policy preempt batches whose block has ended."""
        super().serve()
        ended, self._at_end_of_block = self._at_end_of_block, []
        for worker in ended:
            running = self.running[worker]
            if running is None:
                continue
            if not (len(self.dispatcher.queue) and not self.idle and self._gives_way(worker)):
                self._next_block(worker, running.serial)

    def _gives_way(self, worker: int) -> bool:
        preempt: Any = self.scenario.policy.preempt  # type: ignore[attr-defined]
        dispatcher = self.dispatcher
        if dispatcher.expired != "serve":
            dispatcher.remove_expired(self.now)
        if not len(dispatcher.queue):
            return False
        batches = self.running_batches(without=self._suspended)
        if preempt(dispatcher.look(self.now, worker), batches) != worker:
            return False
        urgent = dispatcher.next_batch(self.now, worker)
        stopped = None if urgent is None else self.interrupt(worker)
        if urgent is None or stopped is None:
            return False
        ran_ms = stopped.ran_ms + self.now - stopped.start_ms
        self._suspended[worker] = _Suspended(stopped._replace(ran_ms=ran_ms), stopped.finish_ms - self.now)
        self.start(worker, urgent)
        return True

    def _worker_event(self, event: Any) -> None:
        if not event.up and event.worker in self._suspended and event.worker not in self._down:
            self.requeue(self._suspended.pop(event.worker).running.batch)
        super()._worker_event(event)
        if math.isinf(self.free_at[event.worker]):
            self._block_ms.pop(event.worker, None)
