"""SlackFit: the slack of the most urgent request chooses a latency bucket; the policy of SuperServe."""

from __future__ import annotations

import math
from bisect import bisect_right

from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.batch_fronts import BatchFronts
from subnetact.serving.scheduling.checks import check_count, check_margin, check_slo, unreachable
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.frontier import Option

__all__ = ["SlackFit"]


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
        margin: share by which latencies are assumed to be longer than profiled; 0.1 is 10 percent.

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
        self._pad = table.pad_index
        self._last = len(table.batch_sizes) - 1
        self._plans: dict[float, _Plan] = {0.0: _Plan(table, self.slo_ms, buckets, 0.0)}

    def decide(self, context: Context) -> tuple[int, int]:
        """Return (subnet, batch size) for the idle worker; see `Policy.decide`.

        Raises:
            PolicyError: no subnet meets the floor of the most urgent request.
        """
        plan = self._plans.get(context.floor)
        if plan is None:
            plan = self._plan_for(context.floor)
        queued = context.queued
        column = self._pad[queued] if queued < len(self._pad) else self._last
        return plan.answer(column, (context.slack_ms - self.margin_ms) / (1.0 + self.margin))

    def steps(self) -> list[tuple[list[float], list[tuple[int, int]]]]:
        """Tabulate every decision for requests without a floor; exporters write this table.

        Returns:
            For each profiled batch size that the queue rounds up to: (slacks in ms, ascending, with the
            margins subtracted; decisions, one more than slacks). Decision j applies if exactly the first j
            slacks are at most the slack.
        """
        plan = self._plans[0.0]
        tables = []
        for column in range(self._last + 1):
            latencies = plan.fronts.latencies[: column + 1]
            slacks: list[float] = []
            answers = [plan.answer(column, -math.inf)]
            for slack_ms in sorted({*plan.edges, *(ms for front in latencies for ms in front)}):
                answer = plan.answer(column, slack_ms)
                if answer != answers[-1]:
                    slacks.append(slack_ms)
                    answers.append(answer)
            tables.append((slacks, answers))
        return tables

    def retabled(self, table: LatencyTable) -> SlackFit:
        """Return the same policy for other latencies of the same subnets and batch sizes."""
        return SlackFit(table, self.slo_ms, self.buckets, self.margin_ms, self.margin)

    def _plan_for(self, floor: float) -> _Plan:
        if floor > max(self.table.accuracy):
            raise unreachable(floor, max(self.table.accuracy))
        plan = self._plans[floor] = _Plan(self.table, self.slo_ms, self.buckets, floor)
        return plan


class _Plan:
    """Every decision of SlackFit for one floor.

    Attributes:
        edges: upper edges of the buckets, ms.
        choices: `choices[column][j]` is the option for a queue that rounds up to that column if the first j
            upper edges are within the slack. If those buckets are empty, the option is None.
    """

    def __init__(self, table: LatencyTable, slo_ms: float, buckets: int, floor: float) -> None:
        self.fronts = BatchFronts(table, floor)
        self.fallback = self.fronts.last_resort
        options = [option for front in self.fronts.options for option in front if option.latency_ms <= slo_ms]
        low = min((option.latency_ms for option in options), default=slo_ms)
        high = max((option.latency_ms for option in options), default=slo_ms)
        width = (high - low) / buckets
        self.edges = [low + width * (j + 1) for j in range(buckets - 1)] + [high]
        holding: list[list[Option]] = [[] for _ in range(buckets)]
        for option in options:
            at = int((option.latency_ms - low) / width) if width > 0 else 0
            holding[min(at, buckets - 1)].append(option)
        self.choices = [
            self._choose(holding, table.batch_sizes[column]) for column in range(len(table.batch_sizes))
        ]

    def answer(self, column: int, slack_ms: float) -> tuple[int, int]:
        """Return (subnet, batch size) for a queue that rounds up to a column, at that slack."""
        choice = self.choices[column][bisect_right(self.edges, slack_ms)]
        if choice is not None:
            return choice
        option = self.fronts.largest_batch(column, slack_ms)
        return (option.subnet, option.batch_size) if option else self.fallback

    def _choose(self, holding: list[list[Option]], largest: int) -> list[tuple[int, int] | None]:
        kept: Option | None = None
        answers: list[tuple[int, int] | None] = [None]
        for bucket in holding:
            fitting = [option for option in bucket if option.batch_size <= largest]
            best = max(fitting, key=lambda option: (option.batch_size, option.accuracy), default=None)
            if best is not None and (kept is None or best.batch_size >= kept.batch_size):
                kept = best
            answers.append((kept.subnet, kept.batch_size) if kept else None)
        return answers
