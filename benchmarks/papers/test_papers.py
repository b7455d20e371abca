"""The policies, planners and bounds of papers that this folder keeps."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papers.coarse_pipeline import plan_coarsely
from papers.flex import Flex
from papers.optimum import exact_optimum
from subnetact.errors import PolicyError, TraceError
from subnetact.latency.table import LatencyTable
from subnetact.serving import (
    HullFit,
    PipelineModel,
    Preemptive,
    StageModel,
    make_policy,
    plan_pipeline,
    poisson,
    simulate,
    superserve_a40,
)
from subnetact.serving.simulation.fluid import fluid_bound

A40 = superserve_a40()
FAST = LatencyTable(["a", "b"], [70.0, 80.0], [1, 4], [[1.0, 2.0], [3.0, 6.0]])


def by_exhaustion(arrivals: Any, table: LatencyTable, slo_ms: Any, workers: int) -> float:
    """The zero-one program by trying every sequence of batches."""
    due = arrivals + slo_ms

    def rest(left: tuple[int, ...], free: tuple[float, ...]) -> float:
        most = 0.0
        for count in range(1, len(left) + 1):
            for batch in combinations(left, count):
                release, deadline = max(arrivals[i] for i in batch), min(due[i] for i in batch)
                for worker in range(workers):
                    for subnet, accuracy in enumerate(table.accuracy):
                        finish = max(free[worker], release) + table.latency_ms[subnet, table.pad_index[count]]
                        if finish <= deadline:
                            later = (*free[:worker], finish, *free[worker + 1 :])
                            others = tuple(i for i in left if i not in batch)
                            most = max(most, count * accuracy + rest(others, later))
        return most

    return rest(tuple(range(len(arrivals))), (0.0,) * workers)


@settings(max_examples=40)
@given(
    gaps=st.lists(st.floats(0, 4), min_size=1, max_size=4),
    slo=st.lists(st.floats(4, 14), min_size=4, max_size=4),
    workers=st.integers(1, 2),
)
def test_the_optimum_is_that_of_exhaustive_search(gaps: Any, slo: Any, workers: int) -> None:
    table, arrivals = A40.select([0, 3, 5], batch_sizes=[1, 2, 4]), np.cumsum(gaps)
    slos = np.array(slo[: len(arrivals)])
    expected = by_exhaustion(arrivals, table, slos, workers)
    assert exact_optimum(arrivals, table, slos, workers) == pytest.approx(expected)


@settings(max_examples=25)
@given(
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=8), slo=st.floats(10, 40), workers=st.integers(1, 2)
)
def test_nothing_beats_the_optimum_and_it_keeps_below_the_fluid_bound(
    gaps: Any, slo: float, workers: int
) -> None:
    arrivals = np.cumsum(gaps)
    optimum = exact_optimum(arrivals, A40, slo, workers)
    assert optimum / len(arrivals) <= fluid_bound(arrivals, A40, slo, workers=workers) + 1e-6
    for name in ("hullfit", "slackfit", "maxbatch"):
        for rule in ("serve", "drop"):
            result = simulate(arrivals, A40, make_policy(name, A40, slo), slo, workers, rule)
            assert result.accuracy_sum <= optimum + 1e-6


def test_hullfit_is_near_the_optimum_of_small_instances() -> None:
    rng, gaps = np.random.default_rng(7), []
    for slo in (18.0, 36.0):
        for workers, count, span in ((1, 10, 10), (1, 12, 30), (2, 12, 20)) * 4:
            arrivals = np.sort(rng.uniform(0, span, count))
            result = simulate(arrivals, A40, HullFit(A40, slo), slo, workers, expired="serve")
            gaps.append(1 - result.accuracy_sum / exact_optimum(arrivals, A40, slo, workers))
    assert np.mean(gaps) <= 0.03
    assert min(gaps) >= -1e-9


def test_flex_preempts_for_a_batch_worth_more_and_keeps_its_competitive_bound() -> None:
    """Shepherd proves that FLEX with factor 3.03 serves at least 1 / 12.62 of what any schedule can."""
    table = LatencyTable(["only"], [80.0], [1, 8], [[10.0, 10.0]])
    trace, blocks = [0.0, 2.0, 2.0, 2.0, 2.0], {"requests": True, "blocks": 10}
    slos = [30.0, 11.0, 11.0, 11.0, 11.0]
    kept = simulate(trace, table, Flex(table, 0), slos, 1, "serve", **blocks)  # type: ignore[arg-type]
    assert kept.log is not None
    assert kept.log.finish_ms.tolist() == [20.0, 12.0, 12.0, 12.0, 12.0]
    assert simulate(trace, table, Flex(table, 0), 30.0, 1, "serve", blocks=10).preempted == 0
    table, rng = LatencyTable(["a"], [100.0], [1, 2, 4], [[5.0, 6.0, 8.0]]), np.random.default_rng(0)
    for _ in range(60):
        arrivals, slo = np.sort(rng.uniform(0.0, 40.0, 9)), rng.uniform(5.0, 30.0, 9)
        best = exact_optimum(arrivals, table, slo) / 100.0
        assert simulate(arrivals, table, Flex(table, 0), slo, 1, "drop", blocks=10).met >= best / 5.0


def test_a_coarse_plan_of_a_pipeline_meets_the_slo_and_costs_more() -> None:
    cheap, arrivals = FAST.scaled(2.0), poisson(400, 3, seed=3)
    stages = (
        StageModel("a", {"cpu": cheap, "gpu": FAST}),
        StageModel("b", {"cpu": cheap.scaled(3.0), "gpu": FAST}, {"a": 0.7}, inputs=(1, 2, 3)),
    )
    model = PipelineModel(stages, {"cpu": 1.0, "gpu": 3.0}, 60.0)
    coarse = plan_coarsely(arrivals, model, most_workers=16)
    assert coarse.estimate.percentile_ms(99.0) <= 60.0
    assert plan_pipeline(arrivals, model, most_workers=16).cost < coarse.cost


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Flex(A40, factor=1.0), PolicyError),
        (lambda: Flex(A40, subnet=17), PolicyError),
        (lambda: Preemptive(Flex(A40)), PolicyError),
        (lambda: exact_optimum(np.arange(13.0), A40, slo_ms=36.0), TraceError),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()
