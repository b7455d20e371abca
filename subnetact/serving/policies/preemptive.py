"""Preemptive: any policy, whose running batches may be interrupted between two blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from subnetact.errors import PolicyError
from subnetact.serving.policies.fronts import Fronts
from subnetact.serving.scheduling.checks import check_margin, check_policy
from subnetact.serving.scheduling.context import Context, Policy
from subnetact.serving.scheduling.request import Job


class Preemptive:
    """Lets urgent requests go first while all workers run batches, at most one block late.

    A block is one layer block of the engine, or several neighbouring ones that together take at most
    `block_ms`. A preempted batch is suspended between two blocks and continues afterwards, so no work is
    lost; a batch that takes at most `block_ms` as a whole is one block.

    The rule weighs requests that preemption saves against requests that it makes late. A request is urgent if
    it misses its deadline unless it runs before the next worker is free. The most accurate subnet that
    answers the urgent requests in time is chosen. A running batch gives way if more requests are saved than
    become late in it.

    The batcher needs engines with `start(subnet, inputs, batch_size)`, such as `Engine`, in threads; worker
    processes are refused. The simulator needs the number of layer blocks (`blocks=`).

    Args:
        policy: decides in all other cases.
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

    def __init__(self, policy: Policy, block_ms: float = 1.5) -> None:
        check_policy(policy)
        if hasattr(policy, "preempt"):
            raise PolicyError(f"policy: {type(policy).__name__} preempts by itself; use it as it is")
        self.policy = policy
        self.table = policy.table
        self.block_ms = check_margin(block_ms, "block_ms")
        for name in ("slo_ms", "switch_ms", "observe"):
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))
        self._fastest = self.table.fastest_ms
        self._fronts = Fronts(self.table)
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
        getattr(self.policy, "reset", lambda: None)()

    def retabled(self, table: Any) -> Preemptive:
        """Return the same policy for other latencies of the same subnets and batch sizes."""
        retabled: Any = getattr(self.policy, "retabled", lambda _: self.policy)
        return Preemptive(retabled(table), self.block_ms)

    def block_length(self, layer_blocks: int, batch_ms: float) -> int:
        """Return how many of a subnet's layer blocks are one block of a batch that should take `batch_ms`.

        After each block the batch looks at the queue. If the time is not known, `batch_ms` is 0.
        """
        if batch_ms <= 0 or self.block_ms * layer_blocks < batch_ms:
            return 1
        return min(layer_blocks, int(self.block_ms * layer_blocks / batch_ms))

    def preempt(self, context: Context, running: Sequence[Job]) -> int | None:
        """Choose the running batch that gives way to the urgent requests of the queue.

        Args:
            context: the state of the server while no worker is idle.
            running: the batches that can be suspended; at least one. They end at `context.free_at_ms`.

        Returns:
            The worker whose batch is suspended, or None.
        """
        self._urgent = None
        now, queue, free_at_ms = context.now_ms, context.queue, context.free_at_ms
        next_free = max(now, min(free_at_ms))
        most = min(len(queue), self._fronts.sizes[-1])
        saved = bisect_left(range(most), next_free + self._fastest, key=queue.deadline)
        while saved:
            floor = max(queue.floor(i) for i in range(saved)) if queue.demanding else 0.0
            column = self._fronts.column_for(saved)
            found = self._fronts.most_accurate(column, queue.deadline() - now, floor)
            if found is not None:
                ends = [(job, free_at_ms[job.worker]) for job in running]
                costs = [(job.made_late(ms, found.latency_ms), -ms, job.worker) for job, ms in ends]
                late, _, worker = min(costs)
                if saved > late:
                    if worker == context.worker:  # otherwise nobody is suspended until that worker asks
                        self._urgent = found.subnet, saved
                    return worker
            saved //= 2
        return None
