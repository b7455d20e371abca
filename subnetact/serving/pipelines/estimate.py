"""`estimate_pipeline`: simulates a pipeline stage by stage.

A stage never slows down those before it, so the stages are simulated one after the other, each by the loop of
`simulate`: the answers of one stage are the arrivals of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import PipelineError
from subnetact.latency.table import LatencyTable
from subnetact.serving.pipelines.model import PipelineModel, StageChoice
from subnetact.serving.policies import HullFit
from subnetact.serving.scheduling.checks import expired_rule
from subnetact.serving.scheduling.context import Policy
from subnetact.serving.simulation.event_loop import EventLoop
from subnetact.serving.simulation.result import SimulationResult
from subnetact.serving.simulation.scenario import Scenario, checked_arrivals, numeric_arguments

__all__ = ["PipelineEstimate", "StageEstimate", "estimate_pipeline"]

Floats = npt.NDArray[np.float64]
MakePolicy = Callable[[LatencyTable, float], Policy]

_MOST_INPUTS_IN_ALL = 10**8
"""The most inputs of one stage, over all requests, that are simulated."""


@dataclass(frozen=True)
class StageEstimate:
    """One stage of a simulated pipeline.

    Attributes:
        arrivals_ms: when inputs reached the stage, ms, ascending, shape (inputs,).
        waited_ms: time of every input in the queue, ms, shape (inputs,); NaN if the input never ran.
        ran_ms: time of every input in its batch, ms, shape (inputs,); NaN if the input never ran.
        mean_accuracy: mean profiled accuracy of the answers, in time or late, percent; NaN if there is none.
        result: what was counted. Its deadlines are those of the stage.
    """

    arrivals_ms: Floats
    waited_ms: Floats
    ran_ms: Floats
    mean_accuracy: float
    result: SimulationResult


@dataclass(frozen=True)
class PipelineEstimate:
    """A simulated pipeline.

    Attributes:
        latency_ms: time from arrival to answer of every request, ms, shape (requests,); NaN if dropped.
        slo_ms: the end-to-end SLO, ms.
        stages: the stages.
    """

    latency_ms: Floats
    slo_ms: float
    stages: dict[str, StageEstimate]

    @property
    def attainment(self) -> float:
        """Share of all requests that were answered in time."""
        return float(np.mean(self.latency_ms <= self.slo_ms))

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the latency, ms; dropped requests count as infinitely late.

        Args:
            percent: from 0 to 100.
        """
        times = np.sort(np.where(np.isnan(self.latency_ms), np.inf, self.latency_ms))
        return float(times[min(len(times) - 1, max(0, int(np.ceil(percent / 100.0 * len(times))) - 1))])


