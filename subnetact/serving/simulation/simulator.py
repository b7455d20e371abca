"""`simulate`: runs a policy over a trace with the same queue and policy objects as the live batcher."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import PolicyError, TraceError
from subnetact.latency.arrays import Floats
from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import check_count, check_margin, check_policy, too_short
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.scheduling.fair_shares import FairShares
from subnetact.serving.scheduling.floors import Floors
from subnetact.serving.scheduling.scheduler import Scheduler
from subnetact.serving.simulation.event_loop import EventLoop, WorkerEvent, arriving, noise_factors
from subnetact.serving.simulation.result import RequestLog, SimulationResult
from subnetact.serving.simulation.traces import checked_arrivals, numeric_arguments

__all__ = ["WorkerEvent", "simulate"]

MOST_WORKERS = 65_536


def simulate(
    arrivals_ms: npt.ArrayLike,
    table: LatencyTable,
    policy: Policy,
    slo_ms: float | npt.ArrayLike,
    workers: int = 1,
    expired: str = "drop",
    noise: float = 0.0,
    overhead_ms: float = 0.0,
    min_accuracy: float | npt.ArrayLike | None = None,
    seed: int = 0,
    *,
    priority: int | npt.ArrayLike = 0,
    clients: Sequence[str] | None = None,
    shares: FairShares | None = None,
    events: Sequence[WorkerEvent] = (),
    blocks: int = 1,
    look_ms: float = 0.0,
    decisions: bool = False,
    requests: bool = False,
    progress: bool = True,
) -> SimulationResult:
    """Simulate a policy on a trace of arrivals.

    Rules of the simulation:

    * There is one earliest-deadline-first queue. Everything that has arrived by time t is in the queue before
      the decision at t.
    * Among idle workers the one with the lowest number decides first.
    * A batch of k requests takes the latency of the smallest profiled batch size >= k.
    * No worker waits for a fuller batch, unless the policy answers None.
    * The policy sees expected latencies only; noise and overhead are hidden from it.
    * A worker that changes its subnet is busy for `policy.switch_ms` longer, if the policy has that.

    The result depends only on the arguments.

    Args:
        arrivals_ms: arrival times, ms, ascending, shape (n,).
        table: the latencies that batches take. Its subnets and batch sizes are those of `policy.table`.
        policy: decides which subnet and batch size run; see `Policy`.
        slo_ms: time from arrival to deadline, ms, one number or shape (n,).
        workers: number of workers; they are numbered from 0.
        expired: what happens to expired requests, which no subnet can answer in time any more: `drop` removes
            them, `defer` serves them when nothing else waits, `serve` keeps them at the head of the queue.
        noise: standard deviation of a random factor (mean 1, at least 0.1) on every latency.
        overhead_ms: time added to every latency, ms.
        min_accuracy: minimum accuracy, percent, one number or shape (n,). If None or 0, requests accept any
            subnet.
        seed: seed of the noise.
        priority: as in `Batcher.submit`, one number or shape (n,).
        clients: name of the client of every request. If None, they have none.
        shares: how clients share the workers' time. If None, they do not.
        events: times at which workers go down or come up. Every request of a worker that goes down gets a
            second try, alone, if its deadline allows, as in `Batcher`.
        blocks: a batch consists of this many equal layer blocks. Between two of them a policy that preempts
            may let an urgent batch go first; the same worker continues the suspended one afterwards.
        look_ms: time that a batch of such a policy loses between two blocks, ms. Like the overhead, it is
            hidden from the policy.
        decisions: whether to keep every decision in `result.decisions`.
        requests: whether to keep the outcome of every request in `result.log`.
        progress: if True, show a progress bar when standard error is a terminal and the simulation takes
            more than a second.

    Returns:
        What was counted, with SLO attainment and mean accuracy as properties.

    Raises:
        TraceError: the arrivals are empty, not finite or not ascending, or the SLOs, minimum accuracies,
            or events do not fit them or the table.
        PolicyError: a setting is out of range, or the policy answered with something that cannot run.
        ProfileMismatch: the policy was made for another table.
        TableError: the accuracy of a subnet is not known.

    Example:
        `result = simulate(arrivals_ms, table, SlackFit(table, slo_ms=36.0), slo_ms=36.0, workers=8)`
    """
    with numeric_arguments():
        arrivals = checked_arrivals(arrivals_ms)
        count = len(arrivals)
        check_policy(policy, table)
        if check_count(workers, "workers") > MOST_WORKERS:
            raise PolicyError(f"workers: {workers:.3g} are more than {MOST_WORKERS}")
        slo = _per_request(slo_ms, count, "slo_ms")
        if (least := float(np.min(slo))) < table.fastest_ms:
            raise TraceError(too_short(least, table))
        asked = _per_request(0.0 if min_accuracy is None else min_accuracy, count, "min_accuracy")
        floors = Floors(table)
        if (most := float(np.max(asked))) > floors.best:
            raise floors.unreachable(most, TraceError)
        if clients is not None and len(clients) != count:
            raise TraceError(f"clients: {len(clients)} names; give one per request ({count})")
        changes = [WorkerEvent(float(t_ms), int(worker), bool(up)) for t_ms, worker, up in events]
        for change in changes:
            if not math.isfinite(change.t_ms) or not 0 <= change.worker < workers:
                raise TraceError(f"events: {change} needs a finite time and a worker from 0 to {workers - 1}")
        ranks = _per_request(priority, count, "priority", least=-(2.0**53)).astype(np.int64)
        rng = np.random.default_rng(seed)
    result = SimulationResult(count, served_by=[0] * len(table.subnets))
    result.decisions = [] if decisions else None
    result.log = RequestLog.empty(count) if requests else None
    how: Any = {"slo_ms": float(np.median(slo)), "expired": expired, "shares": shares}
    return EventLoop(
        policy,
        Scheduler(policy, [table], workers=workers, watchdog_ms=math.inf, **how),
        arriving(clients, arrivals, slo, floors.of_all(asked), ranks),
        result,
        factors=noise_factors(check_margin(noise, "noise"), rng),
        overhead_ms=check_margin(overhead_ms, "overhead_ms"),
        events=changes,
        blocks=check_count(blocks, "blocks"),
        look_ms=check_margin(look_ms, "look_ms"),
        progress=progress,
    ).run()


def _per_request(values: npt.ArrayLike, count: int, name: str, least: float = 0.0) -> Floats:
    given = np.asarray(values, dtype=np.float64)
    if given.ndim > 1 or (given.ndim == 1 and len(given) != count):
        raise TraceError(f"{name}: shape {given.shape}; give one number, or one per request ({count})")
    if not np.isfinite(given).all() or given.min() < least:
        raise TraceError(f"{name}: every value must be finite and >= {least:g}")
    return given
