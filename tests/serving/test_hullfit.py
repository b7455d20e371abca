"""HullFit: its prices, and on tables of many shapes never far behind SlackFit or the best fixed subnet."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnetact.latency.table import LatencyTable
from subnetact.serving import Fixed, HullFit, SlackFit
from subnetact.serving.policies.fronts import Fronts
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
    return LatencyTable([f"s{i}" for i in range(subnets)], accuracy.tolist(), sizes, cells)


def arrivals(table, load, workers, slo_ms, cv2, count, seed):
    """Gamma gaps at a load relative to what the most accurate subnet sustains."""
    row = table.latency_ms[-1]
    fits = row <= slo_ms
    rate = load * workers * (np.array(table.batch_sizes)[fits] / row[fits]).max()
    gaps = np.random.default_rng(seed).gamma(1.0 / cv2, cv2 / rate, count)
    return np.cumsum(gaps)


def lead(table, load, workers, slo, cv2, seed, count=2000):
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
    for seed in range(12):
        share, subnets = rng.uniform(0.1, 0.95), int(rng.choice([2, 3, 6, 12, 100]))
        ratio, several = float(rng.choice([1.5, 3.0, 5.0, 10.0])), sizes[rng.integers(len(sizes))]
        concave, base_ms = bool(rng.integers(2)), float(rng.choice([0.5, 5.0, 50.0]))
        jitter = float(rng.choice([0.0, 0.0, 0.1]))
        table = affine(share, subnets, ratio, several, concave, base_ms, jitter, seed)
        load, workers = float(rng.choice([0.01, 0.3, 0.6, 0.9, 1.3, 1.8])), int(rng.choice([1, 2, 4, 16]))
        slo, cv2 = float(rng.choice([3.0, 5.0, 10.0, 20.0])), rng.choice([1, 2, 4, 8])
        leads.append(lead(table, load, workers, slo, cv2, seed))
    assert min(leads) > -0.5
    assert np.mean(np.array(leads) > -0.2) >= 0.9
    assert np.mean(leads) > 0.3


SMALL, LARGE = (1, 2, 4, 8, 16), (1, 8, 32, 128)


@pytest.mark.parametrize(
    ("bound", "table", "run"),
    [
        # where most of the latency is a fixed cost, it keeps up with SlackFit
        *((-0.3, (0.9, 6, 5.0, SMALL, False), (load, 1, 5.0, 2.0, 1, 4000)) for load in (0.6, 0.9, 1.3)),
        # batches stay efficient behind a queue
        (-0.2, (0.79, 12, 1.5, LARGE, False), (0.7, 64, 3.0, 2.0, 1, 6000)),
        # the rest of a queue may leave in quick batches
        (0.0, (0.906, 3, 3.0, LARGE, True, 33.3), (1.3, 2, 10.0, 2.0, 1)),
        # where batches of one keep up, larger ones do not cost accuracy
        *(
            (-0.1, (share, n, 3.0, LARGE, False), (0.5, 16, 5.0, 1.0, 1))
            for share, n in ((0.49, 50), (0.5, 6))
        ),
        # accuracy is given up if it costs more in missed deadlines
        (-0.5, (0.25, 6, 3.0, SMALL, False), (2.0, 1, 2.0, 8.0, 1, 4000)),
        (-0.5, (0.4, 6, 3.0, SMALL, False), (1.6, 1, 2.0, 8.0, 1, 4000)),
        # bursts of losses do not end accuracy that gains more
        *((0.0, (0.15, 3, 3.0, (*SMALL, 32), True), (0.9, 1, 3.0, 4.0, seed, 4000)) for seed in (5, 7)),
    ],
)
def test_hullfit_keeps_up_with_the_best_other_policy(bound, table, run):
    assert lead(affine(*table), *run) > bound


def test_a_backlog_that_fluctuations_do_not_need_gives_way_to_efficient_batches():
    table = affine(0.516, 1000, 1.5, (1, 2, 4, 8, 16), concave=True, base_ms=9.2)
    slo_ms = 10.0 * float(table.latency_ms[-1, 0])
    times = arrivals(table, 1.3, 8, slo_ms, 2.0, 8000, seed=1)
    fixed = simulate(times, table, Fixed(table, 150), slo_ms, 8, progress=False)
    ours = simulate(times, table, HullFit(table, slo_ms), slo_ms, 8, progress=False)
    assert ours.effective_accuracy > fixed.effective_accuracy + 1.0


def test_time_counts_as_lost_to_accuracy_where_another_subnet_runs_the_batch_faster():
    # Batches of two of "narrow" are the cheapest, but it runs a single request slower than the others.
    cells = [[13.4, 11.0], [6.9, 24.5], [12.8, 26.3]]
    table = LatencyTable(["narrow", "wide", "widest"], [70.2, 77.5, 80.0], [1, 2], cells)
    times = np.cumsum(np.random.default_rng(2).gamma(1 / 8, 8.0 * 6.9, 8000))
    policies = HullFit(table, 25.7), *(Fixed(table, i) for i in range(3))
    ours, *others = (simulate(times, table, policy, 25.7, 1, progress=False) for policy in policies)
    assert ours.effective_accuracy > max(other.effective_accuracy for other in others) + 1.0


def test_no_subnet_below_the_hull_is_chosen_for_the_sake_of_free_time():
    table = LatencyTable(["a", "b", "c"], [70.0, 72.0, 80.0], [1], [[1.0], [4.0], [6.0]])
    fronts, slope = Fronts(table), 10.0 / 5.0
    assert fronts.priced(0, 1, slope, within_ms=10.0, free_ms=5.0).subnet == 2
    assert fronts.priced(0, 1, slope, within_ms=5.5, free_ms=5.0).subnet == 1


def test_a_price_moves_along_the_hull_of_a_batch_size():
    table = LatencyTable(["a", "b", "c", "d"], [70.0, 72.0, 80.0, 81.0], [1], [[1.0], [4.0], [6.0], [9.0]])
    fronts = Fronts(table)

    def chosen(price, within_ms, floor=0.0):
        return fronts.priced(0, 1, price, within_ms, free_ms=0.0, floor=floor).subnet

    assert [chosen(price, 10.0) for price in (0.0, 0.3, 0.4, 1.9, 2.1)] == [3, 3, 2, 2, 0]
    assert chosen(1.9, 5.0) == 0, "b is below the hull"
    assert chosen(0.5, 5.0) == 1, "but it is the best in time if time is cheap"
    assert chosen(2.1, 10.0, floor=71.0) == 2, "b costs more per point than c"
    assert chosen(9.0, 10.0, floor=71.0) == 1
    assert fronts.priced(0, 1, 1.0, 3.0, 0.0, floor=71.0) is None


def test_the_cheapest_subnet_need_not_be_the_least_accurate():
    table = LatencyTable(["a", "b", "c"], [70.0, 73.0, 80.0], [1, 4], [[1, 5], [1.4, 2.8], [5, 8]])
    slo_ms, rng = 10.0, np.random.default_rng(0)
    times = np.cumsum(rng.exponential(50.0, 1000))
    result = simulate(times, table, HullFit(table, slo_ms), slo_ms, 2, progress=False)
    assert result.effective_accuracy > 79.5


@settings(max_examples=40)
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
    times, runs = arrivals(table, 1.3, 4, slo_ms, 4.0, 4000, seed=3), []
    for f in (1.0, factor):
        policy = HullFit(table.scaled(f), f * slo_ms)
        run = simulate(f * times, policy.table, policy, f * slo_ms, 4, progress=False)
        runs.append((run.served_by, run.effective_accuracy))
    assert runs[0] == runs[1]


def test_two_distant_subnets_alternate_where_the_load_lies_between_them():
    table = affine(0.8, 2, 10.0, (1, 2, 4, 8), concave=False)
    slo_ms = 5.0 * float(table.latency_ms[-1, 0])
    times = arrivals(table, 1.3, 2, slo_ms, 1.0, 4000, seed=0)
    result = simulate(times, table, HullFit(table, slo_ms), slo_ms, 2, progress=False)
    assert result.attainment > 0.999
    assert 0.3 * len(times) < result.served_by[1] < 0.9 * len(times)
