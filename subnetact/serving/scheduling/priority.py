"""Whom to give up when not every deadline can be met: the requests of lowest priority."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapify, heappush, heappushpop, heapreplace
from typing import Any

from subnetact.serving.scheduling.queue import EDFQueue

__all__ = ["unaffordable"]

_LOOK = 1024


def unaffordable(
    queue: EDFQueue[Any],
    now_ms: float,
    free_at_ms: list[float],
    full_ms: float,
    full_size: int,
    fastest_ms: float,
    priority: Callable[[Any], int],
) -> list[int]:
    """Positions in the queue, ascending, to give up so that those of higher priority can still be met.

    The queue leaves in full batches of the cheapest subnet, in order of deadline. Where a request would be
    hopeless by the time its batch starts, the one of lowest priority up to there is given up
    (Moore-Hodgson). Among equals nobody is: that is the policy's business. Looks at the 1024 most urgent.

    Args:
        queue: what waits.
        now_ms: the time.
        free_at_ms: when each worker is free; inf for one that is down.
        full_ms: latency of a full batch of the cheapest subnet.
        full_size: its size.
        fastest_ms: the least latency of any option.
        priority: of an item; higher is more important.
    """
    seats = [max(free, now_ms) for free in free_at_ms if free < math.inf]
    if not seats:
        return []
    heapify(seats)
    starts: list[float] = []

    def start_of(batch: int) -> float:
        while len(starts) <= batch:
            starts.append(seats[0])
            heapreplace(seats, seats[0] + full_ms)
        return starts[batch]

    heads = queue.deadlines(0, full_size)[: _LOOK // full_size + 1]
    if all(deadline >= start_of(i) + fastest_ms for i, deadline in enumerate(heads)):
        return []
    kept: list[tuple[int, float, int]] = []
    given_up: list[int] = []
    for at, (deadline, item) in enumerate(queue.entries(_LOOK)):
        mine = (priority(item), -deadline, at)
        if deadline >= start_of(len(kept) // full_size) + fastest_ms:
            heappush(kept, mine)
            continue
        if kept and kept[0][0] < mine[0]:
            given_up.append(heappushpop(kept, mine)[2])
        elif any(entry[0] > mine[0] for entry in kept):
            given_up.append(at)
        else:
            heappush(kept, mine)
    return sorted(given_up)
