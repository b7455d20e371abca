"""`plan_pipeline`: the cheapest workers, batch sizes and hardware that meet a percentile end to end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from subnetact.errors import PipelineError, PolicyError
from subnetact.serving.pipelines.estimate import MakePolicy, PipelineEstimate, estimate_pipeline
from subnetact.serving.pipelines.model import PipelineModel, StageChoice
from subnetact.serving.pipelines.stage_tuner import StageTuner
from subnetact.serving.planning.tuner import Tuner
from subnetact.serving.policies import HullFit
from subnetact.serving.scheduling.checks import check_count
from subnetact.serving.simulation.scenario import checked_arrivals

__all__ = ["PipelinePlan", "plan_pipeline"]

Choices = dict[str, StageChoice]


@dataclass(frozen=True)
class PipelinePlan:
    """How every stage is provisioned.

    Attributes:
        choices: for every stage, its hardware, workers, batch size and minimum accuracy.
        cost: the price of all workers together.
        percent: the percentile that was planned for.
        estimate: the simulation of this plan.
        tried: how many plans were simulated.
    """

    choices: Choices
    cost: float
    percent: float
    estimate: PipelineEstimate
    tried: int

    def to_json(self) -> dict[str, Any]:
        """Return the plan as values that JSON can hold."""
        stages = {
            name: {**choice._asdict(), "mean_accuracy": self.estimate.stages[name].mean_accuracy}
            for name, choice in self.choices.items()
        }
        return {
            "stages": stages,
            "cost": self.cost,
            f"p{self.percent:g}_ms": self.estimate.percentile_ms(self.percent),
            "slo_ms": self.estimate.slo_ms,
            "attainment": self.estimate.attainment,
            "tried": self.tried,
        }

    def tuner(
        self, model: PipelineModel, most_workers: int, *, step_ms: float = 100.0, **options: Any
    ) -> StageTuner:
        """Return a tuner that scales every stage when more arrives than the plan was made for.

        Args:
            model: what the plan was made of.
            most_workers: the greatest number of workers of every stage.
            step_ms: time between two steps, ms.
            options: further arguments of `Tuner`, for example `patience_ms`.

        Raises:
            PolicyError: a setting is out of range.
        """
        tables = model.chosen_tables(self.choices)
        tuners = {
            name: Tuner(
                self.estimate.stages[name].arrivals_ms,
                choice.workers,
                tables[name],
                model.slo_ms,
                most_workers=max(most_workers, choice.workers),
                **options,
            )
            for name, choice in self.choices.items()
            if len(self.estimate.stages[name].arrivals_ms)
        }
        return StageTuner(tuners, step_ms)


class _Search:
    """Simulates plans and keeps what was found."""

    def __init__(
        self,
        arrivals: npt.NDArray[np.float64],
        model: PipelineModel,
        percent: float,
        most_workers: int,
        simulate: Callable[..., PipelineEstimate],
    ) -> None:
        self.model = model
        self.percent = percent
        self.most_workers = most_workers
        self._arrivals = arrivals
        self._simulate = simulate
        self._found: dict[tuple[Any, ...], PipelineEstimate | None] = {}

    def estimate(self, choices: Choices) -> PipelineEstimate | None:
        """Return the simulation of a plan, or None if a stage's share of the time is too short to plan."""
        key = tuple(sorted(choices.items()))
        if key not in self._found:
            try:
                self._found[key] = self._simulate(self._arrivals, self.model, choices)
            except PolicyError:
                self._found[key] = None
        return self._found[key]

    def meets(self, choices: Choices) -> bool:
        """Return whether a plan meets the percentile."""
        estimate = self.estimate(choices)
        return estimate is not None and estimate.percentile_ms(self.percent) <= self.model.slo_ms

    def fewest(self, make: Callable[[int], Choices], high: int | None = None) -> Choices | None:
        """Return the plan with the fewest workers that meets the percentile, or None."""
        failed, passed = 0, 1 if high is None else high
        while not self.meets(make(passed)):
            if passed >= self.most_workers or high is not None:
                return None
            failed, passed = passed, min(2 * passed, self.most_workers)
        while passed - failed > 1:
            middle = (failed + passed) // 2
            if self.meets(make(middle)):
                passed = middle
            else:
                failed = middle
        return make(passed)

    def refusal(self, which: str) -> PipelineError:
        """Return the error for a percentile that no plan meets."""
        return PipelineError(
            f"percent: the {self.percent:g}th percentile does not meet the SLO of {self.model.slo_ms:g} ms "
            f"with {self.most_workers} workers {which}; allow more time or more workers"
        )

    def finished(self, choices: Choices) -> PipelinePlan:
        """Return a plan with its simulation and its cost."""
        estimate = self._simulate(self._arrivals, self.model, choices)
        return PipelinePlan(choices, self.model.cost(choices), self.percent, estimate, len(self._found))


