"""Preemptive: any policy, whose running batches may be interrupted between two blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from subnetact.errors import PolicyError
from subnetact.serving.scheduling.checks import check_margin, check_policy
from subnetact.serving.scheduling.context import Context, Policy, RunningBatch

__all__ = ["Preemptive"]


class Preemptive:
    """Lets urgent requests go first while all workers run batches, at most one block late.

    A block is one layer block of the engine, or several neighbouring ones that together take at most
    `block_ms`. A preempted batch is suspended between two blocks and continues afterwards, so no work is
    lost; a batch that takes at most `block_ms` as a whole is one block.

    The rule weighs requests that preemption saves against requests that it makes late. A request is urgent if
    it misses its deadline unless it runs before the next worker is free. The most accurate subnet that
    answers the urgent requests in time is chosen. A running batch gives way if the requests saved are more
    than `factor` times those of its own that become late.

    The batcher needs engines with `start(subnet, inputs, batch_size)`, such as `Engine`, in threads; worker
    processes are refused. The simulator needs the number of layer blocks (`blocks=`). A batch looks at the
    queue between two blocks only if a request has arrived, or its own end is expected later than before.

    Args:
        policy: decides in all other cases.
        factor: how many requests preemption has to save per request that it makes late; > 0.
        block_ms: neighbouring layer blocks are one block up to this time, ms, >= 0; a layer block that takes
            longer is a block of its own, and with 0 every layer block is. Long blocks cost less throughput,
            short ones let urgent requests go first sooner.

    Raises:
        PolicyError: an argument is out of range, or the policy preempts itself.

    Source:
        Shepherd (NSDI'23, section 4.2) for the rule on values; VELTAIR (ASPLOS'22, section 4) for blocks.

    Example:
        `Batcher(engine, policy=Preemptive(SlackFit(table, slo_ms=36.0)))`
    """

    def __init__(
        self,
        policy: Policy,
        factor: float = 1.0,
        block_ms: float = 1.5,
    ) -> None:
        check_policy(policy)
        if hasattr(policy, "preempt"):
            raise PolicyError(f"policy: {type(policy).__name__} preempts by itself; use it as it is")
        if not (math.isfinite(factor) and factor > 0):
            raise PolicyError(f"factor: {factor} must be finite and > 0")
        self.policy = policy
        self.table = policy.table
        self.factor = float(factor)
        self.block_ms = check_margin(block_ms, "block_ms")
        for name in ("slo_ms", "switch_ms"):
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))
        self._latency: list[list[float]] = self.table.latency_ms.tolist()
        self._fastest = self.table.fastest_ms
        accuracy = self.table.known_accuracy()
        self._by_accuracy = sorted(range(len(accuracy)), key=lambda i: (-accuracy[i], i))
        self._accuracy = accuracy
        self._sizes = self.table.batch_sizes
        self._pad = self.table.pad_index
        self._urgent: tuple[int, int] | None = None

    def decide(self, context: Context) -> tuple[int, int] | None:
        """Return what the policy decides, or right after `preempt` the urgent batch; see `Policy.decide`."""
        if self._urgent is not None:
            urgent, self._urgent = self._urgent, None
            return urgent
        return self.policy.decide(context)

    def reset(self) -> None:
        """Forget all state."""
        self._urgent = None
        reset: Any = getattr(self.policy, "reset", None)
        if reset is not None:
            reset()

    def retabled(self, table: Any) -> Preemptive:
        """Return the same policy for other latencies of the same subnets and batch sizes."""
        retabled: Any = getattr(self.policy, "retabled", None)
        policy = self.policy if retabled is None else retabled(table)
        return Preemptive(policy, self.factor, self.block_ms)

    def observe(self, subnet: int, batch_size: int, profiled_ms: float, measured_ms: float) -> None:
        """Pass the latency of a batch on to the policy, if it wants to know; see `Policy`."""
        observe: Any = getattr(self.policy, "observe", None)
        if observe is not None:
            observe(subnet, batch_size, profiled_ms, measured_ms)

    def block_length(self, layer_blocks: int, batch_ms: float) -> int:
        """Return how many layer blocks of a batch are one block, after which it looks at the queue.

        Args:
            layer_blocks: how many layer blocks the subnet has.
            batch_ms: expected latency of the batch, ms; 0 if it is not known.
        """
        if batch_ms <= 0 or self.block_ms * layer_blocks < batch_ms:
            return 1
        return min(layer_blocks, int(self.block_ms * layer_blocks / batch_ms))

    def calm_until(self, context: Context) -> float:
        """Return the time, ms, until which the next worker may be busy before `preempt` is asked.

        Args:
            context: the state of the server while no worker is idle.
        """
        return context.queue.deadline() - self._fastest

    def preempt(self, context: Context, running: Sequence[RunningBatch]) -> int | None:
        """Choose the running batch that gives way to the urgent requests of the queue.

        Args:
            context: the state of the server while no worker is idle.
            running: the batches that can be suspended; at least one.

        Returns:
            The worker whose batch is suspended, or None.
        """
        self._urgent = None
        now, queue = context.now_ms, context.queue
        next_free = max(now, min(context.free_at_ms))
        most = min(len(queue), self._sizes[-1])
        saved = 0
        while saved < most and queue.deadline(saved) < next_free + self._fastest:
            saved += 1
        while saved:
            floor = max(queue.floor(i) for i in range(saved)) if queue.demanding else 0.0
            found = self._subnet(saved, queue.deadline() - now, floor)
            if found is not None:
                subnet, takes = found
                victim = min(running, key=lambda batch: (_made_late(batch, takes), -batch.free_at_ms))
                if saved > self.factor * _made_late(victim, takes):
                    self._urgent = subnet, saved
                    return victim.worker
            saved //= 2
        return None

    def _subnet(self, count: int, within_ms: float, floor: float) -> tuple[int, float] | None:
        """Return the most accurate subnet that runs so many requests in time, and how long it takes."""
        column = self._pad[count]
        for subnet in self._by_accuracy:
            takes = self._latency[subnet][column]
            if self._accuracy[subnet] >= floor and takes <= within_ms:
                return subnet, takes
        return None


def _made_late(batch: RunningBatch, takes_ms: float) -> int:
    """Return how many requests of a batch miss their deadlines if it pauses for `takes_ms`."""
    late = batch.free_at_ms + takes_ms
    return sum(batch.free_at_ms <= deadline < late for deadline in batch.deadlines_ms)
