"""`plan_coarsely`: a pipeline that is replicated as one unit; InferLine (SoCC'20) compares itself with it."""

from __future__ import annotations

import numpy.typing as npt

from subnetact.serving import PipelineModel, PipelinePlan
from subnetact.serving.pipelines.planner import PlanSearch

__all__ = ["plan_coarsely"]


def plan_coarsely(
    arrivals_ms: npt.ArrayLike,
    model: PipelineModel,
    percent: float = 99.0,
    *,
    most_workers: int = 256,
) -> PipelinePlan:
    """Return the cheapest plan with the same workers and hardware for all stages; see `plan_pipeline`."""
    search = PlanSearch(arrivals_ms, model, percent, most_workers)
    common = set.intersection(*(set(stage.tables) for stage in model.stages))
    found = [search.uniform(hardware) for hardware in sorted(common)]
    return search.finished(min((plan for plan in found if plan is not None), key=model.cost, default=None))
