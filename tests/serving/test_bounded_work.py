"""A decision takes a bounded amount of work, and nothing but the exchange of plans holds the lock.

What is counted is entries of the queue, plans and bytes, not time.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from scheduled import Scheduled

from subnetact.latency.table import LatencyTable
from subnetact.serving.policies import CheapestFeasible, Fixed, HullFit, MaxAcc, MaxBatch, SlackFit
from subnetact.serving.scheduling import dispatch
from subnetact.serving.scheduling.context import ArrivalMeter, Context
from subnetact.serving.scheduling.dispatch import Dispatcher
from subnetact.serving.scheduling.queue import EDFQueue
from subnetact.serving.scheduling.request import Ask, Request

SMALL = LatencyTable(["a", "b"], [70.0, 80.0], [1, 4], [[4.0, 8.0], [8.0, 16.0]])


def table_of(subnets: int, sizes: list[int]) -> LatencyTable:
    latency = np.linspace(1, 5, subnets)[:, None] * np.array(sizes) ** 0.8
    keys = [f"s{i}" for i in range(subnets)]
    return LatencyTable(keys, np.linspace(60, 80, subnets).tolist(), sizes, latency)


class Counted(list[Any]):
    """A list that counts the entries that are read from it one by one or as slices."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        Counted.read += len(found) if isinstance(at, slice) else 1
        return found


def filled(queue: EDFQueue[Any], count: int, floors: list[float]) -> None:
    for i in range(count):
        request = Request(Ask(1000.0 + i / 10, floors[i % len(floors)]), 0.0)
        queue.push(request.deadline_ms, request, request.ask.floor)
    queue._floors = Counted(queue._floors)


# -- floors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("expired", ["drop", "serve"])
def test_a_decision_with_floors_looks_at_a_bounded_number_of_requests(
    a40: LatencyTable, expired: str
) -> None:
    read = []
    for count in (5_000, 50_000):
        dispatcher = Dispatcher(HullFit(a40, 1000.0), [a40], [0.0] * 8, 1000.0, expired, print)
        filled(dispatcher.queue, count, [0.0, 76.0, 0.0, 78.0, 79.4])
        Counted.read = 0
        assert dispatcher.next_batch(0.0, 0) is not None
        read.append(Counted.read)
    assert max(read) < 2_500, read


def test_a_batch_looks_at_a_bounded_number_of_requests_that_demand_more() -> None:
    dispatcher = Dispatcher(Fixed(SMALL, 0), [SMALL], [0.0], 1000.0, "drop", print)
    filled(dispatcher.queue, 20_000, [80.0])
    dispatcher.queue.push(999.0, first := Request(Ask(999.0), 0.0))
    Counted.read = 0
    batch = dispatcher.next_batch(0.0, 0)
    assert batch is not None
    assert batch.part == [first]
    assert Counted.read < 5_000


@pytest.mark.parametrize("floors", [[0.0], [0.0, 0.0, 78.0]])
def test_hullfit_looks_at_a_bounded_number_of_requests(a40: LatencyTable, floors: list[float]) -> None:
    class Recorded(EDFQueue[int]):
        seen = 0

        def deadlines(self, start: int, step: int) -> list[float]:
            found = super().deadlines(start, step)
            Recorded.seen += len(found)
            return found

        def classes(self, start: int, stop: int) -> list[Any]:
            found = super().classes(start, stop)
            Recorded.seen += len(found)
            return found

    policy, queue = HullFit(a40, 1000.0), Recorded()
    for i in range(20_000):
        queue.push(float(i), i, floors[i % len(floors)])
    context = Context(queue, ArrivalMeter(), [0.0] * 8, 1000.0)
    context.queued, context.slack_ms = len(queue), 10.0
    policy.decide(context)
    assert 0 < Recorded.seen < 1_000


KEEPS = {
    "slackfit": lambda table: SlackFit(table, 100.0),
    "hullfit": lambda table: HullFit(table, 100.0),
    "maxbatch": MaxBatch,
    "maxacc": MaxAcc,
    "cheapest": CheapestFeasible,
}


@pytest.mark.parametrize("name", KEEPS)
def test_what_a_policy_keeps_for_floors_is_bounded(name: str) -> None:
    table = table_of(100, [1, 2, 4, 8])
    policy: Any = KEEPS[name](table)
    context = Context(EDFQueue(), ArrivalMeter(), [0.0], 100.0)
    context.queued, context.slack_ms = 1, 100.0

    def ask(floor: float) -> tuple[int, int]:
        context.floor = floor
        context.queue.push(100.0, 0, floor)
        answer: tuple[int, int] = policy.decide(context)
        context.queue.take(1)
        return answer

    for floor in np.linspace(60.0, 80.0, 64).tolist():
        ask(floor)
    tracemalloc.start()
    try:
        for floor in np.linspace(60.001, 79.999, 640).tolist():
            subnet, _ = ask(floor)
            assert table.accuracy[subnet] >= floor
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 150_000


# -- other latencies -----------------------------------------------------------------------------


