"""How the next batch is formed: holes in the table, input shapes, priorities, and work that is bounded."""

from __future__ import annotations

import math
import sys
import tracemalloc
import weakref
from bisect import insort
from typing import Any

import numpy as np
import pytest
from fake_runners import FOREVER, Echo
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduled import Scheduled

from subnetact.errors import BatchFailed, DeadlinePassed, InvalidRequest, PolicyError, TraceError
from subnetact.latency.table import LatencyTable
from subnetact.serving import Batcher, Fixed, HullFit, SlackFit, make_policy, poisson, simulate
from subnetact.serving.policies.registry import policy_names
from subnetact.serving.scheduling.dispatch import Dispatcher
from subnetact.serving.scheduling.floors import NO_FLOOR
from subnetact.serving.scheduling.priority import unaffordable
from subnetact.serving.scheduling.queue import EDFQueue
from subnetact.serving.scheduling.request import Ask, Request

# -- cells that cannot run, or were not measured -----------------------------------------------------

SIZES = [1, 2, 4, 8]


@st.composite
def tables_without_memory(draw: Any) -> LatencyTable:
    """The larger the subnet, the sooner its memory runs out; the smallest runs batch 1 at least."""
    rows = draw(st.integers(1, 4))
    fits = sorted(draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)), reverse=True)
    fits[0] = max(1, fits[0])
    cells = [
        [(1.0 + i) * (2.0 + 0.5 * size) if j < fits[i] else math.nan for j, size in enumerate(SIZES)]
        for i in range(rows)
    ]
    return LatencyTable([f"s{i}" for i in range(rows)], [60.0 + i for i in range(rows)], SIZES, cells)


@settings(max_examples=25)
@given(tables_without_memory(), st.floats(0.2, 3.0), st.sampled_from(["serve", "drop"]), st.booleans())
def test_no_policy_chooses_a_cell_without_memory(
    table: LatencyTable, load: float, rule: str, floors: bool
) -> None:
    arrivals = poisson(1000 * load, 0.2, seed=1)
    runs = [not math.isnan(row[0]) for row in table.latency_ms]
    reached = [percent for percent, can in zip(table.accuracy, runs, strict=True) if can]
    demanded = [reached[i % len(reached)] for i in range(len(arrivals))] if floors else None
    for name in policy_names(table):
        fixed = int(name.partition(":")[2]) if name.startswith("fixed") else None
        if fixed is not None and (floors or not runs[fixed]):
            continue
        policy = make_policy(name, table, 36.0)
        result = simulate(arrivals, table, policy, 36.0, 2, rule, min_accuracy=demanded, decisions=True)
        for decision in result.decisions or ():
            assert not math.isnan(table.latency_ms[decision.subnet, table.pad_index[decision.k]])


def with_holes(table: LatencyTable, rows: Any, columns: Any) -> LatencyTable:
    cells = table.latency_ms.copy()
    cells[rows, columns] = math.nan
    return LatencyTable(table.subnets, table.accuracy, table.batch_sizes, cells)


def test_subnets_that_cannot_run_at_all_are_refused_by_name(a40: LatencyTable) -> None:
    table = with_holes(a40, 5, slice(None))
    with pytest.raises(PolicyError, match="runs at no batch size"):
        make_policy("fixed:5", table, 36.0)
    with pytest.raises(TraceError, match="above the best subnet"):
        simulate([0.0], table, HullFit(table, 36.0), 36.0, min_accuracy=a40.accuracy[5])


def test_a_policy_that_asks_for_the_impossible_is_told_so(a40: LatencyTable) -> None:
    class Stubborn:
        table = with_holes(a40, 5, slice(2, None))

        def decide(self, context: Any) -> tuple[int, int]:
            return 5, 8

    with pytest.raises(PolicyError, match="cannot run there"):
        simulate(np.zeros(8), Stubborn.table, Stubborn(), slo_ms=36.0, workers=1, expired="serve")
    live = Scheduled(Stubborn(), slo_ms=36.0)
    for x in range(9):
        live.admit(x, 1e6)
    assert live.idle() is None
    failures = live.ended()
    assert sorted(failures) == list(range(9)), "those that were taken, and those that still waited"
    assert all(isinstance(failure, BatchFailed) for failure in failures.values())
    assert live.scheduler.unfinished == 0


def dispatcher_of(table: LatencyTable, policy: Any = None, expired: str = "serve") -> Dispatcher:
    return Dispatcher(policy or Fixed(table, 0), [table], [0.0], 1000.0, expired, print)


