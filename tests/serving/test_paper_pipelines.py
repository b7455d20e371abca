"""The tuner of pipelines that `benchmarks/papers` keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
from papers.stage_tuner import StageTuner, tuner_of
from papers.tuner import Tuner

from subnetact.latency.table import LatencyTable
from subnetact.serving import PipelineModel, StageModel, plan_pipeline, poisson

FAST = LatencyTable(["a", "b"], [70.0, 80.0], [1, 4], [[1.0, 2.0], [3.0, 6.0]])


def test_the_tuner_scales_a_stage_within_one_window_and_down_slowly() -> None:
    planned = poisson(100, 20, seed=0)
    tuner = StageTuner({"a": Tuner(planned, 2, FAST, 60.0, patience_ms=5000.0)})
    assert tuner.step(0.0, {"a": []}) == {}
    burst = np.sort(np.random.default_rng(0).uniform(0.0, 1000.0, 500)).tolist()
    assert tuner.step(1000.0, {"a": burst})["a"] >= 5
    assert tuner.step(3000.0, {"a": []}) == {}  # not yet
    for now in range(4000, 80_000, 1000):
        tuner.step(float(now), {"a": []})
    assert tuner.tuners["a"].workers == 1


def test_the_tuner_of_a_plan_starts_with_its_workers() -> None:
    model = PipelineModel((StageModel("a", {"cpu": FAST}),), {"cpu": 1.0}, 60.0)
    plan = plan_pipeline(poisson(400, 5, seed=0), model)
    tuner = tuner_of(plan, model, 8)
    assert {name: one.workers for name, one in tuner.tuners.items()} == {"a": plan.choices["a"].workers}
    assert tuner.tuners["a"].most_workers == 8


def test_only_recent_steps_of_a_tuner_are_kept() -> None:
    class Restless(Tuner):
        def step(self, now_ms: float, arrivals_ms: Any) -> int:
            self.workers += 1
            return self.workers

    tuner = StageTuner({"a": Restless(poisson(20, 5, seed=0), 1, FAST, 60.0)})
    for now in range(1100):
        tuner.step(float(now), {})
    assert len(tuner.history) == 1000
    assert tuner.history[-1] == (1099.0, {"a": 1101})
