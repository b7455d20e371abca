"""When a replica would answer one more request, from its last report and from what was sent to it since."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["ReplicaForecast", "ReplicaReport", "ranking"]


RECENT = 0.2
"""Weight of the newest report in the rates."""
QUIET_MS = 1000.0
"""After so long without requests and with an idle replica, both sides have counted the same inputs."""


class ReplicaReport(NamedTuple):
    """What a replica says of itself several times per second.

    Attributes:
        number: counts the reports of the replica.
        queued: inputs that wait.
        running: inputs that workers run.
        free_ms: time until a worker is expected to be free, in ms; 0 if one is idle.
        per_input_ms: shortest time per input with full batches, in ms, all workers together; learned.
        one_ms: shortest latency of a batch of one input, in ms; learned.
        received: inputs received so far per sender.
        finished: inputs answered or refused so far per sender.
    """

    number: int
    queued: int
    running: int
    free_ms: float
    per_input_ms: float
    one_ms: float
    received: Mapping[str, int]
    finished: Mapping[str, int]

    @classmethod
    def read(cls, values: Mapping[str, Any] | None) -> ReplicaReport | None:
        """Return the report that a replica sent as a dictionary, or None if it has sent none.

        Args:
            values: the dictionary that `_asdict` returned.
        """
        if not values or any(name not in values for name in cls._fields):
            return None
        return cls(**{name: values[name] for name in cls._fields})


class ReplicaForecast:
    """Predicts when one replica would answer one more request.

    A report is old when it arrives. It counts the inputs of every sender that the replica had received and
    finished by then, so the sender knows which of its own inputs the report does not contain, without
    comparing clocks. Other senders have the same old report and are drawn to the same replica; they are
    taken to have sent since then in the proportion of the last reports.

    Args:
        sender: name of the process that asks.
    """

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._report: ReplicaReport | None = None
        self._seen_ms = 0.0
        self._changed_ms = -math.inf
        self._sent = 0
        self._completed = 0
        self._chosen = 0
        self._own_rate = self._rate = 0.0

    @property
    def outstanding(self) -> int:
        """Inputs that this sender has sent and that have no answer yet."""
        return self._sent - self._completed

    def learn(self, report: ReplicaReport | None, now_ms: float) -> None:
        """Take a report into account; a report that is known already changes nothing.

        Args:
            report: the newest report.
            now_ms: the time by a monotonic clock, in ms.
        """
        if report is None or (self._report is not None and report.number == self._report.number):
            return
        if self._report is not None:
            self._learn_shares(self._report, report)
        self._report, self._seen_ms = report, now_ms
        idle = not (report.queued or report.running or self.outstanding)
        if idle and now_ms - self._changed_ms > QUIET_MS:  # forget inputs that were lost on the way
            self._sent = report.received.get(self._sender, 0)
            self._completed = report.finished.get(self._sender, 0)

    def _learn_shares(self, old: ReplicaReport, new: ReplicaReport) -> None:
        own = new.received.get(self._sender, 0) - old.received.get(self._sender, 0)
        every = sum(new.received.values()) - sum(old.received.values())
        if every > 0:
            self._own_rate += RECENT * (own - self._own_rate)
            self._rate += RECENT * (every - self._rate)

    @property
    def senders(self) -> float:
        """How many inputs all senders together send while this one sends one, from 1 to 100."""
        return min(max(1.0, self._rate / self._own_rate), 100.0) if self._own_rate > 0 else 1.0

    def chosen(self, inputs: int) -> None:
        """Count inputs for which the replica was chosen and which it has not accepted yet.

        Args:
            inputs: their number; negative when they were accepted or went elsewhere.
        """
        self._chosen += inputs

    def sent(self, inputs: int, now_ms: float) -> None:
        """Count inputs that the replica accepted.

        Args:
            inputs: their number.
            now_ms: the time by a monotonic clock, in ms.
        """
        self._sent += inputs
        self._changed_ms = now_ms

    def completed(self, inputs: int, now_ms: float) -> None:
        """Count inputs that the replica answered, or that were lost with it.

        Args:
            inputs: their number.
            now_ms: the time by a monotonic clock, in ms.
        """
        self._completed = min(self._completed + inputs, self._sent)
        self._changed_ms = now_ms

    def waiting(self) -> float:
        """Return how many inputs wait at the replica or are on their way, as far as this sender knows."""
        report = self._report
        if report is None:
            return float(self.outstanding + self._chosen)
        unseen = min(max(0, self._sent - report.received.get(self._sender, 0)), self.outstanding)
        done_since = max(0, self._completed - report.finished.get(self._sender, 0))
        return max(0.0, report.queued + unseen - max(0, done_since - report.running)) + self._chosen

    def finish_ms(self, now_ms: float, inputs: int = 1) -> float:
        """Return the time until one more request would be answered, in ms, if accuracy gives way.

        Without a report, the number of inputs that wait stands for the time.

        Args:
            now_ms: the time by a monotonic clock, in ms.
            inputs: inputs of the request.
        """
        report = self._report
        if report is None:
            return self.waiting() + inputs
        free = max(0.0, report.free_ms - (now_ms - self._seen_ms))
        return free + (self.waiting() + inputs - 1) * report.per_input_ms + report.one_ms

    def rank_ms(self, now_ms: float, inputs: int = 1) -> float:
        """Return the time by which replicas are ranked, in ms: the work that a replica holds.

        When a worker is free does not count: a replica that reported that it is idle may be at work on what
        others have sent it since.

        Args:
            now_ms: the time by a monotonic clock, in ms.
            inputs: inputs of the request.
        """
        report = self._report
        if report is None:
            return self.finish_ms(now_ms, inputs)
        own = self._sent - report.received.get(self._sender, 0)
        unseen = min(max(0, own), self.outstanding) + self._chosen
        done = max(0, self._completed - report.finished.get(self._sender, 0))
        held = max(0.0, report.queued + report.running + (unseen - done) * self.senders)
        return (held + inputs - 1) * report.per_input_ms + report.one_ms

    @property
    def reported(self) -> bool:
        """Whether the replica has reported, so that `finish_ms` is a time."""
        return self._report is not None


def ranking(entries: list[Any], senders: float) -> list[Any]:
    """Return the replicas in order of their rank; of n senders each looks at a random n-th of them first.

    Args:
        entries: tuples that begin with the rank and a random number per replica.
        senders: how many inputs all senders together send while this one sends one.
    """
    first = max(2, round(len(entries) / senders))
    drawn = sorted(entries, key=lambda entry: entry[1])  # a random order
    return sorted(drawn[:first], key=lambda e: e[:2]) + sorted(drawn[first:], key=lambda e: e[:2])
