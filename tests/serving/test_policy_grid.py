"""HullFit on generated tables of many shapes: never far behind SlackFit or the best fixed subnet."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies import Fixed, HullFit, SlackFit
from subnetact.serving.policies.hullfit import Tuning
from subnetact.serving.scheduling.context import ArrivalMeter, Context
from subnetact.serving.scheduling.queue import EDFQueue
from subnetact.serving.simulation.simulator import simulate


def affine(share, subnets, ratio, sizes, concave, base_ms=2.0, jitter=0.0, seed=0):
    """Latencies base * (share + (1 - share) * batch) and accuracies from 70 to 80 %."""
    base = base_ms * np.linspace(1.0, ratio, subnets)
    cells = base[:, None] * (share + (1.0 - share) * np.array(sizes, dtype=float))
    if jitter:
        cells *= np.maximum(np.random.default_rng(seed).normal(1.0, jitter, cells.shape), 0.5)
    x = np.linspace(0.0, 1.0, subnets)
    accuracy = 70.0 + 10.0 * (1.0 - (1.0 - x) ** 2 if concave else x)
    return LatencyTable.from_arrays([f"s{i}" for i in range(subnets)], accuracy.tolist(), sizes, cells)


def arrivals(table, load, workers, slo_ms, cv2, count, seed):
    """Gamma gaps at a load relative to what the most accurate subnet sustains."""
    row = table.latency_ms[-1]
    fits = row <= slo_ms
    rate = load * workers * (np.array(table.batch_sizes)[fits] / row[fits]).max()
    gaps = np.random.default_rng(seed).gamma(1.0 / cv2, cv2 / rate, count)
    return np.cumsum(gaps)


def lead(table, load, workers, slo, cv2, seed, count=4000):
    """Effective accuracy of HullFit minus that of the best of SlackFit and the fixed subnets, in points."""
    slo_ms = slo * float(table.latency_ms[-1, 0])
    times = arrivals(table, load, workers, slo_ms, cv2, count, seed)

    def run(policy):
        return simulate(times, table, policy, slo_ms, workers, progress=False).effective_accuracy

    others = [SlackFit(table, slo_ms, k, 0.014 * slo_ms, 0.1) for k in (4, 8)]
    step = max(1, len(table.subnets) // 6)
    others += [Fixed(table, i) for i in range(0, len(table.subnets), step)]
    return run(HullFit(table, slo_ms)) - max(map(run, others))


def test_hullfit_is_never_far_behind_on_tables_of_many_shapes():
    rng = np.random.default_rng(5)
    sizes = [(1,), (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 4, 16, 64), (1, 8, 32, 128)]
    leads = []
    for seed in range(24):
        table = affine(
            rng.uniform(0.1, 0.95),
            int(rng.choice([2, 3, 6, 12, 100])),
            float(rng.choice([1.5, 3.0, 5.0, 10.0])),
            sizes[rng.integers(len(sizes))],
            bool(rng.integers(2)),
            base_ms=float(rng.choice([0.5, 5.0, 50.0])),
            jitter=float(rng.choice([0.0, 0.0, 0.1])),
            seed=seed,
        )
        load, workers = float(rng.choice([0.01, 0.3, 0.6, 0.9, 1.3, 1.8])), int(rng.choice([1, 2, 4, 16]))
        leads.append(
            lead(
                table,
                load,
                workers,
                float(rng.choice([3.0, 5.0, 10.0, 20.0])),
                rng.choice([1, 2, 4, 8]),
                seed,
            )
        )
    assert min(leads) > -0.5
    assert np.mean(np.array(leads) > -0.2) >= 0.9
    assert np.mean(leads) > 0.3


@pytest.mark.parametrize("load", [0.6, 0.9, 1.3])
def test_where_most_of_the_latency_is_fixed_cost_hullfit_keeps_up_with_slackfit(load):
    table = affine(0.9, 6, 5.0, (1, 2, 4, 8, 16), concave=False)
    assert lead(table, load, workers=1, slo=5.0, cv2=2.0, seed=1, count=8000) > -0.2


@settings(max_examples=40, deadline=None)
@given(
    share=st.floats(0.1, 0.95),
    subnets=st.integers(2, 12),
    ratio=st.floats(1.5, 10.0),
    concave=st.booleans(),
    base_ms=st.floats(0.01, 1000.0),
    slo=st.floats(1.2, 20.0),
)
def test_an_idle_server_answers_with_the_most_accurate_subnet(share, subnets, ratio, concave, base_ms, slo):
    table = affine(share, subnets, ratio, (1, 2, 4, 8), concave, base_ms)
    slo_ms = slo * float(table.latency_ms[-1, 0])
    queue, meter = EDFQueue(), ArrivalMeter(100 * slo_ms)
    meter.extend([0.0, 50 * slo_ms])
    queue.push(51 * slo_ms, 0)
    context = Context(queue, meter, [50 * slo_ms], slo_ms)
    context.now_ms, context.queued, context.slack_ms = 50 * slo_ms, 1, slo_ms
    assert HullFit(table, slo_ms).decide(context) == (subnets - 1, 1)


@pytest.mark.parametrize("factor", [1 / 64, 8.0])
def test_the_unit_of_time_does_not_matter(factor):
    table = affine(0.5, 6, 5.0, (1, 2, 4, 8, 16), concave=True, jitter=0.1)
    slo_ms = 5.0 * float(table.latency_ms[-1, 0])
    times = arrivals(table, 1.3, 4, slo_ms, 4.0, 4000, seed=3)
    plain, scaled = (
        simulate(
            f * times, table.scaled(f), HullFit(table.scaled(f), f * slo_ms), f * slo_ms, 4, progress=False
        )
        for f in (1.0, factor)
    )
    assert plain.served_by == scaled.served_by
    assert plain.effective_accuracy == scaled.effective_accuracy


def test_two_distant_subnets_alternate_where_the_load_lies_between_them():
    table = affine(0.8, 2, 10.0, (1, 2, 4, 8), concave=False)
    slo_ms = 5.0 * float(table.latency_ms[-1, 0])
    times = arrivals(table, 1.3, 2, slo_ms, 1.0, 4000, seed=0)
    result = simulate(times, table, HullFit(table, slo_ms), slo_ms, 2, progress=False)
    assert result.attainment > 0.999
    assert 0.3 * len(times) < result.served_by[1] < 0.9 * len(times)


@pytest.mark.parametrize(
    "arguments", [{"reserve": 5.0}, {"drain_reserve": 1.0}, {"tuning": 3}, {"tuning": {"bank": 0.2}}]
)
def test_reserves_in_ms_and_other_tunings_are_refused(arguments):
    table = affine(0.5, 3, 5.0, (1, 2, 4), concave=False)
    with pytest.raises(PolicyError, match=r"shares of the SLO|expected a Tuning"):
        HullFit(table, slo_ms=50.0, **arguments)
    with pytest.raises(PolicyError, match=r"tuning\.bank: 'x'"):
        Tuning(bank="x")
