"""Forms the next batch from the queue and a policy; the simulator and the live batcher share this step.

Rules for expired requests, that is, requests whose deadline no subnet can meet any more:

* `drop`: they leave the queue at once and are handed to `on_drop`.
* `defer`: they move to a second queue, which is served only while nothing else waits.
* `serve`: they stay at the head of the queue (as in SuperServe, NSDI'25).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from operator import index
from typing import Any, Generic, NamedTuple, TypeVar

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_accuracy, expired_rule, unreachable
from subnetact.serving.scheduling.context import ArrivalMeter, Context, Policy
from subnetact.serving.scheduling.frontier import cheapest, largest_batch
from subnetact.serving.scheduling.priority import unaffordable
from subnetact.serving.scheduling.queue import NO_FLOOR, EDFQueue

__all__ = ["Batch", "Dispatcher"]

Item = TypeVar("Item")


class Batch(NamedTuple):
    """The batch that one worker runs next.

    Attributes:
        subnet: index of the subnet in the table.
        batch_size: the planned batch size, one of the table's (a compiled engine pads to it).
        items: the requests, most urgent first.
        deadlines_ms: their deadlines, ascending.
        expected_ms: the latency that the table gives.
        queued: number of requests in the queue before the batch was formed.
        slack_ms: slack of the most urgent request of the queue when the batch was formed.
    """

    subnet: int
    batch_size: int
    items: list[Any]
    deadlines_ms: list[float]
    expected_ms: float
    queued: int
    slack_ms: float


class Dispatcher(Generic[Item]):
    """Applies the rule for expired requests, asks the policy, and forms the batch.

    A request has expired if its deadline is before now plus the least latency of the subnets that meet its
    floor. A batch on a subnet holds the most urgent requests whose floors that subnet meets. If it meets
    none of them, the fastest subnet that meets the floor of the most urgent request runs instead.

    Args:
        policy: decides which subnet runs and how large the batch is.
        free_at_ms: when each worker is expected to be free; inf for one that is down. The caller updates it.
        slo_ms: the usual time from arrival to deadline, ms; the context passes it to the policy.
        expired: the rule for expired requests: `drop`, `defer` or `serve`.
        on_drop: called with the requests that were dropped.
        table: the latencies to plan with. If None, the policy's table.
        priority: returns the priority of a request; higher is more important. If given, and unless the rule
            is `serve`, requests that would make more important ones miss are treated as expired.

    Attributes:
        queue: the requests that have not expired.
        deferred: the requests that expired under the rule `defer`.
        arrivals: the meter of arrivals.
        context: what the policy sees.
        limits: the largest batch that a subnet may get, for subnets that have such a limit.
        taken: the requests that had left the queue when `next_batch` raised PolicyError.

    Raises:
        PolicyError: `expired` is not a rule.
        TableError: the accuracy of a subnet is not known.
    """

    def __init__(
        self,
        policy: Policy,
        free_at_ms: list[float],
        slo_ms: float,
        expired: str,
        on_drop: Callable[[list[Item]], None] | None = None,
        table: LatencyTable | None = None,
        priority: Callable[[Item], int] | None = None,
    ) -> None:
        table = check_accuracy(table or policy.table)
        self.expired = expired_rule(expired)
        self.priority = priority
        self.limits: dict[int, int] = {}
        self.queue: EDFQueue[Item] = EDFQueue()
        self.deferred: EDFQueue[Item] = EDFQueue()
        self.arrivals = ArrivalMeter()
        self._on_drop = on_drop or _forget
        self.taken: list[Item] = []
        self._accuracy = table.known_accuracy()
        self._accuracies = sorted(set(self._accuracy))
        self._sizes = table.batch_sizes
        self._pad = table.pad_index
        self.adopt(policy, table)
        self.context = Context(
            self.queue, self.arrivals, free_at_ms, slo_ms, None if expired == "serve" else self._expire
        )

    def adopt(self, policy: Policy, table: LatencyTable) -> None:
        """Continue with another policy and other latencies.

        Args:
            policy: the policy to ask from now on.
            table: the latencies to plan with, of the same subnets and batch sizes as before.
        """
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
        """Return the latency, ms, of k requests on a subnet; NaN if they cannot run there."""
        return self._latency[subnet][self._column(subnet, k)]

    def padded(self, subnet: int, k: int) -> int:
        """Return the batch size that k requests on a subnet are planned as: the next measured one."""
        return self._sizes[self._column(subnet, k)]

    def _column(self, subnet: int, k: int) -> int:
        """Return the column of the smallest measured batch size >= k; of the smallest >= k if none is."""
        row, first = self._latency[subnet], self._pad[k]
        column, last = first, len(row) - 1
        while row[column] != row[column]:
            if column == last:
                return first
            column += 1
        return column

    def least_ms(self, floor: float) -> float:
        """Return the least latency, ms, of the subnets whose accuracy is at least `floor` percent."""
        return self._fastest if floor <= NO_FLOOR else self._cost_of(floor)[0]

    def __len__(self) -> int:
        return len(self.queue) + len(self.deferred)

    def next_batch(self, now_ms: float, worker: int) -> Batch | None:
        """Form the batch for an idle worker.

        Args:
            now_ms: the time.
            worker: index of the worker.

        Returns:
            The batch, whose requests have left the queue, or None if the policy waits or nothing is left.

        Raises:
            PolicyError: the policy answered with something else than a subnet and a batch size that can run.
        """
        queue = self.queue
        if self.expired != "serve":
            self.remove_expired(now_ms)
            if self.priority is not None and len(queue) > 1:
                self._remove_unaffordable(now_ms, self.priority)
        queued = len(queue)
        if not queued:
            return self.cheapest_batch(now_ms)
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
        """Return the context for a policy; the queue must hold at least one request."""
        context, queue = self.context, self.queue
        context.now_ms = now_ms
        context.worker = worker
        context.queued = len(queue)
        context.slack_ms = queue.deadline() - now_ms
        context.floor = queue.floor()
        return context

    def cheapest_batch(self, now_ms: float) -> Batch | None:
        """Form the largest batch on the cheapest subnet, without asking the policy.

        Args:
            now_ms: the time.

        Returns:
            The batch, whose requests have left the queue, or None if no request waits.
        """
        queue, subnet = self.queue if len(self.queue) else self.deferred, self._cheapest
        if not len(queue):
            return None
        return self._form(queue, subnet, self._largest[subnet], len(queue), queue.deadline() - now_ms)

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

    def remove_expired(self, now_ms: float) -> None:
        """Drop or defer the expired requests at the head of the queue; the rule must not be `serve`."""
        queue = self.queue
        count, waiting = 0, len(queue)
        while count < waiting:
            if queue.deadline(count) >= now_ms + self.least_ms(queue.floor(count)):
                break
            count += 1
        if count:
            self._expire(count)

    def _remove_unaffordable(self, now_ms: float, priority: Callable[[Item], int]) -> None:
        queue, (full_ms, full_size) = self.queue, self._full
        positions = unaffordable(
            queue, now_ms, self.context.free_at_ms, full_ms, full_size, self._fastest, priority
        )
        if positions:
            floors = [queue.floor(at) for at in positions]
            self._drop_or_defer(*queue.take_at(positions), floors)

    def _expire(self, count: int) -> None:
        floors = [self.queue.floor(i) for i in range(count)] if self.expired == "defer" else []
        self._drop_or_defer(*self.queue.take(count), floors)

    def _drop_or_defer(self, deadlines: list[float], items: list[Item], floors: list[float]) -> None:
        if self.expired == "drop":
            self._on_drop(items)
        else:
            self.deferred.extend(deadlines, items, floors)

    def _cost_of(self, floor: float) -> tuple[float, int]:
        """Return (least latency in ms, subnet) among the subnets that meet `floor`."""
        at = bisect_left(self._accuracies, floor)  # floors between two accuracies demand the same subnets
        found = self._floor_cost.get(at)
        if found is None:
            options = [
                (latency, subnet)
                for subnet, row in enumerate(self._latency)
                if self._accuracy[subnet] >= floor
                for latency in row
                if not math.isnan(latency)
            ]
            if not options:
                raise unreachable(floor, max(self._accuracy))
            found = self._floor_cost[at] = min(options)
        return found


def _forget(items: list[Any]) -> None:
    """Ignore the dropped requests; used if no `on_drop` was given."""
