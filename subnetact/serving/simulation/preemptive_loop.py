"""The event loop for policies that preempt running batches."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from subnetact.errors import PolicyError
from subnetact.serving.policies.flex import RunningBatch
from subnetact.serving.scheduling.dispatch import Batch
from subnetact.serving.simulation.event_loop import EventLoop
from subnetact.serving.simulation.scenario import Scenario

__all__ = ["PreemptiveLoop"]


class PreemptiveLoop(EventLoop):
    """An event loop in which the policy may preempt a batch at every arrival while all workers are busy.

    Without `resume`, the requests of a preempted batch return to the queue and its work is lost. With
    `resume`, the batch is suspended. The first worker for which the queue is empty continues it from the
    end of its last complete block.

    Args:
        scenario: the input; its policy has a method `preempt`.
        rng: the source of the noise.
        resume: whether preempted batches are finished later.
        blocks: number of equal blocks of a batch.
        options: the other arguments of `EventLoop`.

    Raises:
        PolicyError: `blocks` is not a positive integer.
    """

    watches_arrivals = True

    def __init__(
        self, scenario: Scenario, *, rng: np.random.Generator, resume: bool, blocks: int, **options: Any
    ) -> None:
        super().__init__(scenario, rng=rng, **options)
        if isinstance(blocks, bool) or blocks < 1:
            raise PolicyError(f"blocks: {blocks!r} is not a positive integer")
        self._resume = resume
        self._blocks = blocks
        self._suspended: deque[tuple[Batch, float]] = deque()
        self._remaining: dict[int, float] = {}

    def serve(self) -> None:
        """Form batches for idle workers, then let the policy preempt."""
        super().serve()
        while self._suspended and self.idle:
            batch, remaining_ms = self._suspended.popleft()
            self.start(self.take_idle(), batch, remaining_ms)
        preempt: Any = self.scenario.policy.preempt  # type: ignore[attr-defined]
        queue, context = self.dispatcher.queue, self.dispatcher.context
        while len(queue) and not self.idle:
            running = [
                RunningBatch(
                    worker, run.batch.subnet, len(run.batch.items), run.start_ms, self.free_at[worker]
                )
                for worker, run in enumerate(self.running)
                if run is not None
            ]
            if not running:
                return
            self.dispatcher.look(self.now, running[0].worker)
            victim = preempt(context, running)
            if victim is None:
                return
            self._make_way(victim)

    def _make_way(self, victim: int) -> None:
        stopped = self.interrupt(victim)
        if stopped is None:
            raise PolicyError(f"preempt answered worker {victim}, which runs nothing")
        batch = self.dispatcher.next_batch(self.now, victim)
        if self._resume:
            whole = stopped.finish_ms - stopped.start_ms
            block = whole / self._blocks
            done = int((self.now - stopped.start_ms) / block) * block
            self._suspended.append((stopped.batch, whole - done))
        else:
            self.requeue(stopped.batch)
        if batch is not None:
            self.start(victim, batch)
        else:
            self.return_idle(victim)
