"""`Tenant`: one supernet among several that share workers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.runner import Runner
from subnetact.serving.scheduling.checks import check_time
from subnetact.serving.scheduling.context import Policy

__all__ = ["Tenant"]


@dataclass(frozen=True)
class Tenant:
    """One supernet of a `TenantBatcher`.

    Attributes:
        name: the name; every tenant has its own.
        engine: the runner of its subnets.
        slo_ms: the usual time that its requests are given, ms.
        table: its latency table; if None, the policy's.
        policy: chooses its subnets and batch sizes; if None, `HullFit` over the table. A policy for a table
            with co-runners (`Veltair`) follows how much the other tenants slow this one down.
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
        for name, value, least in (("share", self.share, 1e-9), ("memory_mb", self.memory_mb, 0.0)):
            if not (math.isfinite(value) and value >= least):
                raise PolicyError(
                    f"tenant {self.name!r}: {name} {value} must be finite and at least {least:g}"
                )
        if self.table is None and self.policy is None:
            raise PolicyError(f"tenant {self.name!r}: neither a table nor a policy; give one of them")

    @property
    def latencies(self) -> LatencyTable:
        """The latency table."""
        if self.table is not None:
            return self.table
        return self.policy.table  # type: ignore[union-attr]

    @property
    def capacity_qps(self) -> float:
        """Requests per second that one worker answers within the SLO, on the subnet with the most."""
        table = self.latencies
        fits = np.where(table.latency_ms <= self.slo_ms, table.latency_ms, np.nan)
        per_ms = np.array(table.batch_sizes) / (fits if np.isfinite(fits).any() else table.latency_ms)
        return float(np.nanmax(per_ms)) * 1e3
