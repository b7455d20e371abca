"""From a queue and a policy to the next batch: the step the simulator and the live batcher share."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from operator import index
from typing import Any, Generic, NamedTuple, TypeVar

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_accuracy
from subnetact.serving.scheduling.context import ArrivalMeter, Context, Policy
from subnetact.serving.scheduling.frontier import cheapest, largest_batch
from subnetact.serving.scheduling.priority import unaffordable
from subnetact.serving.scheduling.queue import NO_FLOOR, EDFQueue

__all__ = ["HOPELESS_RULES", "Batch", "Dispatcher"]

Item = TypeVar("Item")
HOPELESS_RULES = ("serve", "drop", "defer")


class Batch(NamedTuple):
    """What one worker shall run next."""

    subnet: int
    batch_size: int
    items: list[Any]
    deadlines_ms: list[float]
    expected_ms: float
    queued: int
    slack_ms: float


class Dispatcher(Generic[Item]):
    """Applies the hopeless rule, asks the policy, and forms the batch.

    A request is hopeless when its deadline is before now plus the fastest option that meets its floor:
    `serve` leaves it at the head (SuperServe, NSDI'25), `drop` hands it to `on_drop`, `defer` serves it
    only while nothing live waits. A batch on subnet s holds the first requests, in order of deadline,
    whose accuracy floor s meets; when s meets none, the fastest subnet that meets the head's floor runs.

    With `priority`, and unless the rule is `serve`, requests that make those of higher priority miss are
    given up likewise. `limits` holds the largest batch a subnet may get, where there is a limit.
    """

    def __init__(
        self,
        policy: Policy,
        free_at_ms: list[float],
        slo_ms: float,
        hopeless: str = "serve",
        on_drop: Callable[[list[Item]], None] | None = None,
        table: LatencyTable | None = None,
        priority: Callable[[Item], int] | None = None,
    ) -> None:
        if hopeless not in HOPELESS_RULES:
            raise PolicyError(
                f"hopeless: {hopeless!r} is not a rule; choose from {', '.join(HOPELESS_RULES)}"
            )
        table = check_accuracy(table or policy.table)
        self.hopeless = hopeless
        self.priority = priority
        self.limits: dict[int, int] = {}
        self.queue: EDFQueue[Item] = EDFQueue()
        self.late: EDFQueue[Item] = EDFQueue()
        self.arrivals = ArrivalMeter()
        self._on_drop = on_drop or _forget
        self.taken: list[Item] = []
        self._accuracy = table.known_accuracy()
        self._levels = sorted(set(self._accuracy))
        self._sizes = table.batch_sizes
        self._pad = table.pad_index
        self.adopt(policy, table)
        self.context = Context(
            self.queue, self.arrivals, free_at_ms, slo_ms, None if hopeless == "serve" else self._give_up
        )

    def adopt(self, policy: Policy, table: LatencyTable) -> None:
        """Go on with this policy and these latencies, of the same subnets and batch sizes."""
        self.policy = policy
        self._latency: list[list[float]] = table.latency_ms.tolist()
        self._fastest = table.fastest_ms
        self._largest = [largest_batch(table, subnet) for subnet in range(len(table.subnets))]
        self._cheapest = cheapest(table)
        row = self._latency[self._cheapest]
        self._full = next(
            (ms, size) for ms, size in zip(row[::-1], self._sizes[::-1], strict=True) if ms == ms
        )
        self._floor_cost: dict[int, tuple[float, int]] = {}

    def expected_ms(self, subnet: int, k: int) -> float:
        """Latency of k requests on a subnet; NaN where they cannot run."""
        return self._latency[subnet][self._column(subnet, k)]

    def padded(self, subnet: int, k: int) -> int:
        """The batch size that k requests are padded to."""
        return self._sizes[self._column(subnet, k)]

    def _column(self, subnet: int, k: int) -> int:
        """The first size from k on that was measured, or (none was) from k on."""
        row, first = self._latency[subnet], self._pad[k]
        column, last = first, len(row) - 1
        while row[column] != row[column]:
            if column == last:
                return first
            column += 1
        return column

    def least_ms(self, floor: float) -> float:
        """The least latency of any option that meets `floor`."""
        return self._fastest if floor <= NO_FLOOR else self._cost_of(floor)[0]

    def __len__(self) -> int:
        return len(self.queue) + len(self.late)

    def next_batch(self, now_ms: float, worker: int) -> Batch | None:
        """The batch for an idle worker; None when the policy waits or nothing is left to serve.

        Raises:
            PolicyError: the policy answered with a subnet or batch size that cannot run.
        """
        queue = self.queue
        if self.hopeless != "serve":
            self.clear_hopeless(now_ms)
            if self.priority is not None and len(queue) > 1:
                self._clear_unaffordable(now_ms, self.priority)
        queued = len(queue)
        if not queued:
            return self._late_batch(now_ms)
        context = self.look(now_ms, worker)
        choice = self.policy.decide(context)
        if choice is None:
            return None
        try:
            subnet, size = map(index, choice)
        except (TypeError, ValueError) as error:
            raise PolicyError(
                f"{type(self.policy).__name__} answered {choice!r}; answer (subnet index, batch size), two "
                "whole numbers, or None"
            ) from error
        if not (0 <= subnet < len(self._accuracy) and 1 <= size <= self._sizes[-1]):
            raise PolicyError(
                f"{type(self.policy).__name__} answered subnet {subnet}, batch size {size}; the table has "
                f"subnets 0 to {len(self._accuracy) - 1} and batch sizes up to {self._sizes[-1]}"
            )
        return self._form(queue, subnet, size, queued, context.slack_ms)

    def look(self, now_ms: float, worker: int) -> Context:
        """The context as the policy finds it; the queue holds at least one request."""
        context, queue = self.context, self.queue
        context.now_ms = now_ms
        context.worker = worker
        context.queued = len(queue)
        context.slack_ms = queue.deadline() - now_ms
        context.floor = queue.floor()
        return context

    def _late_batch(self, now_ms: float) -> Batch | None:
        queued = len(self.late)
        if not queued:
            return None
        return self._form(
            self.late, self._cheapest, self._largest[self._cheapest], queued, self.late.deadline() - now_ms
        )

    def _form(self, queue: EDFQueue[Item], subnet: int, size: int, queued: int, slack_ms: float) -> Batch:
        if self.limits:
            size = min(size, self.limits.get(subnet, size))
        if queue.demanding:
            deadlines, items = queue.take_satisfied(size, self._accuracy[subnet])
            if not items:
                _, subnet = self._cost_of(queue.floor())
                size = min(size, self._largest[subnet], self.limits.get(subnet, size))
                deadlines, items = queue.take_satisfied(size, self._accuracy[subnet])
        else:
            deadlines, items = queue.take(size if size < queued else queued)
        column = self._column(subnet, len(items))
        expected = self._latency[subnet][column]
        if expected != expected:
            self.taken = items
            raise PolicyError(
                f"{type(self.policy).__name__} answered subnet {subnet} for {len(items)} requests, which "
                "cannot run there (NaN in the table)"
            )
        return Batch(subnet, self._sizes[column], items, deadlines, expected, queued, slack_ms)

    def clear_hopeless(self, now_ms: float) -> None:
        """Give up, by the rule, the requests no option can finish in time."""
        queue = self.queue
        count, waiting = 0, len(queue)
        while count < waiting:
            if queue.deadline(count) >= now_ms + self.least_ms(queue.floor(count)):
                break
            count += 1
        if count:
            self._give_up(count)

    def _clear_unaffordable(self, now_ms: float, priority: Callable[[Item], int]) -> None:
        queue, (full_ms, full_size) = self.queue, self._full
        given_up = unaffordable(
            queue, now_ms, self.context.free_at_ms, full_ms, full_size, self._fastest, priority
        )
        if given_up:
            floors = [queue.floor(at) for at in given_up]
            self._dispose(*queue.take_at(given_up), floors)

    def _give_up(self, count: int) -> None:
        floors = [self.queue.floor(i) for i in range(count)] if self.hopeless == "defer" else []
        self._dispose(*self.queue.take(count), floors)

    def _dispose(self, deadlines: list[float], items: list[Item], floors: list[float]) -> None:
        if self.hopeless == "drop":
            self._on_drop(items)
        else:
            self.late.extend(deadlines, items, floors)

    def _cost_of(self, floor: float) -> tuple[float, int]:
        """(least latency, subnet) among the subnets that meet `floor`."""
        level = bisect_left(self._levels, floor)  # floors are any number; what they demand are few
        found = self._floor_cost.get(level)
        if found is None:
            options = [
                (latency, subnet)
                for subnet, row in enumerate(self._latency)
                if self._accuracy[subnet] >= floor
                for latency in row
                if not math.isnan(latency)
            ]
            if not options:
                raise PolicyError(f"floor: no subnet reaches {floor} %; the best has {max(self._accuracy)} %")
            found = self._floor_cost[level] = min(options)
        return found


def _forget(items: list[Any]) -> None:
    """Nobody wants to know what was dropped."""
