"""The two greedy policies: the largest batch first (MaxBatch), or the highest accuracy first (MaxAcc)."""

from __future__ import annotations

from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.batch_fronts import FrontsByFloor
from subnetact.serving.policies.fixed_subnet import batch_limits, largest_within
from subnetact.serving.scheduling.checks import check_accuracy
from subnetact.serving.scheduling.context import Context

__all__ = ["MaxAcc", "MaxBatch"]


class _Greedy:
    """What both policies look up: the accurate subnets per floor, and the largest batches per subnet."""

    def __init__(self, table: LatencyTable) -> None:
        self.table = check_accuracy(table)
        self._fronts = FrontsByFloor(table)
        self._limits: dict[int, tuple[list[float], list[int]]] = {}

    def _largest(self, subnet: int, slack_ms: float) -> int:
        """Return the largest batch that a subnet finishes within the slack."""
        limits, sizes = self._limits.get(subnet) or self._limits.setdefault(
            subnet, batch_limits(self.table, subnet)
        )
        return largest_within(limits, sizes, slack_ms)


class MaxBatch(_Greedy):
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
        """Return (subnet, batch size) for the idle worker; see `Policy.decide`.

        Raises:
            PolicyError: no subnet meets the floor of the most urgent request.
        """
        fronts = self._fronts(context)
        size = self._largest(fronts.cheapest, context.slack_ms)
        column = min(fronts.pad[size], fronts.column_for(context.queued))
        option = fronts.most_accurate(column, context.slack_ms)
        return (option.subnet, option.batch_size) if option else fronts.last_resort

    def retabled(self, table: LatencyTable) -> MaxBatch:
        """Return the same policy for other latencies of the same subnets and batch sizes."""
        return MaxBatch(table)


class MaxAcc(_Greedy):
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
        """Return (subnet, batch size) for the idle worker; see `Policy.decide`.

        Raises:
            PolicyError: no subnet meets the floor of the most urgent request.
        """
        fronts = self._fronts(context)
        option = fronts.most_accurate(0, context.slack_ms)
        if option is None:
            return fronts.last_resort
        return option.subnet, self._largest(option.subnet, context.slack_ms)

    def retabled(self, table: LatencyTable) -> MaxAcc:
        """Return the same policy for other latencies of the same subnets and batch sizes."""
        return MaxAcc(table)
