"""What is served, and how: a bundle or the demo, its latency table, and the settings of its batcher."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from subnetact import __version__
from subnetact.elastic.folder import BUNDLE, INDEX
from subnetact.engine.engine import Engine
from subnetact.errors import FileFormatError, TableError
from subnetact.latency.origin import doubts, scheduling_table
from subnetact.latency.table import LatencyTable
from subnetact.profile.source import build_model
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.policies.registry import make_policy
from subnetact.serving.scheduling.fair_shares import FairShares


@dataclass(frozen=True)
class Source:
    """What is served, and how; plain values, so that a source can be sent to other processes.

    Attributes:
        bundle: folder of a saved engine. If None, the supernet for digits of the package.
        model: `PKG.MOD:FACTORY`, the function that builds the bundle's own network.
        constructor: arguments of that function.
        table: file of a latency table. If None, the bundle's, or a new profile.
        policy: name of the policy, for example `hullfit`.
        slo_ms: the deadline of requests that name none, in ms.
        workers: number of workers that run batches.
        processes: whether the workers are processes, which do not share an interpreter with HTTP.
        threads_per_worker: number of CPU threads of every worker.
        max_queue: number of waiting requests beyond which further requests are refused.
        fair: whether clients share the workers' time.
        checksum: checksum of the bundle. If given, another bundle at the same place is refused.
    """

    bundle: str | None = None
    model: str | None = None
    constructor: Mapping[str, Any] = field(default_factory=dict)
    table: str | None = None
    policy: str = "hullfit"
    slo_ms: float = 36.0
    workers: int = 1
    processes: bool = False
    threads_per_worker: int = 1
    max_queue: int = 2000
    fair: bool = False
    checksum: str | None = None

    def pinned(self) -> Source:
        """Return a source of the bundle as it is now, so that processes that start later serve the same."""
        return replace(self, checksum=_checksum(self.bundle))

    def engine(self, mapped: bool = False) -> Engine:
        """Load the engine; if `mapped`, all processes of a machine share its weights in the bundle's file."""
        if self.bundle is None:
            from subnetact.serve.digits_engine import digits_engine

            return digits_engine()
        supernet = build_model(self.model, self.constructor, bundled=True) if self.model else None
        engine = Engine.load(self.bundle, supernet=supernet, mapped=mapped)
        if self.checksum is not None and _checksum(self.bundle) != self.checksum:
            raise FileFormatError(
                f"bundle {self.bundle}: it was replaced after the service began; start the service again"
            )
        return engine

    def latency_table(self, engine: Engine) -> LatencyTable:
        """Return the table to schedule by: a file, the bundle's `scheduler`, its first, or a profile."""
        table = scheduling_table(engine.tables) if self.table is None else LatencyTable.load(self.table)
        if table is None:
            from subnetact.serve.digits_engine import profiled

            table = profiled(engine)
        elif not all(map(math.isfinite, table.accuracy)):
            raise TableError("table: it lacks accuracies, which policies need; give a --table that has them")
        return table

    def summary(self, engine: Engine, table: LatencyTable) -> str:
        """Return what is served, how, and where its latencies were measured, in one line."""
        percent, what = table.accuracy, "the demo" if self.bundle is None else f"bundle {self.bundle}"
        origin = doubts(table, engine, self.threads_per_worker) or "measured on this machine"
        return (
            f"subnetact {__version__}: {what}, fingerprint {engine.fingerprint}, {len(engine.ids)} subnets "
            f"of {min(percent):.2f} to {max(percent):.2f} %, slo_ms {self.slo_ms:g}, workers {self.workers}; "
            f"latencies: {origin}"
        )

    def batcher(self, runners: Any | Sequence[Any], table: LatencyTable) -> Batcher:
        """Open a batcher of the engine, or of one runner per worker."""
        return Batcher(
            runners,
            workers=self.workers,
            process=self.processes,
            threads_per_worker=self.threads_per_worker,
            check_finite=True,
            policy=make_policy(self.policy, table, self.slo_ms),
            slo_ms=self.slo_ms,
            max_queue=self.max_queue,
            shares=FairShares() if self.fair else None,
        )


def _checksum(bundle: str | None) -> str | None:
    return None if bundle is None else str(BUNDLE.read(Path(bundle) / INDEX)["checksum"])
