"""`StageTuner`: scales the stages of a pipeline, one `Tuner` per stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from subnetact.errors import PipelineError
from subnetact.serving.planning.tuner import Tuner

__all__ = ["StageTuner"]

_KEPT = 1000


class StageTuner:
    """Compares the recent arrivals at every stage with those that were planned for.

    A stage gets workers at once if its arrivals within any window exceed the planned ones, and loses them
    slowly; see `Tuner`, whose windows are those of network calculus.

    Args:
        tuners: for every stage that may be scaled, its tuner. `PipelinePlan.tuner` makes one of a plan.
        step_ms: time between two steps, ms.

    Attributes:
        tuners: the tuners by stage.
        step_ms: time between two steps, ms.
        history: (time in ms, workers of every stage) of the last 1,000 steps that changed something.

    Raises:
        PipelineError: there are no tuners, or the step is not > 0.

    Source:
        InferLine (SoCC'20, section 5).
    """

    def __init__(self, tuners: Mapping[str, Tuner], step_ms: float = 100.0) -> None:
        if not tuners or not step_ms > 0:
            raise PipelineError("tuners: give at least one, and a step_ms > 0")
        self.tuners = dict(tuners)
        self.step_ms = step_ms
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
