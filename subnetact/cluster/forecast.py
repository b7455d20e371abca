"""What a replica holds and when it would answer one more request, from its last report and what was sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["ReplicaForecast", "ReplicaReport", "ranking", "work"]


RECENT = 0.2
"""Weight of the newest report in the rates."""
EQUAL = 2.0
"""Replicas count as equally fast if none needs more than this many times the time of another."""


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
        """Return the report that a replica sent as a dictionary, or None if there is no sensible one.

        Args:
            values: the dictionary that `_asdict` returned.
        """
        if not values or any(name not in values for name in cls._fields):
            return None
        report = cls(**{name: values[name] for name in cls._fields})
        counts: list[Any] = [report.received, report.finished]
        if not all(isinstance(count, Mapping) for count in counts):
            return None
        numbers = (*report[:6], *report.received.values(), *report.finished.values())
        return report if all(_is_amount(number) for number in numbers) else None


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and 0.0 <= value < math.inf


class ReplicaForecast:
    """Predicts what one replica holds, and when it would answer one more request.

    The sender knows exactly which of its own inputs have no answer yet. A report, which is old when it
    arrives, adds the inputs of other senders: it counts the inputs of every sender that the replica had
    received and finished by then. Other senders have the same old report and are drawn to the same replica;
    they are taken to have sent since then in the proportion of the last reports.

    Args:
        sender: name of the process that asks.

    Attributes:
        outstanding: inputs of this sender that were sent to the replica and have no answer yet.
    """

    def __init__(self, sender: str) -> None:
        self.outstanding = 0
        self._sender = sender
        self._report: ReplicaReport | None = None
        self._seen_ms = 0.0
        self._own_rate = self._rate = 0.0

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

    @property
    def reported(self) -> bool:
        """Whether the replica has reported, so that `finish_ms` is a time."""
        return self._report is not None

    @property
    def input_ms(self) -> float:
        """Shortest time that the replica needs per input, in ms; 0 if it has not reported."""
        return 0.0 if self._report is None else self._report.per_input_ms

    def held(self) -> float:
        """Return how many inputs the replica holds or will hold, as far as this sender knows."""
        report = self._report
        if report is None:
            return float(self.outstanding)
        own = report.received.get(self._sender, 0) - report.finished.get(self._sender, 0)
        others = max(0, report.queued + report.running - own)
        return self.outstanding + max(0.0, others + (self.outstanding - own) * (self.senders - 1.0))

    def finish_ms(self, now_ms: float, inputs: int = 1) -> float:
        """Return the time until one more request would be answered, in ms, if accuracy gives way.

        Without a report, the number of inputs stands for the time.

        Args:
            now_ms: the time by a monotonic clock, in ms.
            inputs: inputs of the request.
        """
        report = self._report
        if report is None:
            return self.held() + inputs
        free = max(0.0, report.free_ms - (now_ms - self._seen_ms))
        waiting = max(0.0, self.held() - report.running)
        return free + (waiting + inputs - 1) * report.per_input_ms + report.one_ms


def work(forecasts: Sequence[ReplicaForecast], inputs: int = 1) -> list[float]:
    """Return the work of each replica after one more request: the inputs it holds, by its speed.

    Neither the time at which a worker is free counts (a replica that reported that it is idle may be at work
    on what others have sent it since) nor small differences of speed: speeds are measured on few batches, and
    a replica that seems a little faster would get all requests of a burst.

    Args:
        forecasts: one per replica.
        inputs: inputs of the request.
    """
    fastest = min((forecast.input_ms for forecast in forecasts if forecast.reported), default=0.0)
    found = []
    for forecast in forecasts:
        slower = forecast.input_ms / fastest if fastest > 0.0 else 1.0
        found.append((forecast.held() + inputs) * (slower if slower > EQUAL else 1.0))
    return found


def ranking(entries: list[Any]) -> list[Any]:
    """Return the replicas: of two at random the one with less work, the other one, the rest by their work.

    One router that always takes the least work of all would keep every replica busy with small batches, and
    several routers, which have the same old reports, would choose the same replica.

    Args:
        entries: tuples that begin with the work and a random number per replica.
    """
    drawn = sorted(entries, key=lambda entry: entry[1])  # a random order
    return sorted(drawn[:2], key=lambda e: e[:2]) + sorted(drawn[2:], key=lambda e: e[:2])
