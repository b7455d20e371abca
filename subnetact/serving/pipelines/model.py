"""`PipelineModel`: what planning knows of a pipeline, without any code to run, and its simulation.

A stage never slows down those before it, so the stages are simulated one after the other, each by the loop of
`simulate`: the answers of one stage are the arrivals of the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from subnetact.errors import PipelineError
from subnetact.latency.arrays import Floats
from subnetact.latency.table import LatencyTable
from subnetact.serving.pipelines.graph import StageGraph
from subnetact.serving.policies.hullfit import HullFit
from subnetact.serving.scheduling.checks import by_name, check_accuracy, check_time
from subnetact.serving.scheduling.scheduler import Scheduler
from subnetact.serving.simulation.event_loop import EventLoop, arriving
from subnetact.serving.simulation.result import RequestLog, SimulationResult
from subnetact.serving.simulation.traces import checked_arrivals, numeric_arguments

_MOST_INPUTS = 1000


@dataclass(frozen=True)
class StageModel:
    """One stage of a pipeline, for planning.

    Attributes:
        name: the name.
        tables: for every type of hardware that the stage can run on, its latency table there. All have the
            same subnets.
        after: for every stage that feeds this one, the share of the requests that take the edge, in (0, 1].
        inputs: how many inputs requests have at this stage (fan-out), at most 1,000 each; every request draws
            one of the numbers.
        min_accuracy: the least accuracy that its subnets may have, percent.
    """

    name: str
    tables: Mapping[str, LatencyTable]
    after: Mapping[str, float] = field(default_factory=dict)
    inputs: tuple[int, ...] = (1,)
    min_accuracy: float = 0.0

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}"
        subnets = {(table.subnets, check_accuracy(table).accuracy) for table in self.tables.values()}
        if len(subnets) != 1:
            raise PipelineError(f"{where}: tables: give one per type of hardware, all of the same subnets")
        for other, share in self.after.items():
            if not 0.0 < share <= 1.0:
                raise PipelineError(f"{where}: the share of {other!r} is {share}; it must be in (0, 1]")
        allowed = range(_MOST_INPUTS + 1)
        if not self.inputs or not all(type(count) is int and count in allowed for count in self.inputs):
            raise PipelineError(f"{where}: inputs {self.inputs!r}: give whole numbers, 0 to {_MOST_INPUTS}")
        best = max(max(accuracy) for _, accuracy in subnets)
        if self.min_accuracy > best:
            raise PipelineError(f"{where}: min_accuracy {self.min_accuracy} %: the best subnet has {best} %")


class StageChoice(NamedTuple):
    """How one stage is provisioned.

    Attributes:
        hardware: the type of hardware.
        workers: number of workers.
        batch_size: the largest batch size.
        min_accuracy: the least accuracy of its subnets, percent.
    """

    hardware: str
    workers: int
    batch_size: int
    min_accuracy: float = 0.0


@dataclass(frozen=True)
class PipelineModel:
    """The stages of a pipeline, the prices of hardware, and the end-to-end SLO.

    Attributes:
        stages: the stages.
        prices: price of one worker on every type of hardware, in any unit per time.
        slo_ms: time from arrival to deadline, ms.

    Raises:
        PipelineError: there is a cycle, a stage has a table for hardware without a price, two stages have one
            name, or the SLO is shorter than the shortest path on the fastest hardware.
        PolicyError: the SLO or a price is not finite and > 0.
    """

    stages: tuple[StageModel, ...]
    prices: Mapping[str, float]
    slo_ms: float

    def __post_init__(self) -> None:
        check_time(self.slo_ms, "slo_ms")
        self.named()
        for hardware, price in self.prices.items():
            check_time(price, f"prices: {hardware!r}")
        for stage in self.stages:
            for hardware in stage.tables.keys() - self.prices.keys():
                raise PipelineError(
                    f"stage {stage.name!r}: a table for {hardware!r}, which has no price; add one"
                )
        fastest = {s.name: min(s.tables.values(), key=attrgetter("fastest_ms")) for s in self.stages}
        self.graph.least_ms(fastest, self.slo_ms)

    def named(self) -> dict[str, StageModel]:
        """Return the stages by their names."""
        return by_name(self.stages, StageModel, "stages", PipelineError)

    @cached_property
    def graph(self) -> StageGraph:
        """The graph of the stages; an edge is conditional if not all requests take it."""
        return StageGraph({s.name: {o: share < 1.0 for o, share in s.after.items()} for s in self.stages})

    def chosen_tables(self, choices: Mapping[str, StageChoice]) -> dict[str, LatencyTable]:
        """Return for every stage of `choices` the table of its hardware, up to its batch size.

        Raises:
            PipelineError: a stage has no choice, or no table for its hardware and batch size.
        """
        tables = {}
        for stage in self.stages:
            choice = choices.get(stage.name)
            table = None if choice is None else stage.tables.get(choice.hardware)
            if choice is None or table is None or choice.batch_size < table.batch_sizes[0]:
                raise PipelineError(
                    f"choices: {choice} for stage {stage.name!r}; give a StageChoice with hardware of "
                    f"{', '.join(map(repr, stage.tables))} and a batch size of its table"
                )
            sizes = [size for size in table.batch_sizes if size <= choice.batch_size]
            tables[stage.name] = table.select(batch_sizes=sizes)
        return tables

    def cost(self, choices: Mapping[str, StageChoice]) -> float:
        """Return the price of all workers of `choices` together."""
        return sum(choice.workers * self.prices[choice.hardware] for choice in choices.values())


@dataclass(frozen=True)
class StageEstimate:
    """One stage of a simulated pipeline.

    Attributes:
        arrivals_ms: when inputs reached the stage, ms, ascending, shape (inputs,).
        mean_accuracy: mean profiled accuracy of the answers, in time or late, percent; NaN if there is none.
        result: what was counted, with `log`. Its deadlines are those of the stage.
    """

    arrivals_ms: Floats
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
        """Return a percentile of the latency, ms, 0 <= `percent` <= 100; a dropped request's is infinite."""
        times = np.sort(np.where(np.isnan(self.latency_ms), np.inf, self.latency_ms))
        return float(times[min(len(times) - 1, max(0, math.ceil(percent / 100.0 * len(times)) - 1))])