def test_a_hole_between_measured_sizes_is_padded_to_the_next(a40: LatencyTable) -> None:
    table = LatencyTable(["a"], [70.0], [1, 2, 4], [[1.0, math.nan, 2.0]])
    dispatcher = dispatcher_of(table)
    planned = [dispatcher.plans[0].batch(0, k) for k in (1, 2, 3, 4)]
    assert planned == [(1, 1.0), (4, 2.0), (4, 2.0), (4, 2.0)]
    table, arrivals = with_holes(a40, slice(None), 1), poisson(300, 0.5, seed=0)
    for name in policy_names(table):
        found = simulate(arrivals, table, make_policy(name, table, 36.0), 36.0, 2, progress=False)
        assert found.attainment > 0.5, name


# -- a bounded amount of work ------------------------------------------------------------------------


def lines_run(call: Any) -> int:
    """Return how many lines of Python a call runs."""
    count, before = [0], sys.gettrace()

    def tracing(frame: Any, event: str, argument: Any) -> Any:
        count[0] += event == "line"
        return tracing

    sys.settrace(tracing)
    try:
        call()
    finally:
        sys.settrace(before)
    return count[0]


@pytest.mark.parametrize("expired", ["drop", "serve"])
@pytest.mark.parametrize(
    ("policy", "floors"),
    [(HullFit, [0.0]), (HullFit, [0.0, 76.0, 0.0, 78.0, 79.4]), (lambda table, _: Fixed(table, 0), [79.4])],
)
def test_a_decision_takes_no_longer_behind_a_long_queue(
    a40: LatencyTable, policy: Any, floors: list[float], expired: str
) -> None:
    counted = []
    for count in (5_000, 50_000):
        dispatcher = Dispatcher(policy(a40, 1000.0), [a40], [0.0] * 8, 1000.0, expired, print)
        for i in range(count):
            ask = Ask(999.0 + i / 10, floors[i % len(floors)] if i else 0.0)
            dispatcher.queue.push(Request(ask, 0.0))
        counted.append(lines_run(lambda taken=dispatcher: taken.next_batch(0.0, 0)))
    assert counted[1] < 3 * counted[0]


# -- input shapes ------------------------------------------------------------------------------------

CELLS = np.array([[1.0, 1.5, 2.0], [3.0, 4.0, 6.0], [5.5, 12.0, 18.0]])
SHORT, LONG = (
    LatencyTable(["a", "b", "c"], [70.0, 80.0, 90.0], (1, 2, 4), scale * CELLS) for scale in (1.0, 10.0)
)


class Strings(Echo):
    """An engine of two shapes: strings of at most 4 and of at most 40 characters."""

    samples = ("x" * 4, "x" * 40)

    def shape_of(self, x: str) -> int:
        return int(len(x) > 4)


@pytest.mark.parametrize(("policy", "largest"), [(SlackFit, 4), (HullFit, 1)])
def test_batches_hold_one_shape(policy: Any, largest: int) -> None:
    engine = Strings(SHORT)
    with Batcher(engine, policy=policy(LONG, slo_ms=1e5), table=[SHORT, LONG], learn=False) as batcher:
        first = engine.held(batcher, 1e5)
        inputs = ["ab", "a long string", "c", "another long one", "d", "the last long one"] * 3
        futures = [batcher.submit(x, 1e5) for x in inputs]
        engine.gate.set()
        assert [future.result(20).output for future in (first, *futures)] == ["first", *inputs]
    batches = [batch for _, batch, _ in engine.ran]
    assert all(len({engine.shape_of(x) for x in batch}) == 1 for batch in batches)
    assert max(map(len, batches)) >= largest


@pytest.mark.parametrize(
    ("shapes", "deadline_ms", "expected"),
    [
        ({"short": 0}, 20.0, (2, 1, ["short"])),
        ({"long": 1}, 20.0, (0, 1, ["long"])),
        ({"long": 1}, 200.0, (2, 1, ["long"])),
        # SlackFit plans four long requests on subnet b in 60 ms; one alone can have subnet c in 55 ms.
        ({"long": 1, "s1": 0, "s2": 0, "s3": 0}, 100.0, (2, 1, ["long"])),
    ],
)
def test_the_table_of_the_shape_decides_how_accurate_an_answer_can_be(
    shapes: dict[str, int], deadline_ms: float, expected: Any
) -> None:
    dispatcher = Dispatcher(SlackFit(LONG, slo_ms=500.0), [SHORT, LONG], [0.0], 500.0, "drop", print)
    for name, shape in shapes.items():
        request = Request(Ask(deadline_ms), 0.0, name)
        request.shape = shape
        dispatcher.queue.push(request)
        dispatcher.arrivals.extend([0.0])
    batch = dispatcher.next_batch(0.0, 0)
    assert batch is not None
    size, _ = dispatcher.plans[batch.shape].batch(batch.subnet, len(batch.part))
    assert (batch.subnet, size, [request.x for request in batch.part]) == expected


