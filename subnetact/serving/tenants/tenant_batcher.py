"""`TenantBatcher`: serves several supernets on the same workers, each with its share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.answers import Answer, AnswerFuture
from subnetact.serving.live.batcher import Batcher, close_elsewhere
from subnetact.serving.live.context_manager import ClosedOnExit
from subnetact.serving.live.prometheus import Collector
from subnetact.serving.live.runner import Runner
from subnetact.serving.live.stats import BatcherStats
from subnetact.serving.live.turns import Turns
from subnetact.serving.scheduling.checks import by_name, check_count, check_time
from subnetact.serving.scheduling.context import Policy


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
        options: further arguments of its `Batcher`, such as `max_queue`.
    """

    name: str
    engine: Runner
    slo_ms: float
    table: LatencyTable | None = None
    policy: Policy | None = None
    share: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TenantStats:
    """A snapshot of one tenant.

    Attributes:
        batcher: the counters of its batcher.
        used_ms: the time that it used on all workers together, ms.
    """

    batcher: BatcherStats
    used_ms: float


class _Sharing(Batcher):
    """The batcher of one tenant, on the workers of all."""

    def __init__(self, shared: tuple[Turns, str], engine: Sequence[Runner], **options: Any) -> None:
        self._shared = shared
        super().__init__(engine, **options)


class TenantBatcher(ClosedOnExit):
    """Serves several supernets on the same workers.

    Every tenant has its own queue, policy and limits. If several want a worker, its time is divided by their
    shares, batch by batch; what one does not use, the others may. So a flood of requests for one tenant
    delays another one by at most one batch per turn.

    Args:
        tenants: the tenants.
        workers: number of workers.

    Attributes:
        batchers: the batcher of every tenant, by name.

    Raises:
        PolicyError: an argument is out of range, or two tenants have the same name.
        ProfileMismatch: a table is of other subnets than its engine.

    Example:
        >>> tenants = [Tenant("digits", digits, 20.0, table), Tenant("faces", faces, 50.0, other)]
        >>> with TenantBatcher(tenants, workers=2) as batcher:
        ...     answer = batcher.submit("digits", x, deadline_ms=20.0).result()
    """

    def __init__(self, tenants: Sequence[Tenant], workers: int = 1) -> None:
        given = by_name(tenants, Tenant, "tenants", PolicyError)
        check_count(workers, "workers")
        shares = {name: check_time(one.share, f"tenant {name!r}: share") for name, one in given.items()}
        self._turns = Turns(shares)
        self.batchers: dict[str, Batcher] = {}
        with ExitStack() as opened:  # those that are open already are closed if another one cannot be opened
            for tenant in given.values():
                batcher = _Sharing(
                    (self._turns, tenant.name),
                    [tenant.engine] * workers,
                    policy=tenant.policy,
                    table=tenant.table,
                    slo_ms=tenant.slo_ms,
                    **tenant.options,
                )
                self.batchers[tenant.name] = opened.enter_context(batcher)
            opened.pop_all()

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
        used_ms = self._turns.used_ms
        return {name: TenantStats(one.stats(), used_ms[name]) for name, one in self.batchers.items()}

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
            raise PolicyError(
                f"tenant: {tenant!r} is none; choose from {', '.join(map(repr, self.batchers))}"
            )
        return self.batchers[tenant]

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
        for batcher in self.batchers.values():
            batcher.close(drain)
