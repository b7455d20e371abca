"""`simulate`: runs a policy over a trace with the same queue and policy objects as the live batcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.latency.table import LatencyTable
from subnetact.serving.scheduling.checks import expired_rule
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.simulation.block_loop import BlockLoop
from subnetact.serving.simulation.event_loop import EventLoop
from subnetact.serving.simulation.preemptive_loop import PreemptiveLoop
from subnetact.serving.simulation.result import SimulationResult
from subnetact.serving.simulation.scenario import CoRunner, Scenario, WorkerEvent, numeric_arguments

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
    look_ms: float = 0.0,
    decisions: bool = False,
    requests: bool = False,
    progress: bool = True,
    hopeless: str | None = None,
) -> SimulationResult:
    """Simulate a policy on a trace of arrivals.

    Rules of the simulation:

    * There is one earliest-deadline-first queue. Everything that has arrived by time t is in the queue before
      the decision at t.
    * Among idle workers the one with the lowest number decides first.
    * A batch of k requests takes the latency of the smallest profiled batch size >= k.
    * No worker waits for a fuller batch, unless the policy answers None.
    * The policy sees expected latencies only; noise, overhead and co-runners are hidden from it.

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
        switch_ms: time added, ms, when a worker changes its subnet. If `policy.switch_ms` is longer, that is
            used.
        events: times at which workers go down or come up. The batch of a worker that goes down returns to
            the queue.
        co_runners: periods in which co-runners use the devices; they need a table with a co-runner dimension.
        resume: if True, a preempted batch stops at the end of its block, and the same worker continues it
            after the urgent batch, as the live batcher does; if False, it stops at once, its requests return
            to the queue, and its work is lost.
        blocks: with `resume`, a batch consists of this many equal layer blocks.
        look_ms: with `resume`, time that a batch loses wherever it could look at the queue, between two
            blocks, ms. Like the overhead, it is hidden from the policy.
        decisions: whether to keep every decision in `result.decisions`.
        requests: whether to keep the outcome of every request in `result.log`.
        progress: if True, show a progress bar when standard error is a terminal and the simulation takes
            more than a second.
        hopeless: former name of `expired`.

    Returns:
        What was counted, with SLO attainment and mean accuracy as properties.

    Raises:
        TraceError: the arrivals are empty, not finite or not ascending, or the SLOs, minimum accuracies,
            events or co-runners do not fit them or the table.
        PolicyError: a setting is out of range, or the policy answered with something that cannot run.
        ProfileMismatch: the policy was made for another table.
        TableError: the accuracy of a subnet is not known.

    Example:
        `result = simulate(arrivals_ms, table, SlackFit(table, slo_ms=36.0), slo_ms=36.0, workers=8)`
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
    with numeric_arguments():
        rng = np.random.default_rng(seed)
    options: dict[str, Any] = {
        "expired": expired_rule(expired, hopeless),
        "rng": rng,
        "decisions": decisions,
        "requests": requests,
        "progress": progress,
    }
    if hasattr(policy, "preempt"):
        if resume:
            return BlockLoop(scenario, blocks=blocks, look_ms=look_ms, **options).run()
        return PreemptiveLoop(scenario, **options).run()
    return EventLoop(scenario, **options).run()
