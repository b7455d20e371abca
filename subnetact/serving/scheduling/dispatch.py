"""Forms the next batch from the queue and a policy; the simulator and the live batcher share this step.

Rules for expired requests, that is, requests whose deadline no subnet can meet any more:

* `drop`: they leave the queue at once and are handed to `on_drop`.
* `defer`: they move to a second queue, which is served only while nothing else waits.
* `serve`: they stay at the head of the queue (as in SuperServe, NSDI'25).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_accuracy, expired_rule
from subnetact.serving.scheduling.context import ArrivalMeter, Context, Policy
from subnetact.serving.scheduling.floors import NO_FLOOR, Floors
from subnetact.serving.scheduling.frontier import cheapest_from, largest_batches, least_from, time_per_request
from subnetact.serving.scheduling.priority import unaffordable
from subnetact.serving.scheduling.queue import EDFQueue
from subnetact.serving.scheduling.request import Job, Request

_REMEMBERED_SLOS = 12.0
"""Policies may ask for the arrival rate of this many SLOs."""


class _Plan:
    """A policy, its optional members, and the latencies of one input shape, with what is derived from them.

    `floor_cost` has for each of `floors`, ascending, (least latency in ms, subnet) of the subnets that reach
    it; `work` the least worker time per request, ms.
    """

    def __init__(self, policy: Policy, table: LatencyTable, percent: Sequence[float]) -> None:
        self.policy = policy
        self.preempt: Any = getattr(policy, "preempt", None)
        self.block_length: Any = getattr(policy, "block_length", lambda *_: 1)
        self.observe: Any = getattr(policy, "observe", None)
        self._sizes, self._pad = table.batch_sizes, table.pad_index
        self._latency: list[list[float]] = table.latency_ms.tolist()
        self.fastest = table.fastest_ms
        self.largest = largest_batches(table)
        self.cheapest = cheapest_from(table, [0.0])[0]
        self.full = self.batch(self.cheapest, self.largest[self.cheapest])
        cells = np.where(np.isnan(table.latency_ms), math.inf, table.latency_ms)
        least = zip(cells.min(axis=1).tolist(), range(len(percent)), strict=True)
        per_request = [(tau,) for tau in time_per_request(table)]
        self.floors = Floors(table)
        self.floor_cost = least_from(self.floors.accuracies, percent, list(least))
        self.work: list[float] = [ms for (ms,) in least_from(self.floors.accuracies, percent, per_request)]

    def batch(self, subnet: int, k: int) -> tuple[int, float]:
        """Return how k requests on a subnet are planned: the next measured batch size, and its latency, ms.

        If they cannot run there, that is NaN.
        """
        row, first = self._latency[subnet], self._pad[k]
        column, last = first, len(row) - 1
        while row[column] != row[column]:
            if column == last:
                return self._sizes[first], math.nan
            column += 1
        return self._sizes[column], row[column]

    def refused(self, answer: str) -> PolicyError:
        """Return the error of a policy's answer that cannot run."""
        return PolicyError(f"{type(self.policy).__name__} answered {answer}")


