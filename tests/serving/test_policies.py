from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving import CheapestFeasible, Fixed, HullFit, MaxAcc, MaxBatch, ModelSwitching, SlackFit
from subnetact.serving.policies.fronts import Fronts
from subnetact.serving.scheduling.context import ArrivalMeter, Context
from subnetact.serving.scheduling.frontier import pareto_of_batch, time_per_request, upper_hull
from subnetact.serving.scheduling.queue import EDFQueue
from subnetact.serving.scheduling.request import Ask, Request
from subnetact.serving.simulation.simulator import simulate
from subnetact.serving.simulation.traces import bursty, poisson


def asked(policy, slack_ms, queued=1, floor=0.0, arrivals=(), now_ms=1000.0, workers=8, expire=None):
    """What a policy answers to a queue of equal deadlines."""
    queue = EDFQueue()
    for _ in range(queued):
        queue.push(Request(Ask(slack_ms, floor), now_ms))
    meter = ArrivalMeter()
    if len(arrivals):
        meter.extend(list(arrivals))

    def remove(count):
        queue.take(count)
        expire(count)

    context = Context(queue, meter, [now_ms] * workers, 36.0, remove if expire else None)
    context.now_ms, context.queued, context.slack_ms, context.floor = now_ms, queued, slack_ms, floor
    return policy.decide(context)


@st.composite
def tables(draw):
    rows, sizes = draw(st.integers(1, 6)), [1, 2, 4, 8]
    cells = draw(
        st.lists(st.lists(st.integers(20, 400), min_size=4, max_size=4), min_size=rows, max_size=rows)
    )
    accuracy = draw(st.lists(st.integers(600, 900), min_size=rows, max_size=rows))
    return LatencyTable([f"s{i}" for i in range(rows)], np.array(accuracy) / 10, sizes, np.array(cells) / 10)


def slackfit_by_the_book(table, slo, buckets, slack, queued):
    """SlackFit straight from its definition, over all options at every decision."""
    sizes, accuracy = table.batch_sizes, table.accuracy
    options = []
    for j, size in enumerate(sizes):
        for s in range(len(table.subnets)):
            mine = table.latency_ms[s, j]
            better = any(
                (table.latency_ms[o, j], -accuracy[o]) < (mine, -accuracy[s]) and accuracy[o] >= accuracy[s]
                for o in range(len(table.subnets))
                if o != s
            )
            if mine <= slo and not better:
                options.append((mine, size, accuracy[s], s))
    low, high = min(o[0] for o in options), max(o[0] for o in options)
    width = (high - low) / buckets
    edges = [low + width * (b + 1) for b in range(buckets - 1)] + [high]
    padded = table.padded(min(queued, sizes[-1]))
    kept = chosen = None
    for b in range(buckets):
        inside = [
            o
            for o in options
            if min(int((o[0] - low) / width) if width else 0, buckets - 1) == b and o[1] <= padded
        ]
        best = max(inside, key=lambda o: (o[1], o[2], -o[3]), default=None)
        if best is not None and (kept is None or best[1] >= kept[1]):
            kept = best
        if edges[b] <= slack:
            chosen = kept
    if chosen is None:
        fits = [
            (size, accuracy[s], -table.latency_ms[s, j], s)
            for j, size in enumerate(sizes)
            for s in range(len(table.subnets))
            if size <= padded and table.latency_ms[s, j] <= slack
        ]
        if not fits:
            return None
        best = max(fits)
        return best[1], best[0]
    return chosen[2], chosen[1]


@settings(max_examples=150)
@given(
    table=tables(),
    slo=st.integers(41, 60),
    buckets=st.integers(1, 12),
    slack=st.floats(0, 60),
    queued=st.integers(1, 12),
)
def test_slackfit_is_its_definition(table, slo, buckets, slack, queued):
    expected = slackfit_by_the_book(table, slo, buckets, slack, queued)
    subnet, size = asked(SlackFit(table, slo, buckets), slack, queued)
    if expected is None:
        assert size == 8
        assert time_per_request(table)[subnet] == min(time_per_request(table))
    else:
        assert (table.accuracy[subnet], size) == expected


def test_slackfit_keeps_its_margin(a40):
    tight = SlackFit(a40, margin_ms=2.0, margin=0.1, slo_ms=36.0)
    for slack in np.arange(0.0, 40.0, 0.37):
        assert asked(tight, slack, 16) == asked(SlackFit(a40, slo_ms=36.0), (slack - 2.0) / 1.1, 16)