def estimate_pipeline(
    arrivals_ms: npt.ArrayLike,
    model: PipelineModel,
    choices: Mapping[str, StageChoice],
    *,
    make: MakePolicy = HullFit,
    expired: str = "defer",
    overhead_ms: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
    taken: Mapping[tuple[str, str], npt.NDArray[np.bool_]] | None = None,
    inputs: Mapping[str, npt.NDArray[np.int64]] | None = None,
) -> PipelineEstimate:
    """Simulate a pipeline on a trace with the rules of the live `Pipeline`.

    Args:
        arrivals_ms: arrival times, ms, ascending, shape (requests,).
        model: the stages.
        choices: how every stage is provisioned.
        make: makes the policy of a stage from its table and the time that requests usually have there, ms.
        expired: the rule of the stages for requests that are behind their deadline there.
        overhead_ms: time added to every batch, ms.
        noise: standard deviation of a random factor on every latency.
        seed: seed of the edges that requests take, of their numbers of inputs, and of the noise.
        taken: for edges (from, to), which requests take them, shape (requests,). Others are drawn.
        inputs: for stages, the number of inputs of every request, shape (requests,). Others are drawn.

    Returns:
        The simulated pipeline.

    Raises:
        TraceError: the arrivals cannot be simulated.
        PipelineError: a stage has no choice, no table for its hardware, or more than 10^8 inputs in all.
        PolicyError: a setting is out of range.
    """
    arrivals = checked_arrivals(arrivals_ms)
    rule = expired_rule(expired)
    tables = model.chosen_tables(choices)
    graph = model.graph
    reserves = graph.reserves(model.works_ms(tables))
    fastest = {name: table.fastest_ms for name, table in tables.items()}
    behind = graph.tails(fastest, always=True)
    count = len(arrivals)
    with numeric_arguments():
        rng = np.random.default_rng(seed)
    edges, numbers = _draws(model, count, rng, taken or {}, inputs or {})
    alive = np.ones(count, dtype=np.bool_)
    left: dict[str, Floats] = {}  # when each request left a stage; NaN if it did not take the stage
    found: dict[str, StageEstimate] = {}
    by_name = {stage.name: stage for stage in model.stages}
    for name in graph.order:
        ready, runs = arrivals, alive.copy()
        if by_name[name].after:
            known = np.array([left[other] for other in by_name[name].after])
            takes = [edges[other, name] & ~np.isnan(left[other]) for other in by_name[name].after]
            runs &= np.any(takes, axis=0)
            ready = np.max(np.where(np.isnan(known), -np.inf, known), axis=0)
        has_inputs = numbers[name] > 0
        too_late = runs & has_inputs & (ready + fastest[name] + behind[name] > arrivals + model.slo_ms)
        alive &= ~too_late
        runs &= ~too_late
        left[name] = np.where(runs, ready, np.nan)
        requests = np.repeat(np.flatnonzero(runs), numbers[name][runs])
        requests = requests[np.argsort(ready[requests], kind="stable")]
        deadline = arrivals + model.slo_ms * (1.0 - reserves[name])
        stage, finish = _stage_run(
            ready[requests],
            (deadline - ready)[requests],
            tables[name],
            choices[name],
            make(tables[name], max(model.slo_ms * (1.0 - reserves[name]), tables[name].fastest_ms)),
            rule,
            overhead_ms,
            noise,
            rng,
        )
        found[name] = stage
        alive[requests[np.isnan(finish)]] = False
        np.maximum.at(left[name], requests, np.where(np.isnan(finish), -np.inf, finish))
    ends = np.array([left[sink] for sink in graph.sinks])
    last = np.max(np.where(np.isnan(ends), -np.inf, ends), axis=0)
    for times in left.values():  # a request that takes no last stage ends where it left the pipeline
        last = np.where(np.isinf(last) & ~np.isnan(times), np.maximum(last, times), last)
    return PipelineEstimate(np.where(alive, last - arrivals, np.nan), model.slo_ms, found)


def _draws(
    model: PipelineModel,
    count: int,
    rng: np.random.Generator,
    taken: Mapping[tuple[str, str], npt.NDArray[np.bool_]],
    inputs: Mapping[str, npt.NDArray[np.int64]],
) -> tuple[dict[tuple[str, str], npt.NDArray[np.bool_]], dict[str, npt.NDArray[np.int64]]]:
    edges: dict[tuple[str, str], npt.NDArray[np.bool_]] = {}
    numbers: dict[str, npt.NDArray[np.int64]] = {}
    for stage in model.stages:
        drawn = rng.choice(np.array(stage.inputs, dtype=np.int64), count)
        numbers[stage.name] = np.asarray(inputs.get(stage.name, drawn), dtype=np.int64)
        if (total := int(numbers[stage.name].sum())) > _MOST_INPUTS_IN_ALL:
            raise PipelineError(
                f"stage {stage.name!r}: {total:,} inputs in all; at most {_MOST_INPUTS_IN_ALL:,} can be "
                f"simulated, so plan with fewer than {count:,} requests, or with fewer inputs per request"
            )
        for other, share in stage.after.items():
            edges[other, stage.name] = np.asarray(taken.get((other, stage.name), rng.random(count) < share))
    return edges, numbers


def _stage_run(
    arrivals: Floats,
    slo_ms: Floats,
    table: LatencyTable,
    choice: StageChoice,
    policy: Policy,
    expired: str,
    overhead_ms: float,
    noise: float,
    rng: np.random.Generator,
) -> tuple[StageEstimate, Floats]:
    """Simulate one stage; return it, and when each of its inputs was answered (NaN if it was not)."""
    if not len(arrivals):
        result = SimulationResult(requests=0, served_by=[0] * len(table.subnets))
        return StageEstimate(arrivals, arrivals, arrivals, float("nan"), result), arrivals
    scenario = Scenario(
        arrivals,
        table,
        policy,
        slo_ms,
        choice.workers,
        choice.min_accuracy,
        noise=noise,
        overhead_ms=overhead_ms,
    )
    reset: Any = getattr(policy, "reset", None)
    if reset is not None:
        reset()
    result = EventLoop(scenario, expired=expired, rng=rng, requests=True, progress=False).run()
    log: Any = result.log
    answered = log.subnet >= 0
    accuracy = np.array(table.known_accuracy())[log.subnet[answered]]
    mean = float(accuracy.mean()) if len(accuracy) else float("nan")
    stage = StageEstimate(arrivals, log.start_ms - arrivals, log.finish_ms - log.start_ms, mean, result)
    return stage, log.finish_ms
