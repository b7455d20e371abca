"""One batch on one worker: its parts, and how they are split when they fail."""

from __future__ import annotations

from collections.abc import Sequence

from subnetact.serving.live.requests import Request

__all__ = ["Job", "is_out_of_memory"]


class Job:
    """A batch that a worker was given. It runs part by part: one, unless a part raises and is split.

    Attributes:
        worker: who runs it.
        subnet: id of the subnet.
        part: what runs now; empty when the job is done.
        size: what that is padded to.
        started_ms: since when it runs; the first part counts from the decision.
        expected_ms: how long it should take.
        limit_ms: when the worker is taken to hang.
        queued: requests that waited at the decision.
        slack_ms: slack of the most urgent one then.
        first: whether no part has ended yet.
        abandoned: whether the worker was replaced; whatever it returns is discarded.
    """

    __slots__ = (
        "_todo",
        "abandoned",
        "expected_ms",
        "first",
        "limit_ms",
        "part",
        "queued",
        "size",
        "slack_ms",
        "started_ms",
        "subnet",
        "worker",
    )

    def __init__(
        self, worker: int, subnet: int, requests: list[Request], queued: int, slack_ms: float
    ) -> None:
        self.worker = worker
        self.subnet = subnet
        self.part = requests
        self.queued = queued
        self.slack_ms = slack_ms
        self._todo: list[list[Request]] = []
        self.size = 0
        self.started_ms = self.expected_ms = self.limit_ms = 0.0
        self.first = True
        self.abandoned = False

    def split(self, requests: Sequence[Request], most: int) -> None:
        """Run these later, `most` at a time."""
        parts = [list(requests[i : i + most]) for i in range(0, len(requests), most)]
        self._todo += reversed(parts)

    def advance(self) -> None:
        """Go on to the next part that somebody still waits for."""
        self.first = False
        self.part = []
        while self._todo and not self.part:
            self.part = [r for r in self._todo.pop() if r.open]

    def requests(self) -> list[Request]:
        """All that have no outcome yet."""
        return [r for part in (self.part, *reversed(self._todo)) for r in part if r.open]


def is_out_of_memory(error: BaseException) -> bool:
    """Tell by the names of its classes whether torch or Python ran out of memory."""
    return any(kind.__name__ in ("OutOfMemoryError", "MemoryError") for kind in type(error).__mro__)
