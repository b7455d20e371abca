"""`TenantBatcher`: serves several supernets on the same workers, with shares and periodic planning."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from subnetact.errors import PolicyError, failure_text
from subnetact.files.fork import new_lock
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.answers import Answer, AnswerFuture
from subnetact.serving.live.batcher import Batcher, close_elsewhere, monotonic_ms
from subnetact.serving.live.context_manager import ClosedOnExit
from subnetact.serving.live.driver import SharedWorkers
from subnetact.serving.live.prometheus import Collector
from subnetact.serving.live.runner import Runner
from subnetact.serving.live.stats import BatcherStats
from subnetact.serving.planning.herd import Grouping, Stream, group_streams
from subnetact.serving.scheduling.checks import check_count, check_margin, check_positive, check_time
from subnetact.serving.scheduling.context import Policy
from subnetact.spec import grouped

_log = logging.getLogger(__name__)
_LEAST_LOAD = 1e-3
"""A tenant counts as this many workers at least, so that its group always has one."""
_KEPT_PLANS = 1000


@dataclass(frozen=True)
class Tenant:
    """One supernet of a `TenantBatcher`.

    Attributes:
        name: the name; every tenant has its own.
        engine: the runner of its subnets.
        slo_ms: the time that its requests are given, ms, if they name none.
        table: its latency table; if None, the policy's.
        policy: chooses its subnets and batch sizes; if None, `HullFit` over the table.
        share: its weight when tenants compete for the workers; one of 2 gets twice the time of one of 1; > 0.
        max_queue: number of its waiting requests at which further ones are refused.
        memory_mb: memory, MiB, that it takes on every worker that serves it.
        options: further arguments of its `Batcher`.

    Raises:
        PolicyError: an argument is out of range, or there is neither a table nor a policy.
    """

    name: str
    engine: Runner
    slo_ms: float
    table: LatencyTable | None = None
    policy: Policy | None = None
    share: float = 1.0
    max_queue: int = 10_000
    memory_mb: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_time(self.slo_ms, "slo_ms")
        check_time(self.share, f"tenant {self.name!r}: share")
        check_margin(self.memory_mb, f"tenant {self.name!r}: memory_mb")
        if self.table is None and self.policy is None:
            raise PolicyError(f"tenant {self.name!r}: neither a table nor a policy; give one of them")

    @property
    def capacity_qps(self) -> float:
        """Requests per second that one worker answers within the SLO, on the subnet with the most."""
        table: Any = self.table or self.policy.table  # type: ignore[union-attr]
        fits = np.where(table.latency_ms <= self.slo_ms, table.latency_ms, np.nan)
        per_ms = np.array(table.batch_sizes) / (fits if np.isfinite(fits).any() else table.latency_ms)
        return float(np.nanmax(per_ms)) * 1e3


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


class _Sharing(Batcher):
    """The batcher of one tenant, on the workers of all."""

    def __init__(self, shared: tuple[SharedWorkers, str], engine: Sequence[Runner], **options: Any) -> None:
        self._shared = shared
        super().__init__(engine, **options)


class TenantBatcher(ClosedOnExit):
    """Serves several supernets on the same workers.

    Every tenant has its own queue, policy and limits. If several want a worker, its time is divided by their
    shares, batch by batch; what one does not use, the others may. So a flood of requests for one tenant
    delays another one by at most one batch per turn.

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
        clock_ms: a monotonic clock, ms, for turns, plans and the tenants' batchers. If None, that of
            `Batcher`.

    Attributes:
        batchers: the batcher of every tenant, by name.
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
        clock_ms: Callable[[], float] | None = None,
    ) -> None:
        given = list(tenants)
        if not given or not all(isinstance(tenant, Tenant) for tenant in given):
            raise PolicyError("tenants: give at least one Tenant(...)")
        self.tenants = {tenant.name: tenant for tenant in given}
        for name, count in Counter(tenant.name for tenant in given).items():
            if count > 1:
                raise PolicyError(f"tenants: two are called {name!r}; give each a name of its own")
        self._workers = check_count(workers, "workers")
        self._groups = min(len(given), workers) if groups is None else check_count(groups, "groups")
        self._memory_mb = memory_mb
        self._clock_ms = clock_ms or monotonic_ms
        self._shared = SharedWorkers({tenant.name: tenant.share for tenant in given})
        self._serves = dict.fromkeys(self.tenants, frozenset(range(workers)))
        self._planned = dict.fromkeys(self.tenants, 0)  # the requests submitted before the last plan
        self._planning = new_lock()
        self._planning_errors = 0
        self._stopped = threading.Event()
        self.plans: deque[tuple[float, Grouping]] = deque(maxlen=_KEPT_PLANS)
        if period_ms is not None:
            check_positive(period_ms, "period_ms")
            self._grouping(dict.fromkeys(self.tenants, 0.0))  # refuse what cannot be planned at once
        self.batchers: dict[str, Batcher] = {}
        with ExitStack() as opened:  # those that are open already are closed if another one cannot be opened
            for tenant in given:
                batcher = _Sharing(
                    (self._shared, tenant.name),
                    [tenant.engine] * workers,
                    policy=tenant.policy,
                    table=tenant.table,
                    slo_ms=tenant.slo_ms,
                    max_queue=tenant.max_queue,
                    **{"clock_ms": self._clock_ms, **tenant.options},
                )
                self.batchers[tenant.name] = opened.enter_context(batcher)
            self._started_ms = self._planned_ms = self._clock_ms()
            opened.pop_all()
        self._planner: threading.Thread | None = None
        if period_ms is not None:
            self._planner = threading.Thread(
                target=self._plan_each, args=(period_ms / 1e3,), name="subnetact-tenants-planner", daemon=True
            )
            self._planner.start()

    def submit(self, tenant: str, x: Any, deadline_ms: float | None = None, **options: Any) -> AnswerFuture:
        """Queue one input for a tenant, from any thread.

        Args:
            tenant: the name of the tenant.
            x: one input, as its engine's `check` accepts it.
            deadline_ms: time that the request is given from now, ms. If None, the tenant's `slo_ms`.
            options: further arguments of `Batcher.submit`.

        Returns:
            A future of the `Answer`; see `Batcher.submit`.

        Raises:
            PolicyError: There is no such tenant.
            RequestError: The request is refused; see `Batcher.submit`.
        """
        return self.batcher(tenant).submit(x, deadline_ms, **options)

    async def infer(self, tenant: str, x: Any, deadline_ms: float | None = None, **options: Any) -> Answer:
        """Queue one input `x` for a `tenant` with `deadline_ms` and `options`, and return its answer.

        Raises:
            RequestError: As in `Batcher.infer`.
            PolicyError: There is no such tenant.
        """
        return await self.batcher(tenant).infer(x, deadline_ms, **options)

    def stats(self) -> dict[str, TenantStats]:
        """Return a snapshot of every tenant."""
        used_ms, errors = self._shared.turns.used_ms, self._planning_errors
        return {
            name: TenantStats(batcher.stats(), tuple(sorted(self._serves[name])), used_ms[name], errors)
            for name, batcher in self.batchers.items()
        }

    def prometheus(self) -> str:
        """Return the metrics of all tenants in Prometheus' text format, with the label `tenant`.

        A process that has a registry of its own registers `Collector(batcher.batchers, label="tenant")`.

        Raises:
            MissingExtra: prometheus_client is not installed.
        """
        return Collector(self.batchers, label="tenant").text()

    def batcher(self, tenant: str) -> Batcher:
        """Return the batcher of a `tenant`, for its metrics and corrections.

        Raises:
            PolicyError: There is no such tenant.
        """
        if tenant not in self.batchers:
            raise PolicyError(f"tenant: {tenant!r} is none; choose from {', '.join(map(repr, self.tenants))}")
        return self.batchers[tenant]

    # -- planning --------------------------------------------------------------------------------

    def plan(self) -> Grouping:
        """Plan at once from the arrivals since the last plan, and return the plan after it was applied.

        Raises:
            PolicyError: The models do not fit into the memory.
            MissingExtra: scipy is not installed.
        """
        with self._planning:
            now = self._clock_ms()
            took_s, self._planned_ms = max((now - self._planned_ms) / 1e3, 1e-6), now
            rates = {}
            for name, batcher in self.batchers.items():
                before, self._planned[name] = self._planned[name], batcher.stats().submitted
                rates[name] = (self._planned[name] - before) / took_s
            grouping = self._grouping(rates)
            self._apply(grouping)
            self.plans.append(((now - self._started_ms) / 1e3, grouping))
            return grouping

    def _plan_each(self, period_s: float) -> None:
        logged = ""
        while not self._stopped.wait(period_s):
            try:
                self.plan()
            except Exception as error:
                self._planning_errors += 1
                if (text := failure_text(error)) != logged:
                    logged = text
                    _log.exception("the planner of the tenants goes on after an error")

    def _grouping(self, rates: dict[str, float]) -> Grouping:
        streams = []
        for name, tenant in self.tenants.items():
            capacity = tenant.capacity_qps
            rate = max(rates[name], _LEAST_LOAD * capacity)
            streams.append(Stream(rate, capacity, tenant.memory_mb))
        return group_streams(streams, self._workers, self._groups, self._memory_mb)

    def _apply(self, grouping: Grouping) -> None:
        """Give every group its workers, with as few moves as possible."""
        members = grouped(zip(grouping.group_of, self.tenants, strict=True))
        free = set(range(self._workers))
        for group in sorted(members, key=lambda group: -grouping.workers[group]):
            names = members[group]
            before = Counter(worker for name in names for worker in self._serves[name])
            wanted = sorted(free, key=lambda worker: (-before[worker], worker))[: grouping.workers[group]]
            free -= set(wanted)
            chosen = wanted or range(self._workers)  # no group stays without a worker
            for name in names:
                self._serves[name] = frozenset(chosen)
        for name, batcher in self.batchers.items():
            batcher.assign(self._serves[name])

    def close(self, drain: bool = True) -> None:
        """Refuse new requests, finish those that wait, and end all threads; see `Batcher.close`.

        In a callback of a future it does not wait.

        Args:
            drain: whether to serve the requests that wait.
        """
        for batcher in self.batchers.values():
            batcher.drain(0.0)
        if close_elsewhere(self.batchers.values(), partial(self.close, drain)):
            return
        self._stopped.set()
        if self._planner is not None:
            self._planner.join()
        for batcher in self.batchers.values():
            batcher.close(drain)