def estimate_pipeline(
    arrivals_ms: npt.ArrayLike, model: PipelineModel, choices: Mapping[str, StageChoice], *, seed: int = 0
) -> PipelineEstimate:
    """Simulate a pipeline on a trace with the rules of the live `Pipeline`.

    Args:
        arrivals_ms: arrival times, ms, ascending, shape (requests,).
        model: the stages.
        choices: how every stage is provisioned.
        seed: seed of the edges that requests take and of their numbers of inputs.

    Returns:
        The simulated pipeline.

    Raises:
        TraceError: the arrivals cannot be simulated.
    """
    arrivals = checked_arrivals(arrivals_ms)
    count = len(arrivals)
    tables = model.chosen_tables(choices)
    graph, stages = model.graph, model.named()
    reserves = graph.reserves(tables, {name: float(np.mean(stage.inputs)) for name, stage in stages.items()})
    least_ms = graph.least_ms(tables)
    with numeric_arguments():
        rng = np.random.default_rng(seed)
    alive = np.ones(count, dtype=np.bool_)
    left: dict[str, Floats] = {}  # when each request left a stage; NaN if it did not take the stage
    found: dict[str, StageEstimate] = {}
    for name in graph.order:
        stage, choice, table, runs, ready = stages[name], choices[name], tables[name], alive.copy(), arrivals
        numbers = rng.choice(np.array(stage.inputs), count)
        if stage.after:
            takes = [(rng.random(count) < share) & ~np.isnan(left[o]) for o, share in stage.after.items()]
            runs &= np.any(takes, axis=0)
            ready = np.fmax.reduce([left[other] for other in stage.after])
        too_late = runs & (numbers > 0) & (ready + least_ms[name] > arrivals + model.slo_ms)
        alive &= ~too_late
        runs &= ~too_late
        left[name] = np.where(runs, ready, np.nan)
        requests = np.repeat(np.flatnonzero(runs), numbers[runs])
        requests = requests[np.argsort(ready[requests], kind="stable")]
        share_ms = model.slo_ms * (1.0 - reserves[name])
        slo_ms: Any = (arrivals + share_ms - ready)[requests] if len(requests) else share_ms
        feed = arriving(None, ready[requests], slo_ms, choice.min_accuracy, 0)
        policy = HullFit(table, max(share_ms, table.fastest_ms))
        how: Any = {"slo_ms": float(np.median(slo_ms)), "expired": "defer", "watchdog_ms": math.inf}
        scheduler = Scheduler(policy, [table], workers=choice.workers, **how)
        served_by, log = [0] * len(table.subnets), RequestLog.empty(len(requests))
        result = SimulationResult(len(requests), served_by=served_by, log=log)
        EventLoop(policy, scheduler, feed, result).run()
        accuracy = np.average(table.accuracy, weights=served_by) if any(served_by) else math.nan
        found[name] = StageEstimate(ready[requests], float(accuracy), result)
        alive[requests[np.isnan(log.finish_ms)]] = False
        np.fmax.at(left[name], requests, log.finish_ms)
    ends = np.fmax.reduce(list(left.values()))
    return PipelineEstimate(np.where(alive, ends - arrivals, np.nan), model.slo_ms, found)