@dataclass(eq=False)
class Dispatcher:
    """Applies the rule for expired requests, asks the policy, and forms the batch.

    A request has expired if its deadline is before now plus the least latency of the subnets that meet its
    floor. A batch on a subnet holds the most urgent requests whose floors that subnet meets. If it meets
    none of them, the fastest subnet that meets the floor of the most urgent request runs instead.

    If inputs have several shapes, every shape has its own latencies and its own policy object. The shape of
    the most urgent request decides which of them plans, and the batch holds requests of that shape only. If
    there are fewer than the policy planned, the most accurate subnet that takes no longer than planned runs.

    Args:
        policy: decides which subnet runs and how large the batch is.
        tables: the latencies to plan with, one table per input shape, the largest shape last. For shapes but
            the last, the policy is made anew by `retabled(table)`, if it has that method.
        free_at_ms: when each worker is expected to be free; inf for one that is down. The caller updates it.
        slo_ms: the usual time from arrival to deadline, ms; the context passes it to the policy.
        expired: the rule for expired requests. Unless it is `serve`, requests that would make more important
            ones miss are treated as expired.
        on_drop: called with the requests that were dropped.

    Attributes:
        queue: the requests that have not expired.
        deferred: the requests that expired under the rule `defer`.
        arrivals: the meter of arrivals.
        context: what the policy sees.
        slowness: how many times as long as those of the cheapest subnet batches are taken to last when
            requests expire by priority.
        limits: the largest batch that a subnet may get, for subnets that have such a limit.
        taken: the requests that had left the queue when `next_batch` raised PolicyError.

    Raises:
        PolicyError: `expired` is not a rule.
        TableError: the accuracy of a subnet is not known.
    """

    policy: Policy
    tables: Sequence[LatencyTable]
    free_at_ms: list[float]
    slo_ms: float
    expired: str
    on_drop: Callable[[list[Request]], None]

    def __post_init__(self) -> None:
        policy, tables = self.policy, self.tables
        table = check_accuracy(tables[-1])
        expired_rule(self.expired)
        self.slowness = 1.0
        self.limits: dict[int, int] = {}
        self.queue = EDFQueue()
        self.deferred = EDFQueue()
        self.arrivals = ArrivalMeter(max(2000.0, _REMEMBERED_SLOS * self.slo_ms))
        self.taken: list[Request] = []
        self._accuracy = table.known_accuracy()
        self._sizes = table.batch_sizes
        retabled: Any = getattr(policy, "retabled", lambda _: policy)
        self.plans = [self.plan(policy if one is table else retabled(one), one) for one in tables]
        self._shaped = len(tables) > 1
        expire = None if self.expired == "serve" else self._expire
        self.context = Context(self.queue, self.arrivals, self.free_at_ms, self.slo_ms, expire)

    def plan(self, policy: Policy, table: LatencyTable) -> _Plan:
        """Return what `plans` takes; this costs time and changes nothing, so it needs no lock."""
        return _Plan(policy, table, self._accuracy)

    def work_ms(self, request: Request) -> float:
        """Return the worker time of a request, ms: `slowness` times that on its cheapest subnet."""
        plan = self.plans[request.shape]
        return self.slowness * plan.work[plan.floors.at(min(request.ask.floor, plan.floors.best))]

    def least_ms(self, floor: float, shape: int = -1) -> float:
        """Return the least latency, ms, of the subnets whose accuracy is at least `floor` percent."""
        plan = self.plans[shape]
        return plan.fastest if floor <= NO_FLOOR else plan.floor_cost[plan.floors.at(floor)][0]

    def __len__(self) -> int:
        return len(self.queue) + len(self.deferred)

    def next_batch(self, now_ms: float, worker: int) -> Job | None:
        """Form the batch of an idle worker; it has not started yet."""
        queue = self.queue
        if self.expired != "serve":
            self.remove_expired(now_ms)
        if self.expired != "serve" and queue.prioritised and len(queue) > 1:
            plan = self.plans[-1]
            slower, (most, full_ms) = self.slowness, plan.full
            lasts = (slower * full_ms, most), slower * plan.fastest
            positions = unaffordable(queue, now_ms, self.context.free_at_ms, *lasts)
            self._drop_or_defer(queue.take_at(positions))
        queued = len(queue)
        if not queued:
            return self.cheapest_batch(now_ms, worker)
        context = self.look(now_ms, worker)
        plan = self.plans[queue.request().shape]
        choice = plan.policy.decide(context)
        if choice is None:
            return None
        try:
            subnet, size = map(index, choice)
        except (TypeError, ValueError) as error:
            text = f"{choice!r}; answer (subnet index, batch size), two whole numbers, or None"
            raise plan.refused(text) from error
        if not (0 <= subnet < len(self._accuracy) and 1 <= size <= self._sizes[-1]):
            sizes = f"subnets 0 to {len(self._accuracy) - 1} and batch sizes up to {self._sizes[-1]}"
            raise plan.refused(f"subnet {subnet}, batch size {size}; the table has {sizes}")
        return self._form(queue, worker, subnet, size, queued, context.slack_ms)

    def look(self, now_ms: float, worker: int) -> Context:
        """Return the context for a policy; the queue must hold at least one request."""
        context, queue = self.context, self.queue
        context.now_ms = now_ms
        context.worker = worker
        context.queued = len(queue)
        context.slack_ms = queue.deadline() - now_ms
        context.floor = queue.floor()
        return context

    def cheapest_batch(self, now_ms: float, worker: int) -> Job | None:
        """Form the largest batch on the cheapest subnet, without asking the policy."""
        queue = self.queue if len(self.queue) else self.deferred
        if not len(queue):
            return None
        plan = self.plans[queue.request().shape]
        return self._form(queue, worker, plan.cheapest, plan.full[0], len(queue), queue.deadline() - now_ms)

    def _form(
        self, queue: EDFQueue, worker: int, subnet: int, size: int, queued: int, slack_ms: float
    ) -> Job:
        plan = self.plans[queue.request().shape]
        if self.limits:
            size = min(size, self.limits.get(subnet, size))
        if self._shaped or queue.demanding:
            subnet, items = self._take_alike(queue, subnet, size)
        else:
            items = queue.take(min(size, len(queue)))
        if math.isnan(plan.batch(subnet, len(items))[1]):
            self.taken = items
            text = f"subnet {subnet} for {len(items)} requests, which cannot run there (NaN in the table)"
            raise plan.refused(text)
        return Job(worker, subnet, items, queued, slack_ms)

    def _take_alike(self, queue: EDFQueue, subnet: int, size: int) -> tuple[int, list[Request]]:
        """Take what one subnet may answer, of the most urgent one's shape; return the subnet and that."""
        shape = queue.request().shape
        plan = self.plans[shape]
        items = queue.take_satisfied(size, self._accuracy[subnet], shape)
        if not items:
            _, subnet = plan.floor_cost[plan.floors.at(queue.floor())]
            size = min(size, plan.largest[subnet], self.limits.get(subnet, size))
            items = queue.take_satisfied(size, self._accuracy[subnet], shape)
        if not self._shaped:
            return subnet, items
        _, planned_ms = plan.batch(subnet, size)
        better = [
            (accuracy, -ms, other)
            for other, accuracy in enumerate(self._accuracy)
            if accuracy >= self._accuracy[subnet]  # Measured latencies may fall as batches grow.
            and (ms := plan.batch(other, len(items))[1]) <= planned_ms
            and len(items) <= self.limits.get(other, len(items))
        ]
        return max(better, default=(0.0, 0.0, subnet))[2], items

    def remove_expired(self, now_ms: float) -> None:
        """Drop or defer the expired requests at the head of the queue; the rule must not be `serve`."""
        queue = self.queue
        count, waiting = 0, len(queue)
        while count < waiting:
            shape = queue.request(count).shape
            if queue.deadline(count) >= now_ms + self.least_ms(queue.floor(count), shape):
                break
            count += 1
        if count:
            self._expire(count)

    def _expire(self, count: int) -> None:
        self._drop_or_defer(self.queue.take(count))

    def _drop_or_defer(self, requests: list[Request]) -> None:
        self.context.expired += len(requests)
        if self.expired == "drop":
            self.on_drop(requests)
        else:
            for request in requests:
                self.deferred.push(request)