@settings(max_examples=100)
@given(table=tables(), slack=st.floats(0, 60), queued=st.integers(1, 12))
def test_greedy_policies_are_their_definitions(table, slack, queued):
    latency, sizes = table.latency_ms, table.batch_sizes
    taus = time_per_request(table)

    subnet, size = asked(MaxAcc(table), slack, queued)
    fits = [s for s in range(len(taus)) if latency[s, 0] <= slack]
    if fits:
        assert table.accuracy[subnet] == max(table.accuracy[s] for s in fits)
        assert latency[subnet, sizes.index(size)] <= slack
        assert size == max(b for j, b in enumerate(sizes) if latency[subnet, j] <= slack)
    else:
        assert (taus[subnet], size) == (min(taus), 8)

    subnet, size = asked(MaxBatch(table), slack, queued)
    small = min(range(len(taus)), key=lambda s: (taus[s], -table.accuracy[s], s))
    sized = [b for j, b in enumerate(sizes) if latency[small, j] <= slack]
    if sized:
        column = min(sizes.index(max(sized)), table.pad_index[min(queued, 8)])
        fits = [s for s in range(len(taus)) if latency[s, column] <= slack]
        if fits:
            assert size == sizes[column]
            assert table.accuracy[subnet] == max(table.accuracy[s] for s in fits)

    fixed = len(taus) - 1
    subnet, size = asked(Fixed(table, fixed), slack, queued)
    fitting = [b for j, b in enumerate(sizes) if latency[fixed, j] <= slack]
    assert (subnet, size) == (fixed, max(fitting, default=8))

    floor = sorted(table.accuracy)[len(taus) // 2]
    subnet, _ = asked(CheapestFeasible(table), slack, queued, floor)
    assert table.accuracy[subnet] >= floor
    assert taus[subnet] == min(tau for tau, a in zip(taus, table.accuracy, strict=True) if a >= floor)


@settings(max_examples=100)
@given(points=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=12))
def test_the_hull_is_concave_and_above_every_point(points):
    hull = upper_hull([(x, y, i) for i, (x, y) in enumerate(points)])
    xs, ys = [p[0] for p in hull], [p[1] for p in hull]
    assert all(points[label] == (x, y) for x, y, label in hull)
    slopes = np.diff(ys) / np.diff(xs)
    assert np.all(slopes > 0)
    assert np.all(np.diff(slopes) < 0)
    for x, y in points:
        assert x >= xs[0]
        assert np.interp(x, xs, ys) >= y - 1e-9


@settings(max_examples=60)
@given(table=tables())
def test_fronts_hold_exactly_what_is_not_dominated(table):
    for column in range(4):
        front = pareto_of_batch(table, column)
        points = list(zip(table.latency_ms[:, column], table.accuracy, strict=True))
        best = {p for p in points if not any((q[0] <= p[0] and q[1] >= p[1] and q != p) for q in points)}
        assert {(o.latency_ms, o.accuracy) for o in front} == best


def test_hullfit_spends_idle_time_on_accuracy_and_busy_time_on_speed(a40):
    idle = asked(HullFit(a40, slo_ms=36.0), 36.0, 1)
    assert idle == (5, 1)
    now = 1000.0
    flood = np.arange(0.0, now, 1000.0 / 19000)
    subnet, size = asked(HullFit(a40, slo_ms=36.0), 20.0, 400, arrivals=flood, now_ms=now)
    assert (subnet, size) == (0, 16)


def test_hullfit_spends_the_time_that_requests_have(a40):
    """A burst of long deadlines runs on the best subnet, beside urgent requests, none of which is late."""
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(0.0, 2400.0, 2000))
    urgent = rng.random(2000) < 0.1
    runs = {}
    for name, slos in (("usual", 36.0), ("mixed", np.where(urgent, 36.0, 20 * 36.0)), ("long", 20 * 36.0)):
        runs[name] = simulate(times, a40, HullFit(a40, 36.0), slos, 1, progress=False)
    burst = simulate([1000.0] * 256, a40, HullFit(a40, 36.0), 30_000.0, 1, progress=False)
    assert burst.served_by[-1] == burst.met == 256
    assert runs["mixed"].missed == runs["long"].missed == 0
    assert runs["mixed"].served_by[-1] > 1.3 * runs["usual"].served_by[-1]


def test_hullfit_lets_requests_expire_only_if_it_must(a40):
    expired = []
    asked(HullFit(a40, slo_ms=36.0), 4.0, 1000, expire=expired.append)
    assert expired == [984]
    for slack, queued, answer in ((7.0, 1000, (0, 16)), (4.0, 100, (0, 8))):
        assert asked(HullFit(a40, slo_ms=36.0), slack, queued, expire=expired.append) == answer
    assert expired == [984]


def test_hullfit_misses_nothing_where_slackfit_does(a40):
    trace = bursty(3000, 11100, 8, 3, seed=3)
    policies = HullFit(a40, slo_ms=36.0), SlackFit(a40, slo_ms=36.0)
    best, other = (simulate(trace, a40, policy, 36.0, 8, "serve") for policy in policies)
    assert best.missed == 0 < other.missed
    assert best.effective_accuracy > other.effective_accuracy


def test_model_switching_follows_the_rate(a40):
    times = np.concatenate([poisson(1000, 4, seed=0), 4000 + poisson(11000, 4, seed=1)])
    policy = ModelSwitching(a40, slo_ms=36.0)
    decisions = simulate(times, a40, policy, 36.0, 8, "serve", decisions=True).decisions
    early = {d.subnet for d in decisions if 1000 < d.t_ms < 4000}
    late = {d.subnet for d in decisions if d.t_ms > 6000}
    assert max(a40.accuracy[s] for s in late) < min(a40.accuracy[s] for s in early)
    changes = [b.t_ms for a, b in pairwise(decisions) if a.subnet != b.subnet]
    assert np.all(np.diff(changes) >= 1000.0)


def test_an_slo_that_is_too_short_is_told_how_long_it_must_be(a40):
    for factor in (1.0, 1 / 3, 1 / 7, 1e-7, 1e6):
        table = a40.scaled(factor)
        with pytest.raises(PolicyError, match="below the lowest latency") as raised:
            SlackFit(table, slo_ms=0.5 * table.fastest_ms)
        advised = float(str(raised.value).rpartition("at least ")[2])
        assert advised == pytest.approx(table.fastest_ms, rel=1e-5)
        SlackFit(table, slo_ms=advised)


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
    queue.push(Request(Ask(slo_ms), 50 * slo_ms))
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
