from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.optimum import exact_optimum

from subnetact.errors import PolicyError, TraceError
from subnetact.serving.policies import make_policy
from subnetact.serving.simulation.fluid import fluid_bound
from subnetact.serving.simulation.simulator import simulate
from subnetact.serving.simulation.traces import bursty, poisson


def by_exhaustion(arrivals, table, slo_ms, workers):
    """The zero-one program by trying every sequence of batches."""
    due = arrivals + slo_ms

    def rest(left, free):
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
def test_the_optimum_is_that_of_exhaustive_search(a40, gaps, slo, workers):
    table = a40.select([0, 3, 5], batch_sizes=[1, 2, 4])
    arrivals = np.cumsum(gaps)
    slos = np.array(slo[: len(arrivals)])
    expected = by_exhaustion(arrivals, table, slos, workers)
    assert exact_optimum(arrivals, table, slos, workers) == pytest.approx(expected)


@settings(max_examples=25)
@given(
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=8), slo=st.floats(10, 40), workers=st.integers(1, 2)
)
def test_nothing_beats_the_optimum_and_it_keeps_below_the_fluid_bound(a40, gaps, slo, workers):
    arrivals = np.cumsum(gaps)
    optimum = exact_optimum(arrivals, a40, slo, workers)
    bound = fluid_bound(arrivals, a40, slo, workers=workers)
    assert optimum / len(arrivals) <= bound + 1e-6
    for name in ("hullfit", "slackfit", "maxbatch"):
        for rule in ("serve", "drop"):
            policy = make_policy(name, a40, slo)
            result = simulate(arrivals, a40, policy, slo, workers, rule)
            assert result.accuracy_sum <= optimum + 1e-6


def test_hullfit_is_near_the_optimum_of_small_instances(a40):
    rng = np.random.default_rng(7)
    gaps = []
    for slo in (18.0, 36.0):
        for workers, count, span in ((1, 10, 10), (1, 12, 30), (2, 12, 20)):
            for _ in range(4):
                arrivals = np.sort(rng.uniform(0, span, count))
                result = simulate(
                    arrivals, a40, make_policy("hullfit", a40, slo), slo, workers, expired="serve"
                )
                gaps.append(1 - result.accuracy_sum / exact_optimum(arrivals, a40, slo, workers))
    assert np.mean(gaps) <= 0.03
    assert min(gaps) >= -1e-9


def test_the_fluid_bound_of_a_steady_load_is_the_hull_there(a40):
    tau0 = 6.26507 / 16
    spaced = np.arange(0, 20_000, tau0 / 8)
    assert fluid_bound(spaced, a40, slo_ms=36.0, workers=8) == pytest.approx(73.822, abs=0.05)
    overload = np.arange(0, 20_000, tau0 / 16)
    assert fluid_bound(overload, a40, slo_ms=36.0, workers=8) == pytest.approx(73.822 / 2, rel=0.01)
    assert fluid_bound(np.arange(0, 2000, 10.0), a40, slo_ms=36.0, workers=8) == pytest.approx(80.158)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_policy_exceeds_the_fluid_bound(a40, seed):
    for trace in (bursty(3000, 9800, 8, 1, seed), poisson(21_000, 0.5, seed)):
        bound = fluid_bound(trace, a40, slo_ms=36.0, workers=8)
        assert bound <= fluid_bound(trace, a40, step_ms=7.0, slo_ms=36.0, workers=8) + 1e-9
        for name in ("hullfit", "slackfit:4", "maxbatch", "fixed:0"):
            for rule in ("serve", "drop"):
                result = simulate(
                    trace, a40, make_policy(name, a40, 36.0), expired=rule, slo_ms=36.0, workers=8
                )
                assert result.effective_accuracy <= bound + 1e-9


def test_the_number_of_workers_is_never_taken_for_the_slo(a40):
    with pytest.raises(TypeError, match="positional"):
        fluid_bound([0.0], a40, 8, 36.0)


def test_bad_input_is_refused(a40):
    with pytest.raises(TraceError, match="12 at most"):
        exact_optimum(np.arange(13.0), a40, slo_ms=36.0)
    with pytest.raises(TraceError, match="step_ms"):
        fluid_bound([0.0], a40, step_ms=0.0, slo_ms=36.0, workers=8)
    with pytest.raises(PolicyError, match="workers"):
        fluid_bound([0.0], a40, workers=0, slo_ms=36.0)
    with pytest.raises(TraceError, match="empty"):
        fluid_bound([], a40, slo_ms=36.0, workers=8)
