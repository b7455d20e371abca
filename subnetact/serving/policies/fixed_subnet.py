"""One subnet for every request: what a server without a supernet does."""

from __future__ import annotations

import math
from bisect import bisect_right

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_accuracy
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.frontier import cheapest

__all__ = ["CheapestFeasible", "Fixed"]


class Fixed:
    """Always one subnet, with the largest batch that finishes within the slack of the most urgent request.

    When no batch does, the largest batch. This is Clipper+ of SuperServe (NSDI'25, section 6.1).

    Raises:
        PolicyError: the table has no such subnet, or it can run at no batch size.
    """

    def __init__(self, table: LatencyTable, subnet: int | str) -> None:
        index = table.subnets.index(subnet) if isinstance(subnet, str) and subnet in table.subnets else subnet
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(table.subnets):
            shown = ", ".join(table.subnets[:8])
            raise PolicyError(
                f"subnet: {subnet!r} is not in the table; choose 0 to {len(table.subnets) - 1} or {shown}"
            )
        self.table = check_accuracy(table)
        self.subnet = index
        self._limits, self._sizes = batch_limits(table, index)

    def decide(self, context: Context) -> tuple[int, int]:
        """Answer (the fixed subnet, batch size)."""
        return self.subnet, largest_within(self._limits, self._sizes, context.slack_ms)

    def retabled(self, table: LatencyTable) -> Fixed:
        """The same policy for other latencies of the same subnets and batch sizes."""
        return Fixed(table, self.subnet)


class CheapestFeasible:
    """The cheapest subnet that meets the floor of the most urgent request (INFaaS, ATC'21, section 4.1).

    Without a floor that is the cheapest of all. The batch is the largest that finishes within the slack.
    """

    def __init__(self, table: LatencyTable) -> None:
        self.table = check_accuracy(table)
        self._plans: dict[float, tuple[int, list[float], list[int]]] = {}

    def decide(self, context: Context) -> tuple[int, int]:
        """Answer (subnet, batch size)."""
        plan = self._plans.get(context.floor)
        if plan is None:
            if context.floor > max(self.table.accuracy):
                raise PolicyError(f"floor: no subnet reaches {context.floor} %")
            subnet = cheapest(self.table, context.floor)
            plan = self._plans[context.floor] = (subnet, *batch_limits(self.table, subnet))
        subnet, limits, sizes = plan
        return subnet, largest_within(limits, sizes, context.slack_ms)

    def retabled(self, table: LatencyTable) -> CheapestFeasible:
        """The same policy for other latencies of the same subnets and batch sizes."""
        return CheapestFeasible(table)


def batch_limits(table: LatencyTable, subnet: int) -> tuple[list[float], list[int]]:
    """(latencies ascending, the largest batch size within each), ms, of one subnet.

    A larger batch that is no slower hides the smaller ones.
    """
    limits: list[float] = []
    sizes: list[int] = []
    row = table.latency_ms[subnet].tolist()
    for latency, size in zip(reversed(row), reversed(table.batch_sizes), strict=True):
        if not math.isnan(latency) and (not limits or latency < limits[-1]):
            limits.append(latency)
            sizes.append(size)
    if not limits:
        raise PolicyError(f"subnet {table.subnets[subnet]!r} runs at no batch size (all NaN); choose another")
    return limits[::-1], sizes[::-1]


def largest_within(limits: list[float], sizes: list[int], within_ms: float) -> int:
    """The largest batch size that finishes within `within_ms`; the largest of all when none does."""
    at = bisect_right(limits, within_ms)
    return sizes[at - 1] if at else sizes[-1]
