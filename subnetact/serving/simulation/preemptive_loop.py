"""The event loop for policies that preempt running batches."""

from __future__ import annotations

from typing import Any

from subnetact.errors import PolicyError
from subnetact.serving.simulation.event_loop import EventLoop

__all__ = ["PreemptiveLoop"]


class PreemptiveLoop(EventLoop):
    """An event loop in which the policy may preempt a batch at every arrival while all workers are busy.

    The requests of a preempted batch return to the queue, and its work is lost. `BlockLoop` keeps it.

    Args:
        scenario: the input; its policy has a method `preempt`.
        options: the other arguments of `EventLoop`.
    """

    watches_arrivals = True

    def serve(self) -> None:
        """Form batches for idle workers, then let the policy preempt."""
        super().serve()
        preempt: Any = self.scenario.policy.preempt  # type: ignore[attr-defined]
        queue, context = self.dispatcher.queue, self.dispatcher.context
        while len(queue) and not self.idle:
            running = self.running_batches()
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
        self.requeue(stopped.batch)
        if batch is not None:
            self.start(victim, batch)
        else:
            self.return_idle(victim)
