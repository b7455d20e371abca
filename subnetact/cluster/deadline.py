"""Deadlines between machines: absolute times, and the difference between two clocks within a bound."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from typing import NamedTuple

__all__ = ["ClockOffsets", "Deadline", "unix_ms"]

TOLERANCE_MS = 5.0
"""The fastest of the recent messages is taken to have travelled at most this long, in ms."""
RECENT = 64
SENDERS = 1024


def unix_ms() -> float:
    """Return the time of the machine's clock, in ms since 1970."""
    return time.time_ns() * 1e-6


class Deadline(NamedTuple):
    """The deadline of one request as it travels to another process.

    Attributes:
        sent_ms: time by the clock of the sender when the request was sent, in ms since 1970.
        due_ms: time by the same clock at which the answer is due.
    """

    sent_ms: float
    due_ms: float

    @classmethod
    def after(cls, left_ms: float) -> Deadline:
        """Return the deadline of a request that is sent now.

        Args:
            left_ms: time that the request has left, in ms.
        """
        now = unix_ms()
        return cls(now, now + left_ms)


class ClockOffsets:
    """Translates deadlines of other machines to the clock of this one.

    The time a message seems to have travelled is its true travel time plus the difference of the two clocks.
    The fastest of the last 64 messages of a sender shows this difference, up to its own travel time: if the
    fastest seems to arrive before it was sent, or more than 5 ms after, the clocks differ. What remains wrong
    is at most 5 ms if one of these messages travelled in less than that. A request never gets more time than
    it had when it was sent.

    Args:
        tolerance_ms: longest travel time that the fastest message is believed to have, in ms.
    """

    def __init__(self, tolerance_ms: float = TOLERANCE_MS) -> None:
        self._tolerance_ms = tolerance_ms
        self._travel: OrderedDict[str, deque[float]] = OrderedDict()

    def left_ms(self, sender: str, deadline: Deadline, now_ms: float | None = None) -> float:
        """Return how much time a request has left, in ms; at most 0 if its deadline has passed.

        Args:
            sender: name of the process that sent the request.
            deadline: its deadline.
            now_ms: the time by the clock of this machine. If None, the time now.
        """
        now = unix_ms() if now_ms is None else now_ms
        travelled = now - deadline.sent_ms
        recent = self._travel.get(sender)
        if recent is None:
            recent = self._travel[sender] = deque(maxlen=RECENT)
            if len(self._travel) > SENDERS:
                self._travel.popitem(last=False)
        else:
            self._travel.move_to_end(sender)
        recent.append(travelled)
        fastest = min(recent)
        offset = fastest if fastest < 0.0 else max(0.0, fastest - self._tolerance_ms)
        return (deadline.due_ms - deadline.sent_ms) - (travelled - offset)
