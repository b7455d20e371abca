"""`plan_pipeline`: the cheapest workers, batch sizes and hardware that meet a percentile end to end."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy.typing as npt

from subnetact.errors import PipelineError, PolicyError
from subnetact.serving.pipelines.model import PipelineEstimate, PipelineModel, StageChoice, estimate_pipeline
from subnetact.serving.scheduling.checks import check_count

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


@dataclass
class PlanSearch:
    """Simulates plans on a trace, and remembers which of them meet the percentile."""

    arrivals_ms: npt.ArrayLike
    model: PipelineModel
    percent: float
    most_workers: int
    seed: int = 0
    known: dict[tuple[StageChoice, ...], bool] = field(default_factory=dict)

    def meets(self, choices: Choices) -> bool:
        """Return whether a plan meets the percentile."""
        key = tuple(choices.values())
        if key not in self.known:
            self.known[key] = self.estimate(choices).percentile_ms(self.percent) <= self.model.slo_ms
        return self.known[key]

    def estimate(self, choices: Choices) -> PipelineEstimate:
        """Simulate a plan."""
        return estimate_pipeline(self.arrivals_ms, self.model, choices, seed=self.seed)

    def fewest(self, choices: Choices, stages: Iterable[str], most: int, first: int = 1) -> Choices | None:
        """Return the plan with the fewest workers, up to `most`, at some stages that meets it, or None."""

        def with_workers(count: int) -> Choices:
            return {**choices, **{stage: choices[stage]._replace(workers=count) for stage in stages}}

        failed, passed = 0, first  # doubled until a number meets the percentile, and then bisected
        while not self.meets(with_workers(passed)):
            if passed >= most:
                return None
            failed, passed = passed, min(2 * passed, most)
        counts = range(failed + 1, passed)
        return with_workers(failed + 1 + bisect_left(counts, True, key=lambda n: self.meets(with_workers(n))))

    def uniform(self, hardware: str | None = None) -> Choices | None:
        """Return the least plan with as many workers at every stage, on its fastest hardware if None."""
        choices = {}
        for stage in self.model.stages:
            kind, table = min(stage.tables.items(), key=lambda one: (one[0] != hardware, one[1].fastest_ms))
            choices[stage.name] = StageChoice(kind, 1, table.batch_sizes[-1], stage.min_accuracy)
        return self.fewest(choices, choices, self.most_workers)

    def finished(self, choices: Choices | None) -> PipelinePlan:
        """Return a plan with its simulation and its cost; None was found if no plan meets the percentile."""
        if choices is None:
            raise PipelineError(
                f"percent: the {self.percent:g}th percentile does not meet the SLO of {self.model.slo_ms:g} "
                f"ms with {self.most_workers} workers at every stage; allow more time or more workers"
            )
        cost, estimate = self.model.cost(choices), self.estimate(choices)
        return PipelinePlan(choices, cost, self.percent, estimate, len(self.known))


def plan_pipeline(
    arrivals_ms: npt.ArrayLike,
    model: PipelineModel,
    percent: float = 99.0,
    *,
    most_workers: int = 256,
    seed: int = 0,
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
        most_workers: the greatest number of workers of a stage.
        seed: seed of the simulations.

    Returns:
        The plan.

    Raises:
        PipelineError: no plan meets the percentile.
        PolicyError: a setting is out of range.
        TraceError: the arrivals cannot be simulated.

    Source:
        InferLine (SoCC'20, section 4).
    """
    if not 0.0 < percent <= 100.0:
        raise PolicyError(f"percent: {percent} must be in (0, 100]")
    check_count(most_workers, "most_workers")
    search = PlanSearch(arrivals_ms, model, percent, most_workers, seed)
    choices = search.uniform()
    options = [choices] if choices is not None else []
    while options:
        choices = min(options, key=model.cost)
        options = _cheaper(search, choices)
    return search.finished(choices if choices is None else _raised_accuracy(search, choices))


def _cheaper(search: PlanSearch, choices: Choices) -> list[Choices]:
    """Return the plans that differ in one stage, meet the percentile and cost less."""
    prices, found = search.model.prices, []
    for stage in search.model.stages:
        now = choices[stage.name]
        for hardware, table in stage.tables.items():
            # Only plans that are cheaper than this stage now are worth a simulation.
            budget = now.workers * prices[now.hardware] / prices[hardware]
            most = math.ceil(min(budget, search.most_workers + 1) - 1e-9) - 1
            for size in reversed(table.batch_sizes if most >= 1 else ()):
                other = {**choices, stage.name: now._replace(hardware=hardware, batch_size=size)}
                found.append(search.fewest(other, [stage.name], most, most))
    return [plan for plan in found if plan is not None]


def _raised_accuracy(search: PlanSearch, choices: Choices) -> Choices:
    """Raise the minimum accuracy of one stage after the other as far as the percentile permits."""
    for stage in search.model.stages:
        now = choices[stage.name]
        accuracies = set(stage.tables[now.hardware].accuracy)
        levels = [now.min_accuracy, *sorted(a for a in accuracies if a > now.min_accuracy)]
        plans = [{**choices, stage.name: now._replace(min_accuracy=level)} for level in levels]
        choices = plans[bisect_left(plans[1:], True, key=lambda plan: not search.meets(plan))]
    return choices
