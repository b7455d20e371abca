"""Policies with a simple rule: Fixed, CheapestFeasible, MaxBatch and MaxAcc."""

from __future__ import annotations

from functools import cache, partial
from typing import TypeVar

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.fronts import Fronts, batch_limits, largest_within
from subnetact.serving.scheduling.checks import check_accuracy
from subnetact.serving.scheduling.context import Context
from subnetact.spec import brief


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
        named: dict[int | str, int] = {t: i for i, key in enumerate(table.subnets) for t in (key, brief(key))}
        index = named.get(subnet, subnet) if isinstance(subnet, str) else subnet
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(table.subnets):
            shown = ", ".join(table.subnets[:8])
            raise PolicyError(
                f"subnet: {subnet!r} is not in the table; choose 0 to {len(table.subnets) - 1} or {shown}"
            )
        self.table = check_accuracy(table)
        self.subnet = index
        self._limits = batch_limits(table, index)

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (the fixed subnet, batch size); see `Policy.decide`."""
        return self.subnet, largest_within(self._limits, context.slack_ms)

    def retabled(self, table: LatencyTable) -> Fixed:
        """Return the same policy for other latencies of the same subnets and batch sizes."""
        return Fixed(table, self.subnet)


Self = TypeVar("Self", bound="_FrontPolicy")


class _FrontPolicy:
    """A policy that only looks at the fronts of its table and at the batches of single subnets."""

    def __init__(self, table: LatencyTable) -> None:
        self.table = check_accuracy(table)
        self._fronts = Fronts(table)
        self._limits = cache(partial(batch_limits, table))  # of a subnet

    def retabled(self: Self, table: LatencyTable) -> Self:
        """Return the same policy for other latencies of the same subnets and batch sizes."""
        return type(self)(table)

    def _largest(self, subnet: int, slack_ms: float) -> int:
        """Return the largest batch that a subnet finishes within the slack."""
        return largest_within(self._limits(subnet), slack_ms)


class CheapestFeasible(_FrontPolicy):
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

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size); PolicyError if no subnet meets the most urgent request's floor."""
        subnet = self._fronts.cheapest(context.floor)
        return subnet, self._largest(subnet, context.slack_ms)


class MaxBatch(_FrontPolicy):
    """Chooses the largest batch first, and then the most accurate subnet for it.

    The batch is the largest one that the cheapest subnet finishes within the slack of the most urgent
    request, and at most the profiled size that the queue rounds up to. The subnet is the most accurate one
    that finishes this batch within the slack. If none does, the cheapest subnet runs its largest batch.

    Args:
        table: the latency table.

    Raises:
        TableError: the accuracy of a subnet is not known.

    Source:
        SuperServe (NSDI'25, section 6.5).
    """

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size); PolicyError if no subnet meets the most urgent request's floor."""
        fronts, floor = self._fronts, context.floor
        size = self._largest(fronts.cheapest(floor), context.slack_ms)
        column = min(fronts.column_for(size), fronts.column_for(context.queued))
        option = fronts.most_accurate(column, context.slack_ms, floor)
        return (option.subnet, option.batch_size) if option else fronts.last_resort(floor)


class MaxAcc(_FrontPolicy):
    """Chooses the most accurate subnet first, and then the largest batch for it.

    The subnet is the most accurate one that finishes one request within the slack of the most urgent
    request. The batch is the largest one that this subnet finishes within the slack. If no subnet finishes
    one request in time, the cheapest subnet runs its largest batch.

    Args:
        table: the latency table.

    Raises:
        TableError: the accuracy of a subnet is not known.

    Source:
        SuperServe (NSDI'25, section 6.5).
    """

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size); PolicyError if no subnet meets the most urgent request's floor."""
        floor = context.floor
        option = self._fronts.most_accurate(0, context.slack_ms, floor)
        if option is None:
            return self._fronts.last_resort(floor)
        return option.subnet, self._largest(option.subnet, context.slack_ms)