@pytest.mark.parametrize("shape", [-1, 2, None, "a", 1.0])
def test_an_input_of_an_unknown_shape_harms_no_other(shape: Any) -> None:
    class Unsure(Strings):
        def shape_of(self, x: str) -> Any:
            return shape if x == "wrong" else 0

    with Batcher(Unsure(SHORT), policy=SlackFit(LONG, slo_ms=1e5), table=[SHORT, LONG]) as batcher:
        right = [batcher.submit("before", FOREVER)]
        with pytest.raises(InvalidRequest, match="shape_of"):
            batcher.submit("wrong", FOREVER)
        right.append(batcher.submit("after", FOREVER))
        assert [[one.result(60).output for one in right], batcher.stats().refused] == [["before", "after"], 1]


def test_a_shape_whose_single_inputs_take_longest_keeps_the_floor() -> None:
    table = LatencyTable(SHORT.subnets, SHORT.accuracy, (1, 2), [[1.0, 1.5], [9.0, 4.0], [20.0, 20.0]])
    policy = type("Planned", (), {"table": table, "decide": lambda self, context: (1, 2)})()
    dispatcher = Dispatcher(policy, [table, table], [0.0], 50.0, "drop", print)
    request = Request(Ask(100.0, 80.0), 0.0)
    request.shape = 0
    dispatcher.queue.push(request)
    batch = dispatcher.next_batch(0.0, 0)
    assert batch is not None
    assert batch.subnet == 1


def shaped(policy: Any, slo_ms: float) -> Scheduled:
    return Scheduled(policy, [SHORT, LONG], slo_ms=slo_ms, shape_of=Strings().shape_of)


def test_expiry_and_what_is_learned_go_by_the_latencies_of_a_shape() -> None:
    live = shaped(Fixed(LONG, 0), slo_ms=50.0)
    live.admit("a long string", 5.0)
    live.admit("ab", 5.0)
    job = live.idle()
    assert live.ended() == {"a long string": DeadlinePassed}
    assert job is not None
    assert ([request.x for request in job.requests()], job.expected_ms) == (["ab"], 1.0)
    live = shaped(SlackFit(LONG, slo_ms=500.0), slo_ms=500.0)
    for _ in range(64):  # short requests take three times as long as their table says
        live.admit("ab", 400.0)
        job = live.idle()
        assert job is not None
        live.now += 3.0 * float(SHORT.latency_ms[job.subnet, 0])
        live.finish(job)
    assert live.learner.refresh(at_once=True)
    live.admit("a long string", 400.0)
    job = live.idle()
    assert job is not None
    assert job.expected_ms == pytest.approx(3.0 * float(LONG.latency_ms[job.subnet, 0]), rel=0.2)


# -- priorities --------------------------------------------------------------------------------------

FAST = LatencyTable(["a", "b"], [70.0, 80.0], [1, 4], [[1.0, 2.0], [3.0, 6.0]])


def queue_of(*entries: tuple[float, int]) -> EDFQueue:
    queue = EDFQueue()
    for deadline, priority in entries:
        queue.push(Request(Ask(deadline, priority=priority), 0.0))
    return queue


MIXED = [(2.0, 0)] * 3 + [(2.0, 1)] + [(2.5, 1)] * 2


@pytest.mark.parametrize(
    ("entries", "free", "expected"),
    [
        ([(2.0, 0)] * 4 + [(4.0, 5)] * 4, [0.0], []),  # all deadlines can be met
        ([(2.0, 0)] * 4 + [(2.0, 5)] * 4, [0.0, 0.0], []),
        (MIXED, [0.0], [0, 1]),  # the least important expire
        (MIXED, [0.0, math.inf], [0, 1]),
        ([(2.5, 1)] * 4 + [(2.5, 0)] * 2, [0.0], [4, 5]),
        ([(2.5, 3)] * 9, [0.0], []),  # among equals nobody does
        ([(2.5, 3)] * 9, [math.inf], []),
    ],
)
def test_in_overload_alone_the_least_important_expire(
    entries: list[tuple[float, int]], free: list[float], expected: list[int]
) -> None:
    assert unaffordable(queue_of(*entries), 0.0, free, (2.0, 4), 1.0) == expected


