"""A batch on a worker. A batch that fails is split into parts, which run one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from subnetact.serving.live.requests import Request

__all__ = ["BatchJob", "is_out_of_memory"]


class BatchJob:
    """One batch that a worker was given. It has one part, unless that part raises and is split.

    Attributes:
        worker: number of the worker that runs the batch.
        subnet: id of the subnet.
        part: the requests that run now; empty when the job is done.
        size: the planned batch size of the part (a compiled engine pads to it).
        started_ms: start of the part on the batcher's clock, in ms. The first part starts at the decision.
        expected_ms: expected latency of the part, in ms.
        limit_ms: time on the same clock after which the worker is taken to hang, in ms.
        queued: number of requests that waited at the decision.
        slack_ms: time that was left at the decision until the deadline of the most urgent one, in ms.
        shape: position of the requests' input shape among the latency tables; -1 if there is one table.
        abandoned: whether the worker was replaced; the outputs that it still returns are discarded.
        beneath: the job that is suspended while this one runs; None if this one preempted no other.
        paused_ms: time that the current part was suspended, in ms.
        calm_ms: no request is urgent while the part is expected to end by this time, in ms, and no request
            arrives.
        suspended_ms: when the job was suspended last, in ms on the same clock.
        left_ms: how long the part was expected to run on at that time, in ms.
    """

    __slots__ = (
        "_todo",
        "abandoned",
        "beneath",
        "calm_ms",
        "expected_ms",
        "left_ms",
        "limit_ms",
        "part",
        "paused_ms",
        "queued",
        "shape",
        "size",
        "slack_ms",
        "started_ms",
        "subnet",
        "suspended_ms",
        "worker",
    )

    def __init__(
        self, worker: int, subnet: int, requests: list[Request], queued: int, slack_ms: float
    ) -> None:
        self.worker = worker
        self.subnet = subnet
        self.part = requests
        self.shape = requests[0].shape if requests else -1
        self.queued = queued
        self.slack_ms = slack_ms
        self._todo: list[list[Request]] = []
        self.size = 0
        self.started_ms = self.expected_ms = self.limit_ms = 0.0
        self.abandoned = False
        self.beneath: BatchJob | None = None
        self.calm_ms = -math.inf
        self.paused_ms = self.suspended_ms = self.left_ms = 0.0

    def split(self, requests: Sequence[Request], most: int) -> None:
        """Run requests again, in smaller parts.

        Args:
            requests: the requests of the part that failed.
            most: the largest number of requests per part.
        """
        parts = [list(requests[i : i + most]) for i in range(0, len(requests), most)]
        self._todo += reversed(parts)

    def advance(self) -> None:
        """Go on to the next part with a request that has no outcome yet."""
        self.part = []
        while self._todo and not self.part:
            self.part = [r for r in self._todo.pop() if r.open]

    def requests(self) -> list[Request]:
        """Return all requests of the job that have no outcome yet, without those of the suspended one."""
        return [r for part in (self.part, *reversed(self._todo)) for r in part if r.open]

    def on_worker(self) -> list[BatchJob]:
        """Return the job and, if it preempted one, the suspended job."""
        return [self] if self.beneath is None else [self, self.beneath]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that torch or Python ran out of memory; its class name tells.

    Args:
        error: what a runner raised.
    """
    return any(kind.__name__ in ("OutOfMemoryError", "MemoryError") for kind in type(error).__mro__)
