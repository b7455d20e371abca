"""SlackFit: latency buckets chosen by slack (SuperServe, NSDI'25, section 4)."""

from __future__ import annotations

import math
from bisect import bisect_right

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies.batch_fronts import BatchFronts
from subnetact.serving.scheduling.checks import check_count, check_margin, check_slo
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.frontier import Option

__all__ = ["SlackFit"]


class SlackFit:
    """Spend the slack of the most urgent request: the highest latency bucket within it, its largest batch.

    The options are the (subnet, batch size) with a latency of at most `slo_ms`, Pareto-optimal at their
    batch size, with a batch no larger than the profiled size that the queue rounds up to. They fall into
    `buckets` equal-width buckets over their range of latency; a bucket is usable when its upper edge is
    within the slack. Inside a bucket the largest batch wins, then accuracy; a bucket whose batch is smaller
    than a lower one's takes over the lower one's option. Nothing usable: the largest batch that fits, then
    accuracy. Nothing fits: the cheapest subnet with the largest batch.

    All of that is resolved when the policy is made; a decision is two look-ups.

    Args:
        table: the profile.
        slo_ms: the usual time a request is given.
        buckets: number of buckets, K.
        margin_ms: reserve taken off the slack, ms.
        margin: share by which every latency is assumed longer than profiled.

    Raises:
        PolicyError: an argument out of range, or an SLO below the fastest option.
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
        """Answer (subnet, batch size)."""
        plan = self._plans.get(context.floor)
        if plan is None:
            plan = self._plan_for(context.floor)
        queued = context.queued
        column = self._pad[queued] if queued < len(self._pad) else self._last
        return plan.answer(column, (context.slack_ms - self.margin_ms) / (1.0 + self.margin))

    def steps(self) -> list[tuple[list[float], list[tuple[int, int]]]]:
        """Tabulate every answer to requests without an accuracy floor.

        Returns:
            For each profiled batch size that the queue rounds up to, ascending slacks (ms, margins taken
            off) and one answer more than those: the answer at j is for slacks from the one before it on.
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
        """The same policy for other latencies of the same subnets and batch sizes."""
        return SlackFit(table, self.slo_ms, self.buckets, self.margin_ms, self.margin)

    def _plan_for(self, floor: float) -> _Plan:
        if floor > max(self.table.accuracy):
            raise PolicyError(
                f"floor: no subnet reaches {floor} %; the best has {max(self.table.accuracy)} %"
            )
        plan = self._plans[floor] = _Plan(self.table, self.slo_ms, self.buckets, floor)
        return plan


class _Plan:
    """Every answer SlackFit can give under one accuracy floor.

    `choices[column][j]` is the option for a queue that rounds up to that column when the first j upper
    edges are within the slack; None where those buckets hold nothing.
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
        """Answer for a queue that rounds up to a column; a step function of the slack."""
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
