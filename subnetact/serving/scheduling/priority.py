"""Chooses which requests expire when not every deadline can be met: those of the lowest priority."""

from __future__ import annotations

import math
from heapq import heapify, heappush, heappushpop, heapreplace

from subnetact.serving.scheduling.queue import LOOK, EDFQueue


def unaffordable(
    queue: EDFQueue, now_ms: float, free_at_ms: list[float], full: tuple[float, int], fastest_ms: float
) -> list[int]:
    """Choose the requests that must expire so that requests of higher priority can meet their deadlines.

    The function assumes that the queue leaves in full batches of the cheapest subnet, in order of deadline;
    `full` is the latency of such a batch and its size.
    Whenever a request would have expired by the time its batch starts, the request of the lowest priority
    among those up to it is chosen (the algorithm of Moore and Hodgson for the fewest late jobs). If all of
    them have the same priority, none is chosen, because the policy decides between equals. Only the 1024
    most urgent requests are examined.
    """
    seats = [max(free, now_ms) for free in free_at_ms if free < math.inf]
    if not seats:
        return []
    heapify(seats)
    full_ms, full_size = full
    starts: list[float] = []

    def start_of(batch: int) -> float:
        while len(starts) <= batch:
            starts.append(seats[0])
            heapreplace(seats, seats[0] + full_ms)
        return starts[batch]

    heads = queue.deadlines(0, full_size)[: LOOK // full_size + 1]
    if all(deadline >= start_of(i) + fastest_ms for i, deadline in enumerate(heads)):
        return []
    kept: list[tuple[int, float, int]] = []
    chosen: list[int] = []
    for at, request in enumerate(queue.requests(0, LOOK)):
        mine = (request.rank, -request.deadline_ms, at)
        if request.deadline_ms >= start_of(len(kept) // full_size) + fastest_ms:
            heappush(kept, mine)
            continue
        if kept and kept[0][0] < mine[0]:
            chosen.append(heappushpop(kept, mine)[2])
        elif any(entry[0] > mine[0] for entry in kept):
            chosen.append(at)
        else:
            heappush(kept, mine)
    return sorted(chosen)
