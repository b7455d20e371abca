"""Policies without a choice of accuracy: one subnet for all requests, or the cheapest accurate enough."""

from __future__ import annotations

import math
from bisect import bisect_right

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_accuracy
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.floors import Floors
from subnetact.serving.scheduling.frontier import cheapest_from

__all__ = ["CheapestFeasible", "Fixed"]


class Fixed:
    """Always runs one subnet, as a server without a supernet does.

    The batch is the largest one that finishes within the slack of the most urgent request, or the largest of
    all if none does.

    Args:
        table: the latency table.
        subnet: index of the subnet in the table, or its key.

    Attributes:
        subnet: index of the subnet.

    Raises:
        PolicyError: the table has no such subnet, or the subnet can run at no batch size.
        TableError: the accuracy of a subnet is not known.

    Source:
        The baseline Clipper+ of SuperServe (NSDI'25, section 6.1).
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
        """Return (the fixed subnet, batch size); see `Policy.decide`."""
        return self.subnet, largest_within(self._limits, self._sizes, context.slack_ms)

    def retabled(self, table: LatencyTable) -> Fixed:
        """Return the same policy for other latencies of the same subnets and batch sizes."""
        return Fixed(table, self.subnet)


class CheapestFeasible:
    """Runs the subnet with the least time per request that meets the floor of the most urgent request.

    A request without a floor gets the cheapest subnet of all. The batch is the largest one that finishes
    within the slack of the most urgent request, or the largest of all if none does.

    Args:
        table: the latency table.

    Raises:
        TableError: the accuracy of a subnet is not known.

    Source:
        INFaaS (ATC'21, section 4.1).
    """

    def __init__(self, table: LatencyTable) -> None:
        self.table = check_accuracy(table)
        self._floors = Floors(table)
        self._cheapest = cheapest_from(table, self._floors.accuracies)
        self._limits = {subnet: batch_limits(table, subnet) for subnet in set(self._cheapest)}

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size) for the idle worker; see `Policy.decide`.

        Raises:
            PolicyError: no subnet meets the floor of the most urgent request.
        """
        subnet = self._cheapest[self._floors.at(context.floor)]
        return subnet, largest_within(*self._limits[subnet], context.slack_ms)

    def retabled(self, table: LatencyTable) -> CheapestFeasible:
        """Return the same policy for other latencies of the same subnets and batch sizes."""
        return CheapestFeasible(table)


def batch_limits(table: LatencyTable, subnet: int) -> tuple[list[float], list[int]]:
    """Return the batch sizes of one subnet that are worth running, by latency.

    A batch size is left out if a larger one is no slower.

    Args:
        table: the latency table.
        subnet: index of the subnet.

    Returns:
        (latencies in ms, ascending; the batch size that each latency belongs to, ascending).

    Raises:
        PolicyError: the subnet can run at no batch size.
    """
    limits: list[float] = []
    sizes: list[int] = []
    latencies = table.latency_ms[subnet].tolist()
    for latency, size in zip(reversed(latencies), reversed(table.batch_sizes), strict=True):
        if not math.isnan(latency) and (not limits or latency < limits[-1]):
            limits.append(latency)
            sizes.append(size)
    if not limits:
        raise PolicyError(f"subnet {table.subnets[subnet]!r} runs at no batch size (all NaN); choose another")
    return limits[::-1], sizes[::-1]


def largest_within(limits: list[float], sizes: list[int], within_ms: float) -> int:
    """Return the largest batch size that finishes within `within_ms`, or the largest of all if none does.

    Args:
        limits: latencies from `batch_limits`, ms.
        sizes: batch sizes from `batch_limits`.
        within_ms: the time.
    """
    at = bisect_right(limits, within_ms)
    return sizes[at - 1] if at else sizes[-1]
