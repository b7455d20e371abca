"""What a client asks for (`Ask`), an accepted request (`Request`), and the requests on a worker (`Job`).

A new field of requests is three edits: in `Batcher.submit`, in `Ask` with its check, and where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from subnetact.errors import InvalidRequest
from subnetact.serving.scheduling.checks import check_deadline, check_request_number
from subnetact.serving.scheduling.floors import NO_FLOOR, Floors

BEYOND_SHARE = 2**64
"""More than priorities differ by."""
_new = tuple.__new__  # takes half the time of calling a named tuple's class


class Ask(NamedTuple):
    """What one request asks for, checked.

    Attributes:
        deadline_ms: time that the request is given, in ms.
        floor: accuracy of the least accurate subnet that may answer, in percent; 0 accepts every subnet.
        priority: the higher, the more important.
        client: name of the client.
    """

    deadline_ms: float
    floor: float = NO_FLOOR
    priority: int = 0
    client: str = ""


def checked_ask(
    floors: Floors, deadline_ms: object, min_accuracy: float | None, priority: int | None, client: str
) -> Ask:
    """Return what a client asks for, see `Batcher.submit`; InvalidRequest if a value cannot be."""
    time_ms, floor = check_deadline(deadline_ms), NO_FLOOR
    if min_accuracy is not None:
        asked = check_request_number(min_accuracy, "min_accuracy", "give a percentage")
        if not asked <= floors.best:
            raise floors.unreachable(asked, InvalidRequest)
        floor = floors(asked)
    if priority is not None and type(priority) is not int:
        raise InvalidRequest(f"priority: {priority!r} is not an int; the higher, the more important")
    if priority is not None and not -(2**63) <= priority < 2**63:
        raise InvalidRequest("priority: the number has more than 64 bits; give a smaller one")
    if not isinstance(client, str):
        raise InvalidRequest(f"client: {client!r} is no name; give a string")
    return _new(Ask, (time_ms, floor, priority or 0, client))


class Request:
    """One accepted input.

    Attributes:
        ask: what its client asks for.
        x: the input. It is None once the request has its outcome.
        accepted_ms: time of the submission, in ms.
        deadline_ms: time by which the answer is due, in ms.
        future: where the outcome goes: an `AnswerFuture`, or the future of an event loop.
        loop: the event loop of `future`. If None, `future` is an `AnswerFuture`.
        open: whether the request has no outcome yet. The scheduler sets it to False exactly once.
        retried: whether a worker has hung or died with this request before.
        shape: position of the input's shape among the latency tables; -1 if there is one table.
        rank: its priority, or less than all priorities if it is beyond the share of its client.
    """

    future: Any = None
    loop: Any = None
    open = True
    retried = False
    shape = -1

    def __init__(self, ask: Ask, accepted_ms: float, x: Any = None) -> None:
        self.ask = ask
        self.rank = ask.priority
        self.accepted_ms = accepted_ms
        self.deadline_ms = accepted_ms + ask.deadline_ms
        self.x = x


class Job:
    """One batch on a worker. It runs in one step or in several, between which another job may go first.

    A job has one part, unless that part raises and is split into parts, which run one after the other.

    Attributes:
        worker: number of the worker that runs the batch.
        subnet: id of the subnet.
        part: the requests that run now, the most urgent first; empty when the job is done.
        size: the planned batch size of the part (a compiled engine pads to it).
        started_ms: start of the part, in ms. The first part starts at the decision.
        expected_ms: expected latency of the part, in ms.
        limit_ms: time after which the worker is taken to hang, in ms.
        queued: number of requests that waited at the decision.
        slack_ms: time that was left at the decision until the deadline of the most urgent one, in ms.
        shape: position of the requests' input shape among the latency tables; -1 if there is one table.
        abandoned: whether the worker was replaced; the outputs that it still returns are discarded.
        preempted: the job that is suspended while this one runs; None if this one preempted no other.
        paused_ms: time that the current part was suspended, in ms.
        suspended_ms: when the job was suspended last, in ms.
        left_ms: how long the part was expected to run on at that time, in ms.
    """

    def __init__(self, worker: int, subnet: int, part: list[Request], queued: int, slack_ms: float) -> None:
        self.worker = worker
        self.subnet = subnet
        self.part = part
        self.shape = part[0].shape if part else -1
        self.queued = queued
        self.slack_ms = slack_ms
        self.size = 0
        self.started_ms = self.expected_ms = self.limit_ms = 0.0
        self.abandoned = False
        self.preempted: Job | None = None
        self.paused_ms = self.suspended_ms = self.left_ms = 0.0
        self._todo: list[list[Request]] = []

    def split(self, requests: Sequence[Request], most: int) -> None:
        """Run requests of the part that failed again, in parts of at most `most`."""
        self._todo += reversed([list(requests[i : i + most]) for i in range(0, len(requests), most)])

    def advance(self) -> None:
        """Go on to the next part with a request that has no outcome yet."""
        self.part = []
        while self._todo and not self.part:
            self.part = [r for r in self._todo.pop() if r.open]

    def requests(self) -> list[Request]:
        """Return all requests of the job that have no outcome yet, without those of the suspended one."""
        return [r for part in (self.part, *reversed(self._todo)) for r in part if r.open]

    def on_worker(self) -> list[Job]:
        """Return the job and, if it preempted one, the suspended job."""
        return [self] if self.preempted is None else [self, self.preempted]

    def made_late(self, ends_ms: float, pause_ms: float) -> int:
        """Return how many requests of the part miss their deadlines if it ends so much later."""
        return sum(ends_ms <= r.deadline_ms < ends_ms + pause_ms for r in self.part if r.open)
