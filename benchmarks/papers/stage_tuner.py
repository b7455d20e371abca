"""`StageTuner`: scales the stages of a pipeline, one `Tuner` per stage (InferLine, SoCC'20, section 5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from papers.tuner import Tuner
from subnetact.serving import PipelineModel, PipelinePlan

__all__ = ["StageTuner", "tuner_of"]

_KEPT = 1000


class StageTuner:
    """Compares the recent arrivals at every stage with those that were planned for.

    A stage gets workers at once if its arrivals within any window exceed the planned ones, and loses them
    slowly; see `Tuner`, whose windows are those of network calculus.

    Args:
        tuners: for every stage that may be scaled, its tuner. `tuner_of` makes them of a plan.

    Attributes:
        tuners: the tuners by stage.
        history: (time in ms, workers of every stage) of the last 1,000 steps that changed something.
    """

    def __init__(self, tuners: Mapping[str, Tuner]) -> None:
        self.tuners = dict(tuners)
        self.history: deque[tuple[float, dict[str, int]]] = deque(maxlen=_KEPT)

    def step(self, now_ms: float, arrivals_ms: Mapping[str, Sequence[float]]) -> dict[str, int]:
        """Update the numbers of workers.

        Args:
            now_ms: the time.
            arrivals_ms: for every stage, the arrival times since the last step, ms, ascending.

        Returns:
            The number of workers to run from now on, for every stage whose number has changed.
        """
        changed = {}
        for name, tuner in self.tuners.items():
            before = tuner.workers
            wanted = tuner.step(now_ms, arrivals_ms.get(name, ()))
            if wanted != before:
                changed[name] = wanted
        if changed:
            self.history.append((now_ms, {name: tuner.workers for name, tuner in self.tuners.items()}))
        return changed


def tuner_of(plan: PipelinePlan, model: PipelineModel, most_workers: int, **options: Any) -> StageTuner:
    """Return a tuner that scales every stage when more arrives than the plan was made for.

    Args:
        plan: the plan.
        model: what the plan was made of.
        most_workers: the greatest number of workers of every stage.
        options: further arguments of `Tuner`, for example `patience_ms`.
    """
    tables = model.chosen_tables(plan.choices)
    tuners = {}
    for name, choice in plan.choices.items():
        arrivals_ms, most = plan.estimate.stages[name].arrivals_ms, max(most_workers, choice.workers)
        if len(arrivals_ms):
            tuners[name] = Tuner(
                arrivals_ms, choice.workers, tables[name], model.slo_ms, most_workers=most, **options
            )
    return StageTuner(tuners)
