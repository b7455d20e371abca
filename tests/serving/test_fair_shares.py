"""Shares between clients: who sends too much does not take the service from others, and no time is wasted."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fake_runners import Echo
from hypothesis import given, settings
from hypothesis import strategies as st

from subnetact import Batcher, HullFit, LatencyTable, SlackFit, simulate
from subnetact.errors import QueueFull
from subnetact.serving import FairShares, poisson
from subnetact.serving.scheduling.fair_shares import ShareMeter


def meter(shares=None, workers=1, slo_ms=20.0):
    return ShareMeter(shares or FairShares(), slo_ms, [0.0] * workers)


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5),
    st.integers(0, 10**6),
    st.sampled_from([2.0, 10.0]),
)
def test_clients_that_always_ask_get_time_by_their_weights(weights, seed, burst_ms):
    rng = random.Random(seed)
    names = [f"client {i}" for i in range(len(weights))]
    buckets = meter(FairShares(burst_ms, dict(zip(names, weights, strict=True))), workers=2)
    granted, now = dict.fromkeys(names, 0.0), 0.0
    for _ in range(3000):
        now += 0.2
        for name in names:
            cost_ms = rng.choice([0.5, 1.0])  # of 0.4 that two workers do
            granted[name] += cost_ms * buckets.take(name, cost_ms, now)
    fair = 2 * now / sum(weights)
    for name, weight in zip(names, weights, strict=True):
        assert abs(granted[name] / weight - fair) <= 0.02 * fair + burst_ms + 1.0 / weight


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_a_client_within_its_share_is_never_beyond_it(seed):
    rng = random.Random(seed)
    buckets, now = meter(FairShares(burst_ms=10.0)), 0.0
    for _ in range(300):
        now += 1.0
        for _ in range(rng.randint(0, 4)):
            buckets.take("greedy", 2.0, now)
        if rng.random() < 0.25:  # half of its share
            assert buckets.take("modest", 1.0, now)


def test_a_bucket_fills_up_again():
    buckets = meter(FairShares(burst_ms=2.0), workers=2)
    assert buckets.take("a", 2.0, 0.0)
    assert not buckets.take("a", 1.0, 0.0)
    assert not buckets.has_left("a", 1.0)
    assert buckets.take("a", 1.0, 0.5)  # both workers worked for 0.5 ms
    assert buckets.take("b", 5.0, 0.5)  # more than a bucket holds, which was full
    assert buckets.take("c", 0.1, 1e6)


# -- in a scheduler and in a batcher ---------------------------------------------------------------

TABLE = LatencyTable(["small", "large"], [60.0, 80.0], [1, 8], [[1.0, 1.2], [5.0, 5.5]])


def in_time(shares, greedy, expired="drop"):
    """Return the shares of a modest and of a greedy client that were in time, and effective accuracy."""
    loads = {"modest": 0.2, "greedy": greedy}  # of what a worker can do
    sent = [
        poisson(1e3 * load * 8 / 1.2, 1.5, seed) for load, seed in zip(loads.values(), (0, 900), strict=True)
    ]
    times, names = np.concatenate(sent), np.repeat(list(loads), [len(one) for one in sent])
    order = np.argsort(times, kind="stable")
    times, names = times[order], names[order]
    slo_ms, clients = np.where(names == "greedy", 10.0, 20.0), {"clients": names.tolist(), "shares": shares}
    found = simulate(times, TABLE, HullFit(TABLE, 20.0), slo_ms, expired=expired, requests=True, **clients)
    met = found.log.finish_ms <= times + slo_ms
    return (
        float(met[names == "modest"].mean()),
        float(met[names == "greedy"].mean()),
        found.effective_accuracy,
    )


@pytest.mark.parametrize(("greedy", "expired"), [(1.5, "drop"), (4.0, "drop"), (3.0, "defer")])
def test_who_sends_too_much_no_longer_takes_the_service_and_no_time_is_wasted(greedy, expired):
    without, _, accuracy = in_time(None, greedy, expired)
    modest, _, shared = in_time(FairShares(), greedy, expired)
    assert modest > max(0.95, without)
    if expired == "drop":
        assert without < 0.75
        assert shared > 0.9 * accuracy


def test_nothing_changes_while_there_is_time_for_all():
    assert in_time(FairShares(), 0.1) == in_time(None, 0.1)


def test_a_client_beyond_its_share_gets_half_of_the_places_of_the_queue():
    engine = Echo(TABLE)
    engine.gate.clear()
    policy = SlackFit(TABLE, slo_ms=1e5)
    how = {"shares": FairShares(burst_ms=1.0), "max_queue": 20, "learn": False, "clock_ms": lambda: 0.0}
    batcher = Batcher(engine, policy=policy, **how)
    try:
        futures = []

        def flood():
            for _ in range(40):
                futures.append(batcher.submit("x", 1e5, client="a"))

        with pytest.raises(QueueFull, match="share"):
            flood()
        assert 9 <= len(futures) <= 20
        futures.append(batcher.submit("x", 1e5, client="b"))
        assert futures[len(futures) // 2].cancel()
    finally:
        engine.gate.set()
        batcher.close()
    assert sum(future.cancelled() for future in futures) == 1
    assert all(future.cancelled() or future.result(20).met for future in futures)
