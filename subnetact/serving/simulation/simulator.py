"""A discrete-event simulator that runs the same queue and policy objects as the live batcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import expired_rule
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.simulation.event_loop import EventLoop
from subnetact.serving.simulation.preemptive_loop import PreemptiveLoop
from subnetact.serving.simulation.result import SimulationResult
from subnetact.serving.simulation.scenario import CoRunner, Scenario, WorkerEvent

__all__ = ["CoRunner", "WorkerEvent", "simulate"]


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
    switch_ms: float = 0.0,
    events: Sequence[WorkerEvent] = (),
    co_runners: Sequence[CoRunner] = (),
    resume: bool = False,
    blocks: int = 1,
    decisions: bool = False,
    requests: bool = False,
    progress: bool = True,
    hopeless: str | None = None,
) -> SimulationResult:
    """Run a policy over a trace of arrivals; exactly reproducible from its arguments.

    Rules: one earliest-deadline-first queue; everything that has arrived by time t is queued before the
    decision at t; the lowest-numbered idle worker goes first; a batch of k runs for the latency of the
    smallest profiled batch size >= k; nothing waits for a fuller batch. The policy sees expected times
    only: noise, overhead and co-runners are hidden from it.

    Args:
        arrivals_ms: shape (n,), ascending.
        table: the latencies batches really take; its subnets and batch sizes are those of `policy.table`.
        policy: decides; see `subnetact.serving.context.Policy`.
        slo_ms: time each request is given, a number or shape (n,).
        workers: how many; worker ids are 0 to workers - 1.
        expired: what happens to expired requests, which no subnet can answer in time any more: `drop` removes
            them, `defer` serves them when nothing else waits, `serve` keeps them at the head of the queue.
        noise: standard deviation of a factor (mean 1, at least 0.1) on every real latency.
        overhead_ms: added to every real latency.
        min_accuracy: floor in percent, a number or shape (n,); None or 0 accepts any subnet.
        seed: of the noise.
        switch_ms: added when a worker's subnet differs from its last one; at least `policy.switch_ms`.
        events: workers that go down or come up at given times. A batch on a dying worker is requeued.
        co_runners: periods in which co-runners use the devices; they need a table with a co-runner dimension.
        resume: a preempted batch is finished later instead of starting anew.
        blocks: a preempted batch keeps its complete blocks, of so many equal ones (with `resume`).
        decisions: keep every decision in `result.decisions`.
        requests: keep the fate of every request in `result.log`.
        progress: if True, show a progress bar when standard error is a terminal and the simulation takes
            more than a second.

    Raises:
        TraceError: unsorted, NaN or no arrivals, or SLOs and floors that fit neither them nor the table.
        PolicyError: a setting out of range, or a policy that answers with something that cannot run.
        ProfileMismatch: the policy was made for another table.
    """
    scenario = Scenario.checked(
        arrivals_ms,
        table,
        policy,
        slo_ms,
        workers,
        min_accuracy,
        noise,
        overhead_ms,
        switch_ms,
        events,
        co_runners,
    )
    reset: Any = getattr(policy, "reset", None)
    if reset is not None:
        reset()
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {
        "expired": expired_rule(expired, hopeless),
        "rng": rng,
        "decisions": decisions,
        "requests": requests,
        "progress": progress,
    }
    if hasattr(policy, "preempt"):
        return PreemptiveLoop(scenario, resume=resume, blocks=blocks, **options).run()
    return EventLoop(scenario, **options).run()