def plan_pipeline(
    arrivals_ms: npt.ArrayLike,
    model: PipelineModel,
    percent: float = 99.0,
    *,
    make: MakePolicy = HullFit,
    most_workers: int = 256,
    overhead_ms: float = 0.0,
    seed: int = 0,
    coarse: bool = False,
) -> PipelinePlan:
    """Find workers, batch size and hardware for every stage that meet a percentile at least cost.

    The search starts with the fastest hardware and enough workers everywhere. Then it takes, as long as one
    of them meets the percentile, the step that lowers the cost the most: fewer workers at a stage with the
    same or another batch size, or cheaper hardware with as many workers as that needs. Among steps to the
    same cost, the one with the largest batch size is taken. At last the minimum accuracy of every stage is
    raised in turn as far as the percentile permits at the same cost.

    Args:
        arrivals_ms: arrival times, ms, ascending, shape (requests,).
        model: the stages, the prices and the SLO.
        percent: the percentile of the latency that has to be within the SLO.
        make: makes the policy of a stage from its table and the time that requests usually have there, ms.
        most_workers: the greatest number of workers of a stage.
        overhead_ms: time added to every batch, ms.
        seed: seed of the simulations.
        coarse: whether the pipeline is one unit instead, which is replicated as a whole: all stages have the
            same number of workers and the same type of hardware. InferLine compares itself with such plans.

    Returns:
        The plan.

    Raises:
        PipelineError: no plan meets the percentile.
        PolicyError: a setting is out of range.
        TraceError: the arrivals cannot be simulated.

    Source:
        InferLine (SoCC'20, section 4).
    """
    arrivals = checked_arrivals(arrivals_ms)
    if not 0.0 < percent <= 100.0:
        raise PolicyError(f"percent: {percent} must be in (0, 100]")
    check_count(most_workers, "most_workers")
    simulate = partial(estimate_pipeline, make=make, overhead_ms=overhead_ms, seed=seed)
    search = _Search(arrivals, model, percent, most_workers, simulate)
    return search.finished(_coarse(search) if coarse else _per_stage(search))


def _per_stage(search: _Search) -> Choices:
    """Return the cheapest plan that was found with its own workers and hardware for every stage."""
    model = search.model
    choices = search.fewest(lambda workers: _uniform(model, workers))
    if choices is None:
        raise search.refusal("at every stage")
    while True:
        options: list[Choices] = []
        for stage in model.stages:
            now = choices[stage.name]
            for hardware, table in stage.tables.items():
                for size in reversed(table.batch_sizes):
                    price = model.prices[hardware]
                    budget = now.workers * model.prices[now.hardware]
                    # Only plans that are cheaper than this stage now are worth a simulation.
                    most = math.ceil(min(budget / price, search.most_workers + 1) - 1e-9) - 1
                    if most < 1:
                        continue
                    best = search.fewest(partial(_with, choices, stage.name, hardware, size), most)
                    if best is not None:
                        options.append(best)
        if not options:
            break
        choices = min(options, key=model.cost)
    return _raised_accuracy(search, choices)


def _coarse(search: _Search) -> Choices:
    """Return the cheapest plan with the same workers and hardware for all stages."""
    model = search.model
    common = set.intersection(*(set(stage.tables) for stage in model.stages))
    found = [
        plan
        for hardware in sorted(common)
        if (plan := search.fewest(partial(_uniform, model, hardware=hardware))) is not None
    ]
    if not found:
        raise search.refusal("of one type of hardware that all stages have a table for")
    return min(found, key=model.cost)


def _uniform(model: PipelineModel, workers: int, hardware: str | None = None) -> Choices:
    """Return a plan with the same number of workers everywhere, on the fastest hardware if none is given."""
    found = {}
    for stage in model.stages:
        kind = hardware or min(stage.tables, key=lambda name, s=stage: s.tables[name].fastest_ms)  # type: ignore[misc]
        size = stage.tables[kind].batch_sizes[-1]
        found[stage.name] = StageChoice(kind, workers, size, stage.min_accuracy)
    return found


def _with(choices: Mapping[str, StageChoice], stage: str, hardware: str, size: int, workers: int) -> Choices:
    return {**choices, stage: choices[stage]._replace(hardware=hardware, workers=workers, batch_size=size)}


def _raised_accuracy(search: _Search, choices: Choices) -> Choices:
    """Raise the minimum accuracy of one stage after the other as far as the percentile permits."""
    for stage in search.model.stages:
        table = stage.tables[choices[stage.name].hardware]
        levels = sorted({a for a in table.known_accuracy() if a > choices[stage.name].min_accuracy})
        low, high = 0, len(levels)
        while low < high:
            middle = (low + high + 1) // 2
            raised = {**choices, stage.name: choices[stage.name]._replace(min_accuracy=levels[middle - 1])}
            if search.meets(raised):
                low = middle
            else:
                high = middle - 1
        if low:
            choices = {**choices, stage.name: choices[stage.name]._replace(min_accuracy=levels[low - 1])}
    return choices
