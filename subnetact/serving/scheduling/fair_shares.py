"""Fair shares of the workers' time between clients: whose requests expire first if not all can be in time.

Without shares the most urgent request runs first, whoever sent it: a client that sends more than the workers
can do makes others miss their deadlines, too. With shares every client has a bucket of worker time, in ms,
from which a request takes what it costs. The buckets fill up at the rate at which the workers work, split by
the clients' weights. A request for which too little is left in its client's bucket is beyond the share. It
waits and runs like all others; only if not all deadlines can be met, it expires before every request within a
share, as one of a lower priority does (`priority`). So no worker idles while a request waits.

The shares are those of generalised processor sharing (Parekh and Gallager, 1993), which start-time fair
queueing (Goyal et al., 1996) follows with one number per client: the virtual time at which the client's
bucket is full again. Virtual time runs at the rate of the workers divided by the weights of all clients whose
bucket is not full.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from subnetact.errors import PolicyError
from subnetact.serving.scheduling.checks import check_time

SLOWNESS = 2.0
"""With shares, batches and requests count this many times the time of full batches of the cheapest subnet:
real ones are smaller, or of other subnets. So one part in so many of what workers can do is guaranteed."""


@dataclass(frozen=True)
class FairShares:
    """How the workers' time is shared between clients.

    Attributes:
        burst_ms: worker time that a client of weight 1 may take at once, in ms. If None, half the
            SLO of every worker.
        weights: weight per client; a client of weight 2 is guaranteed twice the time of one of weight 1, as
            all have that are not named.

    Raises:
        PolicyError: a number is not finite and > 0, or a weight is beyond 1e-6 to 1e6.
    """

    burst_ms: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weights: Any = self.weights
        if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
            raise PolicyError(f"weights: {weights!r} must be a dictionary from names of clients to numbers")
        for name, weight in weights.items():
            if not 1e-6 <= check_time(weight, f"weight of {name!r}") <= 1e6:
                raise PolicyError(f"weight of {name!r}: {weight} must be from 1e-6 to 1e6, to sum exactly")
        if self.burst_ms is not None:
            check_time(self.burst_ms, "burst_ms")


class ShareMeter:
    """Tells requests within their client's share from those beyond it. The owner of the queue locks."""

    def __init__(self, shares: FairShares, slo_ms: float, free_at_ms: list[float]) -> None:
        self._shares, self._free_at_ms = shares, free_at_ms
        self._burst_ms = shares.burst_ms or len(free_at_ms) * slo_ms / 2
        self._full_at: dict[str, float] = {}  # in virtual time, of every bucket that is not full
        self._filling: list[tuple[float, str]] = []  # the same, or earlier
        self._weight = self._virtual = 0.0
        self._now_ms = -math.inf

    def has_left(self, client: str, cost_ms: float) -> bool:
        """Return whether so much is left in a bucket; what costs more than a full one takes a full one."""
        missing = self._full_at.get(client, 0.0) - self._virtual
        return missing <= 0.0 or missing + cost_ms / self._weight_of(client) <= self._burst_ms

    def take(self, client: str, cost_ms: float, now_ms: float) -> bool:
        """Take worker time from the bucket of a client, if so much is left; return whether it was."""
        self._advance(now_ms)
        if not self.has_left(client, cost_ms):
            return False
        full_at = self._full_at.get(client, self._virtual) + cost_ms / self._weight_of(client)
        if client not in self._full_at:
            self._weight += self._weight_of(client)
            heapq.heappush(self._filling, (full_at, client))
        self._full_at[client] = full_at
        return True

    def _weight_of(self, client: str) -> float:
        return self._shares.weights.get(client, 1.0)

    def _advance(self, now_ms: float) -> None:
        """Let virtual time pass: every bucket that is not full fills up by its weight."""
        worked_ms = 0.0
        if now_ms > self._now_ms > -math.inf:
            worked_ms = (now_ms - self._now_ms) * sum(ms < math.inf for ms in self._free_at_ms)
        self._now_ms = max(now_ms, self._now_ms)
        while self._filling:
            full_at, client = self._filling[0]
            needed_ms = (full_at - self._virtual) * self._weight
            if needed_ms > worked_ms:
                self._virtual += worked_ms / self._weight
                return
            worked_ms -= max(needed_ms, 0.0)
            self._virtual = max(self._virtual, full_at)
            if self._full_at[client] > self._virtual:  # more was taken since the entry was made
                heapq.heapreplace(self._filling, (self._full_at[client], client))
                continue
            heapq.heappop(self._filling)
            del self._full_at[client]
            self._weight = self._weight - self._weight_of(client) if self._filling else 0.0