@pytest.mark.parametrize(
    ("rule", "priority", "left_out"), [("drop", 1, (4, 0)), ("defer", 1, (0, 4)), ("serve", 0, (0, 0))]
)
def test_priority_decides_who_misses(rule: str, priority: int, left_out: tuple[int, int]) -> None:
    dropped: list[Request] = []
    dispatcher = Dispatcher(Fixed(FAST, 0), [FAST], [0.0], 36.0, rule, dropped.extend)
    entries = [*((2.0 + i / 100, 0) for i in range(4)), *[(2.5, 1)] * 4]
    dispatcher.queue = dispatcher.context.queue = queue_of(*entries)
    batch = dispatcher.next_batch(0.0, 0)
    assert batch is not None
    assert {request.ask.priority for request in batch.part} == {priority}
    assert (len(dropped), len(dispatcher.deferred)) == left_out


DEADLINES = st.integers(0, 20).map(float)
FLOORS = st.sampled_from([NO_FLOOR, NO_FLOOR, 70.0, 75.0])


class QueueModel(RuleBasedStateMachine):
    """The queue beside a plain sorted list of (deadline, order of arrival, floor)."""

    def __init__(self):
        super().__init__()
        self.queue = EDFQueue()
        self.model = []
        self.requests = []

    @rule(deadline=DEADLINES, floor=FLOORS)
    def push(self, deadline, floor):
        number = len(self.requests)
        self.requests.append(Request(Ask(deadline, floor, number % 3), 0.0, number))
        self.queue.push(self.requests[-1])
        insort(self.model, (deadline, number, floor))

    @rule(entries=st.lists(st.tuples(DEADLINES, FLOORS), min_size=1, max_size=30), ascending=st.booleans())
    def push_several(self, entries, ascending):
        for deadline, floor in sorted(entries) if ascending else entries:
            self.push(deadline, floor)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def take(self, data):
        k = data.draw(st.integers(1, len(self.model)))
        items = self.queue.take(k)
        expected, self.model = self.model[:k], self.model[k:]
        assert [item.x for item in items] == [item for _, item, _ in expected]

    @precondition(lambda self: self.model)
    @rule(k=st.integers(1, 8), accuracy=st.sampled_from([60.0, 70.0, 80.0]))
    def take_satisfied(self, k, accuracy):
        items = self.queue.take_satisfied(k, accuracy)
        expected = [entry for entry in self.model if entry[2] <= accuracy][:k]
        self.model = [entry for entry in self.model if entry not in expected]
        assert [item.x for item in items] == [item for _, item, _ in expected]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data):
        entry = data.draw(st.sampled_from(self.model))
        assert self.queue.remove(self.requests[entry[1]])
        assert not self.queue.remove(self.requests[entry[1]])
        self.model.remove(entry)

    @invariant()
    def agrees(self):
        assert len(self.queue) == len(self.model)
        assert [one.x for one in self.queue.requests(1, 9)] == [item for _, item, _ in self.model[1:9]]
        assert self.queue.demanding == sum(floor > NO_FLOOR for _, _, floor in self.model)
        assert self.queue.prioritised == sum(item % 3 != 0 for _, item, _ in self.model)
        for i, (deadline, _, floor) in enumerate(self.model):
            assert self.queue.deadline(i) == deadline
            assert self.queue.floor(i) == floor
        assert self.queue.deadlines(1, 3) == [deadline for deadline, _, _ in self.model[1::3]]


TestQueueModel = QueueModel.TestCase
TestQueueModel.settings = settings(max_examples=60, stateful_step_count=30)


def test_taken_items_are_released():
    class Input:
        pass

    queue, x = EDFQueue(), Input()
    seen = weakref.ref(x)
    for i in range(2001):
        queue.push(Request(Ask(1.0 + i), 0.0, x if i == 0 else None))
    queue.take(1)
    del x
    assert seen() is None
    assert not any(queue.remove(Request(Ask(deadline), 0.0)) for deadline in (1.0, 2.0, 9999.0))
    assert len(queue) == 2000


def test_long_queues_are_compacted():
    queue, entry_bytes = EDFQueue(), 2 * 8  # deadline and request
    requests = [Request(Ask(float(block)), 0.0) for block in range(200)]
    tracemalloc.start()
    try:
        for block in range(200):
            for _ in range(100):
                queue.push(requests[block])
            queue.take(100 if block % 2 else 99)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 4000 * entry_bytes, "20,000 entries were queued"
    assert len(queue) == 100
