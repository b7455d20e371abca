"""Preemption between layer blocks: the rule on values, the simulator, and the live batcher beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from fake_runners import FOREVER, Sleeping
from virtual_time import VirtualTime

from subnetact.errors import BatchFailed, DeadlinePassed
from subnetact.latency.table import LatencyTable
from subnetact.serving import Batcher, Fixed, Preemptive, SlackFit, simulate
from subnetact.serving.scheduling.context import ArrivalMeter, Context
from subnetact.serving.scheduling.queue import EDFQueue
from subnetact.serving.scheduling.request import Ask, Job, Request
from subnetact.serving.simulation.simulator import WorkerEvent

BLOCKS = 10
TABLE = LatencyTable(["small", "large"], [70.0, 80.0], [1, 16], [[2.0, 10.0], [8.0, 40.0]])


def context(deadlines: Sequence[float], free_at: Sequence[float], now: float = 0.0) -> Context:
    queue = EDFQueue()
    for deadline in deadlines:
        queue.push(Request(Ask(deadline), 0.0))
    made = Context(queue, ArrivalMeter(), list(free_at), 50.0)
    made.now_ms, made.queued, made.slack_ms = now, len(queue), queue.deadline() - now
    return made


def running(deadlines: Sequence[float] = (), worker: int = 0) -> Job:
    return Job(worker, 1, [Request(Ask(deadline), 0.0) for deadline in deadlines], 0, 0.0)


# -- the rule ------------------------------------------------------------------------------------------


def test_an_urgent_request_preempts_if_nothing_becomes_late() -> None:
    policy = Preemptive(Fixed(TABLE, 1))
    assert policy.preempt(context([20.0], [40.0]), [running([60.0] * 16)]) == 0
    assert policy.decide(context([20.0], [40.0])) == (1, 1)  # the most accurate subnet that is in time
    assert policy.decide(context([20.0], [40.0])) == (1, 1)  # and then what the policy itself decides
    assert policy.preempt(context([5.0], [40.0]), [running()]) == 0
    assert policy.decide(context([5.0], [40.0])) == (0, 1)


def test_nothing_preempts_without_need_or_without_use() -> None:
    for deadline, free_at, worker in (
        (100.0, [40.0], 0),  # in time after the running batch
        (1.0, [40.0], 0),  # late in any case
        (30.0, [20.0, 40.0], 1),  # another worker is free soon
    ):
        asked = context([deadline], free_at), [running(worker=worker)]
        assert Preemptive(Fixed(TABLE, 1)).preempt(*asked) is None


def test_the_value_of_both_sides_decides() -> None:
    victim = running([41.0, 41.0, 300.0])  # two of its requests cannot wait
    assert Preemptive(Fixed(TABLE, 1)).preempt(context([5.0], [40.0]), [victim]) is None
    assert Preemptive(Fixed(TABLE, 1)).preempt(context([30.0] * 3, [40.0]), [victim]) == 0
    other, policy = running([300.0], worker=1), Preemptive(Fixed(TABLE, 1))
    assert policy.preempt(context([30.0], [40.0, 40.0]), [victim, other]) == 1
    assert policy.decide(context([300.0], [0.0])) == (1, 16), "nothing was suspended for the urgent one yet"


def test_blocks_are_as_long_as_the_time_that_urgent_requests_may_wait() -> None:
    for block_ms, layers, batch_ms, length in (
        (20.0, 10, 40.0, 5),
        (20.0, 3, 20.0, 3),  # a batch that is no longer than a block is one
        (20.0, 10, 200.1, 1),  # a longer layer block is a block of its own
        (20.0, 10, 0.0, 1),  # the latency is not known
        (None, 10, 6.8, 2),
        (0.0, 10, 6.8, 1),
    ):
        options = {} if block_ms is None else {"block_ms": block_ms}
        assert Preemptive(SlackFit(TABLE, 50.0), **options).block_length(layers, batch_ms) == length


# -- the simulator ---------------------------------------------------------------------------------------


ARRIVALS = [0.0] * 16 + [5.0]
"""A full batch, and an urgent request while it runs."""


def simulated(policy: Any = None, urgent_ms: float = 20.0, others_ms: float = 100.0, **options: Any) -> Any:
    slo_ms = [others_ms] * 16 + [urgent_ms]
    policy = preemptive() if policy is None else policy
    return simulate(ARRIVALS, TABLE, policy, slo_ms, blocks=BLOCKS, requests=True, **options)


def test_a_batch_stops_at_the_end_of_its_block_and_continues() -> None:
    seen: list[tuple[int, float]] = []

    class Watching(Preemptive):
        def observe(self, subnet: int, batch_size: int, profiled_ms: float, measured_ms: float) -> None:
            seen.append((batch_size, measured_ms))

    result = simulated(Watching(Fixed(TABLE, 1)))
    assert (result.met, result.preempted) == (17, 1)
    assert result.log.start_ms[16] == 8.0  # the second block of 4 ms ends
    assert result.log.finish_ms.tolist() == [48.0] * 16 + [16.0]
    assert seen == [(1, 8.0), (16, 40.0)], "without the time of the urgent one"
    assert simulated(Fixed(TABLE, 1)).met == 16
    events = [WorkerEvent(10.0, 0, False), WorkerEvent(30.0, 0, True)]
    result = simulated(others_ms=200.0, expired="serve", events=events)
    assert (result.met, result.dropped, result.unserved) == (16, 1, 0), "both batches get a second try"


def test_looks_between_blocks_cost_what_the_simulator_is_told() -> None:
    """A block of 8 ms is two of ten layer blocks of 4 ms, so that the batch looks four times."""
    long = simulated(Preemptive(Fixed(TABLE, 1), block_ms=8.0), 22.0, look_ms=0.5)
    assert long.log.start_ms[16] == pytest.approx(8.4)  # a fifth of 42 ms
    assert long.log.finish_ms.tolist() == pytest.approx([50.0] * 16 + [16.4])
    assert long.log.start_ms[0] == 0.0, "a batch that was suspended began before"
    whole = simulate([0.0] * 16, TABLE, preemptive(), 50.0, blocks=BLOCKS, look_ms=0.5)
    assert whole.end_ms == pytest.approx(44.5)  # one look after every layer block but the last
    policy = Preemptive(Fixed(TABLE, 0), block_ms=2.0)
    short = simulate([0.0], TABLE, policy, 50.0, blocks=BLOCKS, look_ms=0.5)
    assert short.end_ms == pytest.approx(2.0), "a batch of at most 2 ms is one block"


# -- live ------------------------------------------------------------------------------------------------


def sleeping(time: VirtualTime | None = None, **options: Any) -> Sleeping:
    return Sleeping(time or VirtualTime(), TABLE, blocks=BLOCKS, **options)


def preemptive(subnet: int = 1) -> Preemptive:
    return Preemptive(Fixed(TABLE, subnet))


def opened(engine: Sleeping, policy: Any, slo_ms: float = 500.0, **options: Any) -> Batcher:
    options = {"slo_ms": slo_ms, "learn": False, "clock_ms": engine.time, **options}
    batcher: Batcher = engine.time.watch(Batcher(engine, policy=policy, **options))
    return batcher


def sixteen(batcher: Batcher, first: Any = "x") -> list[Any]:
    """Submit a full batch, which starts once the worker is free: at once, or after a batch of one."""
    return [batcher.submit(x, FOREVER) for x in [first, *"x" * 15]]


def occupied(engine: Sleeping, batcher: Batcher, first: Any = "x") -> list[Any]:
    """Start a full batch; without a batch of one before it, it might start with fewer requests."""
    ahead = batcher.submit("x", FOREVER)
    engine.time.run(0.0)
    batch = sixteen(batcher, first)
    while not ahead.done():
        engine.time.run(engine.scale * TABLE.latency_ms[1][0] / BLOCKS)
    return batch


def test_a_request_becomes_urgent_when_the_running_batch_falls_behind() -> None:
    """No request arrives in the meantime, so the batch has to look by itself."""
    time = VirtualTime()

    def stall(position: int) -> None:
        if position == 3:
            time.sleep(200.0)

    engine = sleeping(time, scale=5.0)
    with opened(engine, preemptive()) as batcher:
        slow = occupied(engine, batcher, stall)
        future = batcher.submit("x", 265.0)  # in time after the 200 ms that the batch usually takes
        time.run(310.0)
        assert future.result(0).waited_ms == pytest.approx(260.0)
        assert not any(f.done() for f in slow)
        assert batcher.stats().preempted == 1
        time.run()
        assert all(f.done() for f in slow)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_failing_urgent_batch_does_not_harm_the_suspended_one(
    error: type[BaseException], wait_for: Any
) -> None:
    tries: list[int] = []

    def fail(_: int) -> None:
        tries.append(1)
        if error is ValueError or len(tries) == 1:
            raise error("urgent")

    engine = sleeping(scale=5.0)
    with opened(engine, preemptive()) as batcher:
        slow = occupied(engine, batcher)
        urgent = batcher.submit(fail, 80.0)
        engine.time.run(70.0)
        if error is SystemExit:
            wait_for(lambda: batcher.stats().revived == 1)
        engine.time.run()
        if error is ValueError:
            assert isinstance(urgent.exception(0), BatchFailed)
        else:
            assert urgent.exception(0) is None or isinstance(urgent.exception(0), DeadlinePassed)
        for future in slow:  # nothing is lost, even if the worker died with both batches
            assert future.result(0).met


@pytest.mark.parametrize("urgent_hangs", [True, False])
def test_a_worker_that_hangs_in_one_of_two_nested_batches_is_replaced(
    urgent_hangs: bool, wait_for: Any
) -> None:
    time, tries = VirtualTime(), []

    def hang(_: int) -> None:
        tries.append(1)
        if len(tries) == (1 if urgent_hangs else 6):
            time.sleep(math.inf)

    engine = sleeping(time, scale=5.0)
    with opened(engine, preemptive(), watchdog_ms=700.0) as batcher:
        slow = occupied(engine, batcher, "x" if urgent_hangs else hang)
        urgent = batcher.submit(hang if urgent_hangs else "x", 100.0)
        time.run(900.0)
        assert batcher.stats().preempted == 1
        wait_for(lambda: batcher.stats().revived == 1)
        time.run()
        assert all(future.result(0).met for future in slow)
        assert urgent.exception(0) is None or urgent_hangs
        assert batcher.stats().hung == 1
        time.wake_all()
