from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnetact.errors import PolicyError
from subnetact.latency.table import LatencyTable
from subnetact.serving import (
    CheapestFeasible,
    Fixed,
    HullFit,
    MaxAcc,
    MaxBatch,
    ModelSwitching,
    SlackFit,
    make_policy,
)
from subnetact.serving.policies.registry import policy_names
from subnetact.serving.scheduling.context import ArrivalMeter, Context, Policy
from subnetact.serving.scheduling.frontier import pareto_of_batch, time_per_request, upper_hull
from subnetact.serving.scheduling.queue import EDFQueue
from subnetact.serving.simulation.simulator import simulate
from subnetact.serving.simulation.traces import bursty, poisson


def asked(policy, slack_ms, queued=1, floor=0.0, arrivals=(), now_ms=1000.0, workers=8, expire=None):
    """What a policy answers to a queue of equal deadlines."""
    queue = EDFQueue()
    for i in range(queued):
        queue.push(now_ms + slack_ms, i, floor)
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


def test_the_registry_makes_every_policy(a40):
    for name in policy_names(a40):
        assert isinstance(make_policy(name, a40, 36.0), Policy)
    assert make_policy("slackfit:4", a40, 36.0).buckets == 4
    assert make_policy("fixed:3", a40, 36.0).subnet == 3


def test_an_slo_that_is_too_short_is_told_how_long_it_must_be(a40):
    for factor in (1.0, 1 / 3, 1 / 7, 1e-7, 1e6):
        table = a40.scaled(factor)
        with pytest.raises(PolicyError, match="below the lowest latency") as raised:
            SlackFit(table, slo_ms=0.5 * table.fastest_ms)
        advised = float(str(raised.value).rpartition("at least ")[2])
        assert advised == pytest.approx(table.fastest_ms, rel=1e-5)
        SlackFit(table, slo_ms=advised)
