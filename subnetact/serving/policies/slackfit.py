"""SlackFit: the slack of the most urgent request chooses a latency bucket; the policy of SuperServe."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache, partial

from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.fronts import Fronts
from subnetact.serving.scheduling.checks import check_count, check_margin, check_slo
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.floors import NO_FLOOR
from subnetact.serving.scheduling.frontier import Option

KEPT_PLANS = 32
"""Decisions are planned for each floor when it is first asked for, and kept for so many floors."""


class SlackFit:
    """Spends the slack of the most urgent request: runs an option from the highest latency bucket within it.

    An option is a pair (subnet, batch size). The options considered have a latency of at most `slo_ms`, are
    Pareto-optimal at their batch size, and their batch is no larger than the profiled size that the queue
    rounds up to. They are sorted into `buckets` buckets of equal width over their range of latency.

    * A bucket is usable if its upper edge is within the slack. The highest usable bucket is chosen.
    * Inside a bucket the option with the largest batch wins; among equals, the most accurate one.
    * If the batch of a bucket is smaller than that of a lower bucket, the lower bucket's option is used.
    * If no bucket is usable, the largest batch that finishes within the slack runs, on the most accurate
      subnet that permits it.
    * If nothing finishes in time, the cheapest subnet runs its largest batch.

    All of this is computed when the policy is made; a decision consists of two look-ups.

    Args:
        table: the latency table.
        slo_ms: the usual time from arrival to deadline, ms.
        buckets: number of buckets, called K in the paper.
        margin_ms: reserve that is subtracted from the slack, ms.
        margin: share by which latencies are assumed to be longer than profiled; 0.1 is 10 percent. The
            policy of SuperServe has no margin; `HullFit` assumes 0.1, and a comparison gives both the same.

    Raises:
        PolicyError: an argument is out of range, or the SLO is below the fastest option.
        TableError: the accuracy of a subnet is not known.

    Source:
        SuperServe (NSDI'25, section 4).

    Example:
        `result = simulate(arrivals_ms, table, SlackFit(table, slo_ms=36.0), slo_ms=36.0, workers=8)`
    """

    def __init__(
        self,
        table: LatencyTable,
        slo_ms: float,
        buckets: int = 8,
        margin_ms: float = 0.0,
        margin: float = 0.0,
    ) -> None:
        self.table = table
        self.slo_ms = check_slo(slo_ms, table)
        self.buckets = check_count(buckets, "buckets")
        self.margin_ms = check_margin(margin_ms, "margin_ms")
        self.margin = check_margin(margin, "margin")
        self._fronts = Fronts(table)
        self._plan = lru_cache(KEPT_PLANS)(partial(_Plan, self._fronts, self.slo_ms, self.buckets))
        self._plan(NO_FLOOR)

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size) for the idle worker; see `Policy.decide`.

        Raises:
            PolicyError: no subnet meets the floor of the most urgent request.
        """
        plan = self._plan(context.floor)
        column = self._fronts.column_for(context.queued)
        return plan.answer(column, (context.slack_ms - self.margin_ms) / (1.0 + self.margin))

    def fronts(self) -> tuple[list[list[Option]], list[tuple[float, int, int]]]:
        """Return what decisions are computed from, for programs that decide without this package.

        Returns:
            For each profiled batch size, the Pareto-optimal options, by ascending latency and accuracy. For
            each accuracy, percent, ascending: (accuracy, the cheapest subnet that reaches it, its largest
            batch size), which runs if nothing finishes in time.
        """
        accuracies = self._fronts.floors.accuracies
        return self._fronts.options, [(a, *self._fronts.last_resort(a)) for a in accuracies]

    def retabled(self, table: LatencyTable) -> SlackFit:
        """Return the same policy for other latencies of the same subnets and batch sizes."""
        return SlackFit(table, self.slo_ms, self.buckets, self.margin_ms, self.margin)


class _Plan:
    """Every decision of SlackFit for one floor.

    Attributes:
        edges: upper edges of the buckets, ms.
        choices: `choices[column][j]` is the option for a queue that rounds up to that column if the first j
            upper edges are within the slack. If those buckets are empty, the option is None.
    """

    def __init__(self, fronts: Fronts, slo_ms: float, buckets: int, floor: float) -> None:
        self._fronts, self._floor = fronts, floor
        possible = [
            [option for option in front if option.latency_ms <= slo_ms and option.accuracy >= floor]
            for front in fronts.options
        ]
        low = min((front[0].latency_ms for front in possible if front), default=slo_ms)
        high = max((front[-1].latency_ms for front in possible if front), default=slo_ms)
        width = (high - low) / buckets
        self.edges = [low + width * (j + 1) for j in range(buckets - 1)] + [high]

        def bucket_of(option: Option) -> int:
            at = int((option.latency_ms - low) / width) if width > 0 else 0
            return min(at, buckets - 1)

        # A larger batch is better, and at one size the most accurate subnet, the last of those in reach.
        reached: list[tuple[int, int] | None] = [None] * (buckets + 1)
        self.choices: list[list[tuple[int, int] | None]] = []
        for front in possible:
            end = 0
            for usable in range(buckets):
                if end := bisect_right(front, usable, lo=end, key=bucket_of):
                    reached[usable + 1] = front[end - 1].subnet, front[end - 1].batch_size
            self.choices.append(reached.copy())

    def answer(self, column: int, slack_ms: float) -> tuple[int, int]:
        """Return (subnet, batch size) for a queue that rounds up to a column, at that slack."""
        choice = self.choices[column][bisect_right(self.edges, slack_ms)]
        if choice is not None:
            return choice
        option = self._fronts.largest_batch(column, slack_ms, self._floor)
        return (option.subnet, option.batch_size) if option else self._fronts.last_resort(self._floor)