def test_hullfit_gets_other_latencies_while_another_thread_decides(monkeypatch: Any) -> None:
    """The other thread is played by the constructor of the new hulls: it asks for one more each time."""
    from subnetact.serving.policies import hullfit

    policy = HullFit(SMALL, 100.0)
    for workers in (1, 2, 3):
        policy._hull(workers, 0)
    asks = iter(range(4, 100))

    class Meanwhile(hullfit._Hull):
        busy = False

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if not Meanwhile.busy:
                Meanwhile.busy = True
                policy._hull(next(asks))
                Meanwhile.busy = False

    monkeypatch.setattr(hullfit, "_Hull", Meanwhile)
    made = policy.retabled(SMALL.scaled(2.0))
    assert (made.table.latency_ms == 2.0 * SMALL.latency_ms).all()


def opened(policy: Any) -> Scheduled:
    return Scheduled(policy, slo_ms=100.0)


def serve(live: Scheduled, slower: float = 1.0) -> int:
    """Run every batch that there is, each `slower` times as long as planned; return how many."""
    batches = 0
    while (job := live.idle()) is not None:
        live.now += slower * job.expected_ms
        live.finish(job)
        batches += 1
    live.scheduler.ended.clear()
    return batches


class Hears:
    """A policy that counts what it observes; `made` has every object of it."""

    made: list[Hears]

    def __init__(self, table: LatencyTable) -> None:
        self.table, self.slo_ms, self.heard = table, 100.0, 0
        Hears.made.append(self)

    def decide(self, context: Context) -> tuple[int, int]:
        return 0, 4

    def retabled(self, table: LatencyTable) -> Hears:
        return Hears(table)

    def observe(self, *_: float) -> None:
        self.heard += 1


def test_the_policy_of_other_latencies_hears_what_follows() -> None:
    Hears.made = []
    live = opened(Hears(SMALL))
    for expected in ([3], [3, 3]):
        for _ in range(3):
            live.admit("x", 1e6)
            assert serve(live, slower=3.0) == 1
        assert [policy.heard for policy in Hears.made] == expected
        if len(expected) == 1:
            assert live.learner.refresh(at_once=True)


def test_a_policy_that_cannot_observe_is_not_asked_again_after_a_plan() -> None:
    class Deaf(Hears):
        def retabled(self, table: LatencyTable) -> Deaf:
            return Deaf(table)

        def observe(self, *_: float) -> None:
            super().observe()
            raise RuntimeError("no ears")

    Hears.made = []
    live = opened(Deaf(SMALL))
    for _ in range(2):
        live.admit("x", 1e6)
        assert serve(live, slower=3.0) == 1
        live.learner.refresh(at_once=True)
    assert [policy.heard for policy in Hears.made] == [1, 0, 0]
    [(text, _, error)] = live.scheduler.warnings
    assert "observe(...) raised" in text
    assert isinstance(error, RuntimeError)


def test_a_policy_that_fails_at_other_latencies_keeps_its_plan(caplog: Any) -> None:
    class Fails(Hears):
        def retabled(self, table: LatencyTable) -> Hears:
            raise ZeroDivisionError("in the user's policy")

    Hears.made = []
    policy = Fails(SMALL)
    live = opened(policy)
    live.admit("x", 1e6)
    serve(live, slower=3.0)
    assert live.learner.refresh(at_once=True), "the dispatcher plans with what was learned all the same"
    assert live.scheduler.dispatcher.plans[-1].policy is policy
    assert live.scheduler.dispatcher.expected_ms(0, 1) > 1.2 * SMALL.latency_ms[0, 0]
    assert "in the user's policy" in caplog.text


def test_plans_are_made_without_the_lock(monkeypatch: Any) -> None:
    live = opened(HullFit(SMALL, 100.0))
    held: list[bool] = []

    class Watched(dispatch._Plan):
        def __init__(self, *arguments: Any) -> None:
            held.append(live.learner._lock.locked())
            super().__init__(*arguments)

    monkeypatch.setattr(dispatch, "_Plan", Watched)
    live.admit("x", 1e6)
    serve(live, slower=3.0)
    assert live.learner.refresh(at_once=True)
    assert held == [False]


# -- priorities ----------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", ["served", "cancelled", "expired"])
def test_priorities_are_weighed_only_while_a_request_with_one_waits(monkeypatch: Any, leaves: str) -> None:
    looked: list[int] = []
    original = dispatch.unaffordable

    def counted(queue: Any, *arguments: Any) -> list[int]:
        looked.append(len(queue))
        return original(queue, *arguments)

    monkeypatch.setattr(dispatch, "unaffordable", counted)
    live = opened(Fixed(SMALL, 0))

    def overload() -> None:
        for _ in range(9):
            live.admit("x", 20.0)

    overload()
    serve(live)
    assert not looked, "nobody has a priority"
    overload()
    important = live.admit("x", 20.0, priority=5)
    if leaves == "cancelled":
        live.scheduler.withdraw(important)
    elif leaves == "expired":
        live.now += 1000.0
    serve(live)
    assert bool(looked) == (leaves == "served")
    assert not important.open
    looked.clear()
    overload()
    serve(live)
    assert not looked, "nobody has a priority any more"
