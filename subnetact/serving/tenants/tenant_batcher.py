"""`TenantBatcher`: serves several supernets on the same workers, with shares and periodic planning."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from subnetact.errors import PolicyError
from subnetact.serving.live.answers import Answer, AnswerFuture
from subnetact.serving.live.batcher import Batcher, close_elsewhere, monotonic_ms
from subnetact.serving.live.context_manager import ClosedOnExit
from subnetact.serving.live.driver import SharedWorkers
from subnetact.serving.live.periodic_call import PeriodicCall
from subnetact.serving.live.stats import BatcherStats
from subnetact.serving.planning.herd import Grouping, Stream, group_streams
from subnetact.serving.scheduling.checks import check_count, check_positive
from subnetact.serving.tenants.tenant import Tenant

__all__ = ["TenantBatcher", "TenantStats"]

_LEAST_LOAD = 1e-3
"""A tenant counts as this many workers at least, so that its group always has one."""
_KEPT = 100_000
_KEPT_PLANS = 1000


@dataclass(frozen=True)
class TenantStats:
    """A snapshot of one tenant.

    Attributes:
        batcher: the counters of its batcher.
        workers: the workers that may serve it now.
        used_ms: the time that it used on all workers together, ms.
        planning_errors: how often a periodic plan of all tenants failed; the plan before is kept then.
    """

    batcher: BatcherStats
    workers: tuple[int, ...]
    used_ms: float
    planning_errors: int = 0


class TenantBatcher(ClosedOnExit):
    """Serves several supernets on the same workers.

    Every tenant has its own queue, policy and limits; they take turns on the workers. If several want a
    worker, its time is divided by their shares, batch by batch; what one does not use, the others may. So a
    flood of requests for one tenant delays another one by at most one batch per turn.

    A tenant whose policy is `Preemptive` runs its batches in blocks. Between two of them it gives way to a
    tenant that has used less of its share and has requests which the rest of the batch would make late, if
    these are more than those that become late here.

    With `period_ms`, HERD of Shepherd plans periodically from the measured rates: tenants are put into
    groups, and workers are divided among the groups, so that the least ratio of workers to load is greatest
    and the models of each group fit in the memory of a worker. A worker that moves finishes its batch first.
    Requests wait in the queue of their tenant, so that none is lost.

    Args:
        tenants: the tenants.
        workers: number of workers.
        period_ms: time between two plans, ms. If None, every worker serves every tenant.
        groups: the greatest number of groups. If None, the number of tenants, or of workers if that is less.
        memory_mb: memory of a worker, MiB.
        burst_weight: as in `group_streams`.
        clock_ms: a monotonic clock, ms, for turns, plans and the tenants' batchers. If None, that of
            `Batcher`.

    Attributes:
        plans: (time in s since the start, grouping) of the last 1,000 plans that were applied.

    Raises:
        PolicyError: an argument is out of range, two tenants have the same name, or the models do not fit
            into the memory.
        ProfileMismatch: a table is of other subnets than its engine.
        MissingExtra: planning needs scipy, which is not installed.

    Source:
        The algorithm HERD of Shepherd (NSDI'23, section 4.1).

    Example:
        >>> tenants = [Tenant("digits", digits, 20.0, table), Tenant("faces", faces, 50.0, other)]
        >>> with TenantBatcher(tenants, workers=2) as batcher:
        ...     answer = batcher.submit("digits", x, deadline_ms=20.0).result()
    """

    def __init__(
        self,
        tenants: Sequence[Tenant],
        workers: int = 1,
        *,
        period_ms: float | None = None,
        groups: int | None = None,
        memory_mb: float = math.inf,
        burst_weight: float = 0.0,
        clock_ms: Callable[[], float] | None = None,
    ) -> None:
        given = list(tenants)
        if not given or not all(isinstance(tenant, Tenant) for tenant in given):
            raise PolicyError("tenants: give at least one Tenant(...)")
        twice = [name for name, count in Counter(tenant.name for tenant in given).items() if count > 1]
        if twice:
            raise PolicyError(f"tenants: two are called {twice[0]!r}; give each a name of its own")
        check_count(workers, "workers")
        self.tenants = {tenant.name: tenant for tenant in given}
        self._workers = workers
        self._planning = threading.Lock()
        self._groups = min(len(given), workers) if groups is None else check_count(groups, "groups")
        self._memory_mb = memory_mb
        self._burst_weight = burst_weight
        if clock_ms is not None and not callable(clock_ms):
            raise PolicyError(f"clock_ms: {clock_ms!r} is no function")
        self._clock_ms = clock_ms or monotonic_ms
        self._shared = SharedWorkers({tenant.name: tenant.share for tenant in given})
        self._arrivals: dict[str, list[float]] = {name: [] for name in self.tenants}
        self._serves = dict.fromkeys(self.tenants, frozenset(range(workers)))
        self._started_ms = self._planned_ms = self._clock_ms()
        self.plans: deque[tuple[float, Grouping]] = deque(maxlen=_KEPT_PLANS)
        if period_ms is not None:
            check_positive(period_ms, "period_ms")
            self._grouping(dict.fromkeys(self.tenants, 0.0), {})  # refuse what cannot be planned at once
        self._batchers: dict[str, Batcher] = {}
        try:
            for tenant in given:
                self._batchers[tenant.name] = Batcher(
                    [tenant.engine] * workers,
                    policy=tenant.policy,
                    table=tenant.table,
                    slo_ms=tenant.slo_ms,
                    max_queue=tenant.max_queue,
                    shared=(self._shared, tenant.name),
                    **{"clock_ms": self._clock_ms, **tenant.options},
                )
        except BaseException:
            for batcher in self._batchers.values():
                batcher.close()
            raise
        self._planner: PeriodicCall | None = None
        if period_ms is not None:
            self._planner = PeriodicCall(self._plan_now, period_ms / 1e3, "subnetact-tenants-planner")

    def submit(self, tenant: str, x: Any, deadline_ms: float, **options: Any) -> AnswerFuture:
        """Queue one input for a tenant, from any thread.

        Args:
            tenant: the name of the tenant.
            x: one input, as its engine's `check` accepts it.
            deadline_ms: time that the request is given from now, ms.
            options: further arguments of `Batcher.submit`.

        Returns:
            A future of the `Answer`; see `Batcher.submit`.

        Raises:
            PolicyError: There is no such tenant.
            InvalidRequest: An argument is invalid.
            QueueFull: The tenant has `max_queue` waiting requests.
            BatcherClosed: The batcher is closed or draining.
        """
        batcher = self._of(tenant)
        future = batcher.submit(x, deadline_ms, **options)
        self._note(tenant)
        return future

    async def infer(self, tenant: str, x: Any, deadline_ms: float, **options: Any) -> Answer:
        """Queue one input for a tenant and wait for its answer; see `submit` and `Batcher.infer`.

        Args:
            tenant: the name of the tenant.
            x: one input.
            deadline_ms: time that the request is given from now, ms.
            options: further arguments of `Batcher.infer`.

        Returns:
            The answer.

        Raises:
            RequestError: As in `Batcher.infer`.
            PolicyError: There is no such tenant.
        """
        batcher = self._of(tenant)
        self._note(tenant)
        return await batcher.infer(x, deadline_ms, **options)

    def _of(self, tenant: str) -> Batcher:
        if tenant not in self._batchers:
            raise PolicyError(
                f"tenant: {tenant!r} is none; choose from {', '.join(map(repr, self._batchers))}"
            )
        return self._batchers[tenant]

    def _note(self, tenant: str) -> None:
        if self._planner is not None and len(self._arrivals[tenant]) < _KEPT:
            self._arrivals[tenant].append(self._clock_ms())

    def stats(self) -> dict[str, TenantStats]:
        """Return a snapshot of every tenant."""
        errors = 0 if self._planner is None else self._planner.errors
        return {
            name: TenantStats(
                batcher.stats(), tuple(sorted(self._serves[name])), self._shared.turns.used_ms[name], errors
            )
            for name, batcher in self._batchers.items()
        }

    def batcher(self, tenant: str) -> Batcher:
        """Return the batcher of a tenant, for its metrics and corrections.

        `Collector(batcher.batcher(name), prefix=...)` puts the metrics of several tenants into one registry.

        Args:
            tenant: the name of the tenant.

        Raises:
            PolicyError: There is no such tenant.
        """
        return self._of(tenant)

    # -- planning --------------------------------------------------------------------------------

    def plan(self) -> Grouping:
        """Plan at once from the arrivals since the last plan, and apply the plan.

        Returns:
            The plan.

        Raises:
            PolicyError: The batcher was opened without `period_ms`, so it has not noted arrivals.
            MissingExtra: scipy is not installed.
        """
        if self._planner is None:
            raise PolicyError(
                "period_ms: the batcher was opened without it, so arrivals were not noted; give a period_ms"
            )
        return self._plan_now()

    def _plan_now(self) -> Grouping:
        with self._planning:
            return self._planned()

    def _planned(self) -> Grouping:
        now = self._clock_ms()
        took_s, self._planned_ms = max((now - self._planned_ms) / 1e3, 1e-6), now
        rates, spread = {}, {}
        for name in self.tenants:
            times, self._arrivals[name] = self._arrivals[name], []
            rates[name] = len(times) / took_s
            gaps = np.diff(times)
            spread[name] = float(np.var(gaps) / np.mean(gaps) ** 2) if len(gaps) > 2 and gaps.any() else 1.0
        grouping = self._grouping(rates, spread)
        self._apply(grouping)
        self.plans.append(((now - self._started_ms) / 1e3, grouping))
        return grouping

    def _grouping(self, rates: dict[str, float], spread: dict[str, float]) -> Grouping:
        streams = []
        for name, tenant in self.tenants.items():
            capacity = tenant.capacity_qps
            rate = max(rates[name], _LEAST_LOAD * capacity)
            streams.append(Stream(rate, capacity, spread.get(name, 1.0), tenant.memory_mb))
        return group_streams(streams, self._workers, self._groups, self._memory_mb, self._burst_weight)

    def _apply(self, grouping: Grouping) -> None:
        """Give every group its workers, with as few moves as possible."""
        members: dict[int, list[str]] = {}
        for name, group in zip(self.tenants, grouping.group_of, strict=True):
            members.setdefault(group, []).append(name)
        free = set(range(self._workers))
        for group in sorted(members, key=lambda group: -grouping.workers[group]):
            names = members[group]
            before = Counter(worker for name in names for worker in self._serves[name])
            wanted = sorted(free, key=lambda worker: (-before[worker], worker))[: grouping.workers[group]]
            free -= set(wanted)
            chosen = wanted or range(self._workers)  # no group stays without a worker
            for name in names:
                self._serves[name] = frozenset(chosen)
        for name, batcher in self._batchers.items():
            batcher.assign(self._serves[name])

    def close(self, drain: bool = True) -> None:
        """Refuse new requests, finish those that wait, and end all threads; see `Batcher.close`.

        In a callback of a future it does not wait.

        Args:
            drain: whether to serve the requests that wait.
        """
        for batcher in self._batchers.values():
            batcher.drain(0.0)
        if close_elsewhere(self._batchers.values(), partial(self.close, drain)):
            return
        if self._planner is not None:
            self._planner.stop()
        for batcher in self._batchers.values():
            batcher.close(drain)
