"""Shares between clients: nobody starves, nothing is lost, and nothing changes for a client that is alone."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnetact import Batcher, LatencyTable, SlackFit
from subnetact.errors import PolicyError, QueueFull
from subnetact.serving import FairShares
from subnetact.serving.scheduling.dispatch import Dispatcher
from subnetact.serving.scheduling.fair_shares import ShareGate
from subnetact.serving.scheduling.queue import EDFQueue
from subnetact.serving.scheduling.request import Ask, Request


class Item(Request):
    def __init__(self, client, due_ms, cost_ms=1.0, floor=0.0):
        super().__init__(Ask(due_ms, floor, client=client), 0.0)
        self.cost_ms = cost_ms


def gate(shares=None, workers=1, most=4, slo_ms=20.0, cost_ms=lambda *_: 1.0):
    queue = EDFQueue()
    return ShareGate(shares or FairShares(), slo_ms, queue, [0.0] * workers, cost_ms, most), queue


def serve(gate_, queue, now_ms, k=1):
    """Let an idle worker take a batch; return its requests."""
    gate_.release(now_ms)
    items = queue.take(min(k, len(queue)))
    if items:
        gate_.spend(items, sum(item.cost_ms for item in items))
        for item in items:
            gate_.ended(item)
    return items


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5),
    st.integers(0, 10**6),
    st.sampled_from([2.0, 10.0]),
)
def test_clients_that_always_have_requests_get_time_by_their_weights(weights, seed, burst_ms):
    rng = random.Random(seed)
    names = [f"client {i}" for i in range(len(weights))]
    shares = FairShares(burst_ms, dict(zip(names, weights, strict=True)))
    gate_, queue = gate(shares)
    waiting = dict.fromkeys(names, 0)
    served = dict.fromkeys(names, 0.0)
    now = 0.0
    for _ in range(600):
        for i, name in enumerate(names):
            while waiting[name] < 5:  # the first client is always the most urgent one
                gate_.push(now, Item(name, now + 1 + 10 * i, rng.choice([0.5, 1.0, 3.0])))
                waiting[name] += 1
        for item in serve(gate_, queue, now):
            waiting[item.ask.client] -= 1
            served[item.ask.client] += item.cost_ms
            now += item.cost_ms
    fair = now / sum(weights)
    for name, weight in zip(names, weights, strict=True):
        # Beyond its share: what the bucket held, and one request that was larger than its estimate.
        assert served[name] / weight <= fair + burst_ms + 8.0 / min(weights)
        assert served[name] >= weight * fair - len(names) * (
            burst_ms * max(weights) + 8.0 * max(1, max(weights))
        )


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_a_client_within_its_share_is_never_held_back(seed):
    rng = random.Random(seed)
    gate_, queue = gate(FairShares(burst_ms=10.0))
    now = next_ms = 0.0
    for _ in range(150):
        for _ in range(rng.randint(0, 4)):
            gate_.push(now, Item("greedy", now + 6, 2.0))
        if now >= next_ms:  # one request of 1 ms every 4 ms is half of its share
            gate_.push(now, Item("modest", now + 20))
            next_ms = now + 4
            assert not any(item.ask.client == "modest" for item in gate_.items())
        now += max(sum(item.cost_ms for item in serve(gate_, queue, now)), 0.1)


@settings(max_examples=80)
@given(st.integers(0, 10**6))
def test_every_request_comes_out_once_and_no_client_stays(seed):
    rng = random.Random(seed)
    gate_, queue = gate(FairShares(burst_ms=rng.choice([0.5, 5.0, 50.0])), most=rng.randint(1, 8))
    pushed, out, now = [], [], 0.0
    for _ in range(200):
        kind = rng.randrange(5)
        if kind <= 1:
            item = Item(rng.choice("abc"), now + rng.uniform(1, 50), rng.choice([0.2, 1.0, 5.0]))
            pushed.append(item)
            gate_.push(now, item)
        elif kind == 2:
            out += serve(gate_, queue, now, rng.randint(1, 4))
        elif kind == 3:
            for item in gate_.expire(now, lambda *_: 1.0):
                gate_.ended(item)
                out.append(item)
        elif pushed:
            item = rng.choice(pushed)
            if gate_.remove(item) or queue.remove(item.deadline_ms, item):
                gate_.ended(item)
                out.append(item)
        now += rng.choice([0.0, 0.1, 3.0])
        assert len(gate_) == len(gate_.items())
        assert len(gate_) + len(queue) + len(out) == len(pushed)
    while len(gate_) + len(queue):
        out += serve(gate_, queue, now)
    assert {id(item) for item in out} == {id(item) for item in pushed}
    assert len(out) == len(pushed)
    gate_.release(now + 1e6)
    assert not gate_._clients


@settings(max_examples=60)
@given(st.lists(st.floats(1, 100), min_size=1, max_size=60))
def test_a_client_that_is_alone_sees_the_plain_queue(deadlines):
    gate_, queue = gate(FairShares(burst_ms=0.1))
    plain = EDFQueue()
    for deadline in deadlines:
        item = Item("alone", deadline)
        gate_.push(0.0, item)
        plain.push(deadline, item)
    assert len(gate_) == 0
    assert queue.take(len(queue)) == plain.take(len(plain))


def test_a_second_client_does_not_wait_behind_a_flood():
    gate_, queue = gate(FairShares(burst_ms=5.0))
    for i in range(100):
        gate_.push(0.0, Item("flood", 20.0 + i))
    assert len(queue) == 100
    gate_.push(0.0, Item("second", 200.0))
    assert len(queue) == 6
    assert len(gate_) == 95
    assert [serve(gate_, queue, 0.0)[0].ask.client for _ in range(6)][-1] == "second"


def test_a_request_that_never_ran_is_not_paid():
    gate_, queue = gate(FairShares(burst_ms=2.0))
    gate_.push(0.0, Item("other", 50.0))
    for _ in range(20):
        item = Item("cancels", 50.0)
        gate_.push(0.0, item)
        assert queue.remove(50.0, item)
        gate_.ended(item)
    gate_.push(0.0, Item("cancels", 50.0))
    assert len(gate_) == 0


def test_the_places_of_the_queue_are_shared():
    gate_, _ = gate()
    taken = 0
    while gate_.has_room("first", 100, taken):
        gate_.push(0.0, Item("first", 50.0))
        taken += 1
    assert taken == 50
    assert gate_.has_room("second", 100, 100)  # a new client gets one place even of a full queue
    gate_.push(0.0, Item("second", 50.0))
    assert gate_.has_room("second", 100, 51)
    assert not gate_.has_room("first", 100, 51)


@pytest.mark.parametrize(
    "wrong", [{"burst_ms": 0}, {"weights": {"a": float("nan")}}, {"weights": {"a": -1.0}}]
)
def test_shares_are_positive_numbers(wrong):
    with pytest.raises(PolicyError):
        FairShares(**wrong)


# -- in a batcher --------------------------------------------------------------------------------


class Timed:
    """A runner that takes the time of its table on its own clock."""

    keys = ("small", "large")

    def __init__(self):
        self.now_ms = 0.0
        self.lock = threading.Lock()

    def check(self, x):
        pass

    def passes(self, ms):
        with self.lock:
            self.now_ms += ms

    def run(self, subnet, inputs, batch_size):
        self.passes((1.0, 5.0)[subnet])
        return list(inputs)


TABLE = LatencyTable(["small", "large"], [60.0, 80.0], [1, 8], [[1.0, 1.2], [5.0, 5.5]])


def in_time(shares):
    """How many of 53 requests of a modest client are in time beside a greedy one with 6 ms and a floor."""
    dropped = []
    policy = SlackFit(TABLE, slo_ms=20.0)
    dispatcher = Dispatcher(policy, [TABLE], [0.0], 20.0, "drop", dropped.extend, shares)
    gate_ = dispatcher.gate
    arrivals = [(0.3 * i, Item("greedy", 0.3 * i + 6.0, floor=80.0)) for i in range(2200)]
    arrivals += [(50.0 + 5.3 * i, Item("modest", 50.0 + 5.3 * i + 8.0)) for i in range(53)]
    arrivals.sort(key=lambda arrival: arrival[0])
    met = {"greedy": 0, "modest": 0}
    now, at = 0.0, 0
    while at < len(arrivals) or len(dispatcher):
        while at < len(arrivals) and arrivals[at][0] <= now:
            arrived_ms, item = arrivals[at]
            at += 1
            if gate_ is None:
                dispatcher.queue.push(item.deadline_ms, item, item.ask.floor)
            else:
                gate_.push(arrived_ms, item)
        batch = dispatcher.next_batch(now, 0)
        if batch is None:
            now = arrivals[at][0] if at < len(arrivals) else now + 1.0
            continue
        now += dispatcher.expected_ms(batch.subnet, len(batch.part))
        for item in batch.part:
            met[item.ask.client] += now <= item.deadline_ms
            if gate_ is not None:
                gate_.ended(item)
        for item in dropped:
            if gate_ is not None:
                gate_.ended(item)
        dropped.clear()
    return met


def test_short_deadlines_and_a_floor_no_longer_take_the_service():
    without, with_shares = in_time(None), in_time(FairShares(burst_ms=4.0))
    assert without["modest"] < 35
    assert with_shares["modest"] == 53
    assert with_shares["greedy"] > 0.75 * without["greedy"]  # what the modest client leaves is not wasted


def test_one_client_does_not_fill_the_queue():
    class Waits(Timed):
        gate = threading.Event()

        def run(self, subnet, inputs, batch_size):
            assert self.gate.wait(20)
            return list(inputs)

    batcher = Batcher(
        Waits(), policy=SlackFit(TABLE, slo_ms=1e5), shares=FairShares(), max_queue=20, learn=False
    )
    try:
        futures = []

        def flood():
            for _ in range(40):
                futures.append(batcher.submit("x", 1e5, client="a"))

        with pytest.raises(QueueFull, match="share"):
            flood()
        assert 9 <= len(futures) <= 20
        futures.append(batcher.submit("x", 1e5, client="b"))
        stats = batcher.stats()
        assert stats.queued + stats.running == len(futures)
        held = futures[len(futures) // 2]
        assert held.cancel()
        Waits.gate.set()
        for future in futures:
            if future is not held:
                assert future.result(20).met
    finally:
        Waits.gate.set()
        batcher.close()


@pytest.mark.parametrize("expired", ["drop", "defer", "serve"])
def test_many_clients_lose_nothing_under_every_rule(expired):
    rng = random.Random(0)
    policy, engine = SlackFit(TABLE, slo_ms=20.0), Timed()
    with Batcher(
        engine,
        policy=policy,
        shares=FairShares(burst_ms=2.0),
        expired=expired,
        workers=2,
        clock_ms=lambda: engine.now_ms,
    ) as batcher:
        futures = []
        for _ in range(300):
            floor = rng.choice([None, 80.0])
            futures.append(
                batcher.submit("x", rng.uniform(2, 40), min_accuracy=floor, client=rng.choice("abcde"))
            )
            if rng.random() < 0.2:
                rng.choice(futures).cancel()
            if rng.random() < 0.3:
                engine.passes(1.0)
    assert all(future.done() for future in futures)
    stats = batcher.stats()
    ended = stats.met + stats.late + stats.dropped + stats.cancelled
    assert ended == stats.submitted == 300
    assert not stats.queued
    gate_ = batcher._driver.scheduler.gate
    gate_.release(gate_._now_ms + 1e6)
    assert not gate_._clients
