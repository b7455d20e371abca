"""Whether accuracy above the cheapest subnet gains HullFit more than it costs in missed deadlines.

The header of `subnetact.serving.policies.hullfit` explains the method.
"""

from __future__ import annotations

import math

from subnetact.serving.scheduling.context import Context

__all__ = ["Balance"]

_MEMORY = 50.0
"""Gains and losses are forgotten within this many SLOs, but not before `_ARRIVALS` requests have arrived."""
_ARRIVALS = 3000.0
"""Requests are lost in bursts, so that fewer arrivals do not show what accuracy costs on average."""
_TOLERATED = 0.5
"""Missed deadlines may cost this share of what accuracy above the cheapest subnet gains."""
_RETURN = 0.02
"""While time is spent as in overload, this share of the accuracy that is forgone is credited.

The credit is what another attempt may cost, so that attempts in vain cost at most this share."""


class Balance:
    """Compares the accuracy gained above the cheapest subnet with the requests that expired because of it.

    Time that a batch takes beyond what its requests would take at least is extra time: in full batches of the
    cheapest subnet or, for a batch of the whole queue, on the fastest subnet at this batch size. It wears
    off within one SLO after the queue has become short. An expired request counts as lost if there was enough
    extra time to answer it with the cheapest subnet.

    Args:
        slo_ms: the usual time from arrival to deadline, ms.
    """

    def __init__(self, slo_ms: float) -> None:
        self._slo_ms = slo_ms
        self._at_ms: float | None = None
        self._arrived = 0
        self._expired = 0
        self._extra_ms = 0.0
        self._surplus = 0.0

    def losing(self, context: Context, tau_ms: float, accuracy: float, short: int) -> bool:
        """Book the requests that have expired since the last call; return whether losses exceed gains.

        Args:
            context: the state of the server.
            tau_ms: time per request of the cheapest subnet, ms.
            accuracy: its accuracy, percent.
            short: a queue of at most this many requests is short.
        """
        now = context.now_ms
        if self._at_ms is None:
            self._at_ms, self._expired, self._arrived = now, context.expired, context.arrivals.total
        gone = max(0.0, now - self._at_ms) / self._slo_ms
        arrived = context.arrivals.total - self._arrived
        self._at_ms, self._arrived = now, context.arrivals.total
        if context.queued <= short:
            self._extra_ms *= math.exp(-gone)
        self._surplus *= math.exp(-min(gone / _MEMORY, arrived / _ARRIVALS))
        expired = context.expired - self._expired
        self._expired = context.expired
        if expired > 0:
            lost = min(expired, self._extra_ms / tau_ms)
            self._extra_ms -= lost * tau_ms
            self._surplus -= lost * accuracy
        return self._surplus < 0.0

    def book(self, extra_ms: float, gained: float, forgone: float) -> None:
        """Book a batch.

        Args:
            extra_ms: the time that it takes beyond what its requests would take at least.
            gained: accuracy above that of the cheapest subnet, percent, summed over its requests; a batch
                below that accuracy gains nothing.
            forgone: accuracy that it gave up because losses exceed gains, percent, summed over its requests.
        """
        self._extra_ms += max(0.0, extra_ms)
        self._surplus += _TOLERATED * max(0.0, gained) + _RETURN * max(0.0, forgone)
