"""HullFit on generated tables of many shapes: never far behind SlackFit or the best fixed subnet."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies import Fixed, HullFit, SlackFit
from subnetact.serving.policies.balance import Balance
from subnetact.serving.policies.hull_table import PricedFronts
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
    return LatencyTable([f"s{i}" for i in range(subnets)], accuracy.tolist(), sizes, cells)


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
    for seed in range(12):
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


def test_batches_stay_efficient_behind_a_queue():
    table = affine(0.79, 12, 1.5, (1, 8, 32, 128), concave=False)
    assert lead(table, 0.7, workers=64, slo=3.0, cv2=2.0, seed=1, count=12_000) > -0.2


def test_steady_arrivals_are_served_in_efficient_batches():
    table = affine(0.28, 6, 1.5, (1, 2, 4, 8, 16, 32), concave=False, base_ms=15.4)
    assert lead(table, 1.1, workers=64, slo=10.0, cv2=2.0, seed=1, count=20_000) > -0.2


def test_a_backlog_that_fluctuations_do_not_need_gives_way_to_efficient_batches():
    table = affine(0.516, 1000, 1.5, (1, 2, 4, 8, 16), concave=True, base_ms=9.2)
    slo_ms = 10.0 * float(table.latency_ms[-1, 0])
    times = arrivals(table, 1.3, 8, slo_ms, 2.0, 8000, seed=1)
    fixed = simulate(times, table, Fixed(table, 150), slo_ms, 8, progress=False)
    ours = simulate(times, table, HullFit(table, slo_ms), slo_ms, 8, progress=False)
    assert ours.effective_accuracy > fixed.effective_accuracy + 1.0


def test_the_rest_of_a_queue_may_leave_in_quick_batches():
    table = affine(0.906, 3, 3.0, (1, 8, 32, 128), concave=True, base_ms=33.3)
    assert lead(table, 1.3, workers=2, slo=10.0, cv2=2.0, seed=1) > 0.0


def test_distant_points_of_the_hull_take_turns_while_requests_wait():
    sizes, keys = [1, 2, 4, 8], ["small", "below the hull", "large"]
    per_request = np.array([[11.0, 9.0, 6.6, 5.8], [43.0, 33.0, 30.0, 26.7], [57.0, 44.0, 41.0, 30.9]])
    table = LatencyTable(keys, [70.0, 76.5, 80.0], sizes, per_request * np.array(sizes))
    slo_ms, workers = 1200.0, 64
    gaps = np.random.default_rng(1).gamma(0.5, 2.0 * 27.5 / workers, 30_000)
    found = simulate(np.cumsum(gaps), table, HullFit(table, slo_ms), slo_ms, workers, progress=False)
    mixed = 70.0 + 10.0 * (27.5 - 5.8) / (30.9 - 5.8)  # the hull at 27.5 ms per request
    assert found.effective_accuracy > mixed + 0.4, "the first requests find idle workers, which helps"


def test_time_counts_as_lost_to_accuracy_where_another_subnet_runs_the_batch_faster():
    # Batches of two of "narrow" are the cheapest, but it runs a single request slower than the others.
    table = LatencyTable(
        ["narrow", "wide", "widest"], [70.2, 77.5, 80.0], [1, 2], [[13.4, 11.0], [6.9, 24.5], [12.8, 26.3]]
    )
    slo_ms = 25.7
    gaps = np.random.default_rng(2).gamma(1 / 8, 8.0 * 6.9, 8000)
    others = [Fixed(table, i) for i in range(3)]
    runs = [
        simulate(np.cumsum(gaps), table, policy, slo_ms, 1, progress=False).effective_accuracy
        for policy in (HullFit(table, slo_ms), *others)
    ]
    assert runs[0] > max(runs[1:]) + 1.0


@pytest.mark.parametrize(("cv2", "share"), [(0.1, 0.06), (1.0, 0.2), (8.0, 0.57)])
def test_the_fluctuation_of_the_load_is_measured(cv2, share):
    slo_ms, rate = 50.0, 2.0  # 100 arrivals per SLO, whose standard deviation is sqrt(100 cv2)
    gaps = np.random.default_rng(3).gamma(1.0 / cv2, cv2 / rate, 40_000)
    policy = HullFit(affine(0.5, 3, 2.0, (1, 2), concave=False), slo_ms)
    meter = ArrivalMeter()
    context = Context(EDFQueue(), meter, [0.0], slo_ms)
    measured = []
    for time_ms in np.cumsum(gaps).tolist():
        meter.append(time_ms)
        context.now_ms = time_ms
        measured.append(policy._budget.fluctuation(context, rate))
    assert np.mean(measured) == pytest.approx(share, rel=0.25)
    other = policy.retabled(policy.table.scaled(2.0))
    assert other._budget.fluctuation(context, rate) == measured[-1]
    context.now_ms += 1e6  # The rate says nothing about a pause that is longer than its window.
    assert policy._budget.fluctuation(context, rate) == measured[-1]
    policy.reset()
    assert policy._budget.fluctuation(context, rate) == pytest.approx(0.2), "as of Poisson arrivals"
    assert policy._budget.fluctuation(context, 0.0) == np.inf


@pytest.mark.parametrize("spend", [False, True])
def test_of_equally_good_subnets_the_slowest_runs_if_time_is_to_be_spent(spend):
    keys = ["a", "b", "c", "d"]
    table = LatencyTable(keys, [70.0, 72.0, 80.0, 81.0], [1], [[1.0], [4.0], [6.0], [9.0]])
    fronts, slope = PricedFronts(table), 10.0 / 5.0
    assert fronts.best(0, 1, slope, within_ms=10.0, spend=spend).subnet == (2 if spend else 0)
    assert fronts.best(0, 1, slope, within_ms=5.0, spend=spend).subnet == 0, "b is below the hull"


@pytest.mark.parametrize("seed", [7, 500336])
def test_small_batches_do_not_use_up_the_slack_of_the_requests_behind_them(seed):
    table = affine(0.63, 12, 3.0, (1, 8, 32, 128), concave=True, base_ms=8.4, jitter=0.2, seed=seed)
    assert lead(table, 0.9, workers=2, slo=3.0, cv2=1.0, seed=1) > 0.0


@pytest.mark.parametrize(("share", "subnets", "load"), [(0.49, 50, 0.5), (0.5, 6, 0.5)])
def test_where_batches_of_one_keep_up_larger_ones_do_not_cost_accuracy(share, subnets, load):
    table = affine(share, subnets, 3.0, (1, 8, 32, 128), concave=False)
    assert lead(table, load, workers=16, slo=5.0, cv2=1.0, seed=1) > -0.1


@pytest.mark.parametrize(("share", "load", "cv2"), [(0.25, 2.0, 8.0), (0.4, 1.6, 8.0)])
def test_accuracy_is_given_up_if_it_costs_more_in_missed_deadlines(share, load, cv2):
    table = affine(share, 6, 3.0, (1, 2, 4, 8, 16), concave=False)
    assert lead(table, load, workers=1, slo=2.0, cv2=cv2, seed=1, count=8000) > -0.5


def test_time_that_piles_up_is_spent():
    table = affine(0.88, 2, 3.0, (1, 8, 32, 128), concave=False)
    assert lead(table, 0.7, workers=16, slo=2.0, cv2=2.0, seed=1, count=8000) > -0.4


def test_no_subnet_below_the_hull_is_chosen_for_the_sake_of_free_time():
    keys = ["a", "b", "c"]
    table = LatencyTable(keys, [70.0, 72.0, 80.0], [1], [[1.0], [4.0], [6.0]])
    fronts = PricedFronts(table)
    slope = 10.0 / 5.0
    assert fronts.best(0, 1, slope, within_ms=10.0, free_ms=5.0).subnet == 2
    assert fronts.best(0, 1, slope, within_ms=5.5, free_ms=5.0).subnet == 1


def test_the_ledger_weighs_what_expires_against_what_accuracy_gains():
    queue, meter = EDFQueue(), ArrivalMeter()
    queue.push(100.0, 0)
    context = Context(queue, meter, [0.0], 100.0)
    context.queued = 1

    def losing(expired):
        context.expired += expired
        return balance.losing(context, tau_ms=2.0, accuracy=70.0, short=0)

    context.expired = 7  # counted before this policy began
    balance = Balance(slo_ms=100.0)
    assert not losing(0)
    assert not losing(3), "no extra time was spent, so nothing expired because of it"
    balance.book(extra_ms=2.0, gained=0.0, forgone=0.0)
    assert losing(3), "the extra time would have been enough for one of the three"
    balance.book(extra_ms=0.0, gained=150.0, forgone=0.0)
    assert not losing(3), "the extra time is used up"


def test_a_burst_of_losses_outweighs_neither_earlier_gains_nor_a_long_silence():
    queue, meter, slo_ms = EDFQueue(), ArrivalMeter(), 100.0
    context = Context(queue, meter, [0.0], slo_ms)
    context.queued = 1
    balance = Balance(slo_ms)

    def losing(expired):
        context.expired += expired
        return balance.losing(context, tau_ms=2.0, accuracy=70.0, short=0)

    for i in range(500):  # one request per SLO
        context.now_ms = i * slo_ms
        meter.append(context.now_ms)
        assert not losing(0)
        balance.book(extra_ms=2.0, gained=10.0, forgone=0.0)
    assert not losing(10), "500 requests gained 5000 percent, ten lost ones cost 700"
    assert losing(40)
    context.now_ms += 1000 * slo_ms
    balance.book(extra_ms=0.0, gained=0.0, forgone=500.0)
    assert losing(0), "no request has arrived since, so the losses are no older than they were"


@pytest.mark.parametrize("seed", [5, 7])
def test_bursts_of_losses_do_not_end_accuracy_that_gains_more(seed):
    table = affine(0.15, 3, 3.0, (1, 2, 4, 8, 16, 32), concave=True)
    assert lead(table, 0.9, workers=1, slo=3.0, cv2=4.0, seed=seed, count=8000) > 0.0


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
