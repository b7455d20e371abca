"""Real threads: workers that hang or die, several engines, draining, cancelling, priorities."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    InvalidRequest,
    OutputNotFinite,
    PolicyError,
    QueueFull,
    WorkerHung,
)
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.live.finite import not_finite
from subnetact.serving.live.rate_limited_log import RateLimitedLog
from subnetact.serving.policies import Fixed, HullFit
from subnetact.serving.scheduling.dispatch import Dispatcher
from subnetact.serving.scheduling.priority import unaffordable
from subnetact.serving.scheduling.queue import EDFQueue
from subnetact.serving.scheduling.request import Ask, Request

TABLE = LatencyTable(["a", "b"], [70.0, 80.0], [1, 4], [[1.0, 2.0], [3.0, 6.0]])
FOREVER = 1e7


class Engine:
    """A runner that returns its inputs; an input may be a function, which is called in the worker."""

    keys = TABLE.subnets

    def __init__(self) -> None:
        self.threads: list[int | None] = []
        self.ran = 0

    def check(self, x: Any, finite: bool = False) -> None:
        if finite and x != x:
            raise InvalidRequest("input: not finite")

    def enter_worker(self, threads: int | None) -> None:
        self.threads.append(threads)

    def run(self, subnet: int, inputs: Any, batch_size: int) -> Any:
        self.ran += 1
        return [x() if callable(x) else x for x in inputs]


class Clock:
    """A clock that a test moves. A batch that moves it past the watchdog's limit and waits hangs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.began, self.back = threading.Event(), threading.Event()

    def __call__(self) -> float:
        return self.now

    def hang(self) -> str:
        self.now += 1000.0
        self.began.set()
        assert self.back.wait(60)
        return "the late one"


def open_batcher(clock: Clock, **options: Any) -> Batcher:
    options = {"slo_ms": 36.0, "watchdog_ms": 60.0, **options}
    return Batcher(Engine(), policy=Fixed(TABLE, 0), clock_ms=clock, **options)


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Threads that other tests have left behind are not counted."""
    OTHERS.update(threading.enumerate())
    yield
    OTHERS.clear()


OTHERS: set[threading.Thread] = set()


def map_leaves(value: Any) -> Any:
    """Return a value of the same form whose numbers are all finite."""
    if isinstance(value, dict):
        return {key: map_leaves(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(map_leaves, value))
    return torch.nan_to_num(value) if isinstance(value, torch.Tensor) else np.nan_to_num(value)


def threads_of_batchers() -> list[str]:
    own = (thread for thread in threading.enumerate() if thread not in OTHERS)
    return [thread.name for thread in own if thread.name.startswith("subnetact-batcher")]


def test_a_hung_worker_is_replaced_and_what_it_returns_is_discarded(
    wait_for: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock, calls = Clock(), []

    def hang_once() -> str:
        calls.append(1)
        return clock.hang() if len(calls) == 1 else "the second try"

    with open_batcher(clock) as batcher:
        assert batcher.submit(hang_once, FOREVER).result(60).output == "the second try"
        assert batcher.submit("next", FOREVER).result(60).output == "next"
        stats = batcher.stats()
        assert (stats.hung, stats.revived, stats.retried, stats.met) == (1, 1, 1, 2)
        clock.back.set()
        wait_for(lambda: threads_of_batchers().count("subnetact-batcher-0") == 1)
        assert batcher.stats().met == 2
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "batcher worker 0 hung: its batch of 1 on subnet 0 has run for 1000 ms, 1.0 ms were"
    )
    assert threads_of_batchers() == []


def test_a_request_over_which_every_worker_hangs_fails_with_a_typed_error(wait_for: Any) -> None:
    clock = Clock()
    with open_batcher(clock) as batcher:
        guilty = batcher.submit(clock.hang, FOREVER)
        mates = [batcher.submit(i, FOREVER) for i in range(3)]
        with pytest.raises(WorkerHung, match="raise watchdog_ms"):
            guilty.result(60)
        clock.now += 1000.0  # the pause before the worker starts once more
        assert [f.result(60).output for f in mates] == [0, 1, 2]
        clock.back.set()
    wait_for(lambda: not threads_of_batchers())


def test_without_time_for_a_second_try_the_deadline_has_passed(wait_for: Any) -> None:
    clock = Clock()
    with open_batcher(clock) as batcher:
        with pytest.raises(DeadlinePassed):
            batcher.submit(clock.hang, 50.0).result(60)
        clock.back.set()
    wait_for(lambda: not threads_of_batchers())


def test_a_thread_that_ends_is_logged_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def leave() -> None:
        if len(calls) == 0:
            calls.append(1)
            raise SystemExit("enough")

    calls: list[int] = []
    with open_batcher(Clock()) as batcher:
        batcher.submit(leave, FOREVER).result(60)
    assert [r.getMessage() for r in caplog.records] == ["batcher worker 0 died: SystemExit: enough"]


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([1.0, math.nan]),
        torch.full((100, 100), math.inf),
        torch.tensor(-math.inf, dtype=torch.float16),
        math.nan,
        np.array([1.0, math.inf]),
        np.float32("nan"),
        [0.0, math.inf],
        (torch.zeros(2), {"scores": torch.tensor([math.nan])}),
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_an_output_that_is_not_finite_fails_alone(bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    good = map_leaves(bad)
    with open_batcher(Clock(), watchdog_ms=math.inf) as batcher:
        first = batcher.submit(lambda: gate.wait(60), FOREVER)
        mates = [batcher.submit(lambda: good, FOREVER) for _ in range(3)]
        guilty = batcher.submit(lambda: bad, FOREVER)
        last = batcher.submit(lambda: bad, FOREVER)
        gate.set()
        assert first.result(60).met
        assert all(mate.result(60).output is good for mate in mates)
        for future in (guilty, last):
            with pytest.raises(OutputNotFinite, match="check_outputs=False"):
                future.result(60)
        batcher.drain()
        stats = batcher.stats()
        assert (stats.not_finite, stats.failed, stats.met) == (2, 2, 4)
        assert stats.submitted == 6
    assert len(caplog.records) == 1, "the second is left out"
    assert "outputs of a batch are not finite" in caplog.text
    with open_batcher(Clock(), check_outputs=False) as batcher:
        assert batcher.submit(lambda: bad, FOREVER).result(60).output is bad
        assert batcher.stats().not_finite == 0


@pytest.mark.parametrize(
    "fine",
    [
        *(
            torch.full((4,), 3e38),
            torch.full((3,), 6e4, dtype=torch.float16),
            torch.ones(2, dtype=torch.bool),
        ),
        *(1e308, "text", None, np.array(["a"]), np.array([object()]), torch.zeros(0), (), [], {}),
        *(torch.eye(2).to_sparse(), torch.tensor([1 + 2j]), [np.zeros(3), "a", torch.zeros(1)]),
    ],
    ids=lambda fine: type(fine).__name__,
)
def test_what_is_finite_or_holds_no_numbers_passes(fine: Any) -> None:
    assert not_finite([fine, fine]) == []
    assert not_finite([fine, math.nan]) == [1]


@pytest.mark.parametrize("busy", ["a callback", "planning", "the disk"])
def test_a_hang_is_noticed_whatever_else_takes_its_time(
    busy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, held, go, stuck, tries = Clock(), threading.Event(), threading.Event(), threading.Event(), []

    def block(*_: Any) -> None:
        stuck.set()
        go.wait(60)

    def hang_once() -> str:
        tries.append(1)
        if len(tries) == 2:
            return "the second try"
        held.set()
        clock.back.wait(60)
        return "the late one"

    batcher = open_batcher(clock, decision_log=tmp_path / "log.jsonl")
    try:
        hangs = batcher.submit(hang_once, FOREVER)
        assert held.wait(60)
        if busy == "a callback":
            doomed = batcher.submit("x", 10.0)
            doomed.add_done_callback(block)
            clock.now = 20.0
        elif busy == "planning":
            monkeypatch.setattr(batcher._driver.learner, "refresh", block)
        else:
            monkeypatch.setattr(batcher._driver._log, "flush", block)
        assert stuck.wait(60)
        clock.now = 100.0
        assert hangs.result(60).output == "the second try"
        assert not go.is_set()
    finally:
        go.set()
        clock.back.set()
        monkeypatch.undo()
        batcher.close()


@pytest.mark.parametrize("cancel", [False, True])
def test_closing_does_not_wait_for_a_thread_that_hangs(cancel: bool, wait_for: Any) -> None:
    began, back, clock = threading.Event(), threading.Event(), Clock()

    def hang() -> None:
        began.set()
        back.wait(60)

    batcher = open_batcher(clock)
    try:
        future = batcher.submit(hang, 50.0 if not cancel else FOREVER)
        assert began.wait(60)
        if cancel:
            assert future.cancel()
        clock.now = 100.0
        closing = threading.Thread(target=batcher.close, daemon=True)
        closing.start()
        closing.join(50)
        assert not closing.is_alive()
        assert future.done()
    finally:
        back.set()
    wait_for(lambda: not threads_of_batchers())


def test_a_killed_worker_is_revived() -> None:
    def kill() -> None:
        raise SystemExit("killed")

    with Batcher(Engine(), policy=Fixed(TABLE, 0), slo_ms=36.0) as batcher:
        with pytest.raises(BatchFailed, match="died over this request, twice: SystemExit") as caught:
            batcher.submit(kill, FOREVER).result(20)
        assert isinstance(caught.value.__cause__, SystemExit)
        assert batcher.submit(1, FOREVER).result(20).output == 1
        stats = batcher.stats()
    assert (stats.died, stats.revived, stats.failed, stats.met) == (2, 2, 1, 1)
    assert threads_of_batchers() == []


def test_while_a_worker_is_lost_the_policy_sees_fewer(wait_for: Any) -> None:
    seen: list[int] = []

    class Counting(HullFit):
        def decide(self, context: Any) -> tuple[int, int]:
            seen.append(sum(free < float("inf") for free in context.free_at_ms))
            return super().decide(context)

        def retabled(self, table: Any) -> Any:
            return self

    clock = Clock()
    options: Any = {"workers": 3, "watchdog_ms": FOREVER, "clock_ms": clock}
    with Batcher(Engine(), policy=Counting(TABLE, 36.0), **options) as batcher:
        stuck = batcher.submit(clock.hang, FOREVER)
        assert clock.began.wait(60)  # alone in its batch
        wait_for(lambda: batcher.submit(1, FOREVER).result(60).met and seen[-1] == 2)
        clock.back.set()
        assert stuck.result(60).output
        wait_for(lambda: batcher.submit(1, FOREVER).result(60).met and seen[-1] == 3)


def test_a_broken_engine_does_not_spin_and_every_request_ends(wait_for: Any) -> None:
    class Broken(Engine):
        def enter_worker(self, threads: int | None) -> None:
            self.threads.append(threads)
            raise SystemExit("no device")

    engine, clock = Broken(), Clock()
    batcher = Batcher(engine, policy=Fixed(TABLE, 0), slo_ms=36.0, expired="serve", clock_ms=clock)
    first = batcher.submit(1, 300.0)
    wait_for(lambda: batcher.stats().died == 2)
    assert (batcher.stats().workers_up, len(engine.threads)) == (0, 2), "the next start is after a pause"
    clock.now = 301.0
    with pytest.raises(DeadlinePassed):
        first.result(20)
    last = batcher.submit(1, FOREVER)
    batcher.close(drain=False)
    with pytest.raises(BatcherClosed):
        last.result(20)
    assert threads_of_batchers() == []


@pytest.mark.parametrize("bad", ["mapping", "lazy"])
def test_outputs_that_cannot_be_read_fail_their_requests_only(bad: str) -> None:
    class Lazy(list[Any]):
        def __iter__(self) -> Any:
            raise ZeroDivisionError("read too late")

    class Odd(Engine):
        def run(self, subnet: int, inputs: Any, batch_size: int) -> Any:
            if "good" in inputs:
                return iter(inputs)
            return Lazy(inputs) if bad == "lazy" else {str(i): x for i, x in enumerate(inputs)}

    with Batcher(Odd(), policy=Fixed(TABLE, 0), slo_ms=36.0) as batcher:
        with pytest.raises(BatchFailed, match=r"read too late|a mapping"):
            batcher.submit("bad", FOREVER).result(20)
        assert batcher.submit("good", FOREVER).result(20).output == "good"
        assert batcher.stats().died == 0


def test_several_engines_share_one_queue(wait_for: Any) -> None:
    meet = threading.Barrier(3)
    engines = [Engine() for _ in range(3)]
    with Batcher(engines, policy=Fixed(TABLE, 0), slo_ms=36.0, threads_per_worker=2) as batcher:
        futures = []
        for _ in range(3):
            futures.append(batcher.submit(lambda: meet.wait(20), FOREVER))
            wait_for(lambda: batcher.stats().queued == 0)
        assert sorted(f.result(20).output for f in futures) == [0, 1, 2]
        assert batcher.stats().workers == 3
    assert [engine.ran for engine in engines] == [1, 1, 1]
    assert [engine.threads for engine in engines] == [[2], [2], [2]]


def test_settings_that_cannot_work_are_refused() -> None:
    class Plain:
        keys = TABLE.subnets

        def check(self, x: Any) -> None:
            pass

        def run(self, subnet: int, inputs: Any, batch_size: int) -> Any:
            return inputs

    policy = Fixed(TABLE, 0)
    for engine, options, match in (
        ([], {}, "empty list"),
        ([Plain(), Plain()], {"workers": 3}, "3 for 2 engines"),
        (Plain(), {"threads_per_worker": 2}, "no method enter_worker"),
        (Plain(), {"threads_per_worker": 0}, "threads_per_worker"),
        (Plain(), {"check_finite": True}, "takes no `finite`"),
        (Plain(), {"watchdog_ms": 0.0}, "watchdog_ms"),
        (Plain(), {"watchdog_ms": float("nan")}, "watchdog_ms"),
        (Plain(), {"slo_ms": float("inf")}, "slo_ms"),
    ):
        with pytest.raises(PolicyError, match=match):
            Batcher(engine, policy=policy, **{"slo_ms": 36.0, **options})
    assert threads_of_batchers() == []


def test_values_that_are_not_finite_are_refused_on_request() -> None:
    nan = float("nan")
    with Batcher(Engine(), policy=Fixed(TABLE, 0), slo_ms=36.0, check_finite=True) as batcher:
        with pytest.raises(InvalidRequest, match="not finite"):
            batcher.submit(nan, FOREVER)
        assert batcher.submit(1.0, FOREVER).result(20).output == 1.0
    with Batcher(Engine(), policy=Fixed(TABLE, 0), slo_ms=36.0, check_outputs=False) as batcher:
        assert batcher.submit(nan, FOREVER).result(20).met


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        ((1, True), {}, "deadline_ms: True is not a number"),
        ((1, 10**400), {}, "deadline_ms: an int beyond"),
        ((1, 36.0), {"min_accuracy": 10**400}, "min_accuracy: an int beyond"),
        ((1, "36"), {}, "deadline_ms: '36' is not a number"),
        ((1, 36.0), {"min_accuracy": "high"}, "min_accuracy: 'high' is not a number"),
        ((1, 36.0), {"priority": 1.5}, "priority: 1.5 is not an int"),
        ((1, 36.0), {"priority": True}, "priority: True is not an int"),
    ],
)
def test_the_door_names_what_is_wrong(arguments: Any, options: Any, match: str) -> None:
    with Batcher(Engine(), policy=Fixed(TABLE, 0), slo_ms=36.0) as batcher:
        with pytest.raises(InvalidRequest, match=match):
            batcher.submit(*arguments, **options)
        assert batcher.stats().refused == 1


def test_draining_ends_everything_accepted_and_refuses_the_rest() -> None:
    go = threading.Event()
    with Batcher(Engine(), policy=Fixed(TABLE, 0), slo_ms=36.0) as batcher:
        futures = [batcher.submit(lambda: go.wait(20), FOREVER) for _ in range(9)]
        assert not batcher.drain(timeout=0.05)
        with pytest.raises(BatcherClosed, match="draining"):
            batcher.submit(1, FOREVER)
        go.set()
        assert batcher.drain(timeout=20)
        assert all(f.done() for f in futures)
    assert batcher.drain()


def test_cancelling_a_future_makes_room_in_the_queue(wait_for: Any) -> None:
    go = threading.Event()
    with Batcher(Engine(), policy=Fixed(TABLE, 0), slo_ms=36.0, max_queue=2) as batcher:
        running = batcher.submit(lambda: go.wait(20), FOREVER)
        wait_for(lambda: batcher.stats().running == 1)
        first, second = batcher.submit(1, FOREVER), batcher.submit(2, FOREVER)
        with pytest.raises(QueueFull):
            batcher.submit(3, FOREVER)
        assert first.cancel()
        assert first.cancel()
        assert batcher.stats().queued == 1
        third = batcher.submit(3, FOREVER)
        done, _ = concurrent.futures.wait([first], timeout=5)
        assert done == {first}
        assert running.cancel(), "its answer is discarded"
        go.set()
        assert (second.result(20).output, third.result(20).output) == (2, 3)
        assert not second.cancel()
        stats = batcher.stats()
    assert (stats.cancelled, stats.met, stats.submitted) == (2, 2, 4)


def test_inputs_and_outputs_are_released(wait_for: Any) -> None:
    class Value:
        def __call__(self) -> Any:
            return Value()

    x = Value()
    seen = weakref.ref(x)
    with Batcher(Engine(), policy=Fixed(TABLE, 0), slo_ms=36.0) as batcher:
        future = batcher.submit(x, FOREVER)
        output = weakref.ref(future.result(20).output)
        assert output() is not None
        gc.disable()
        try:
            del x
            wait_for(lambda: seen() is None)
            del future
            wait_for(lambda: output() is None)
        finally:
            gc.enable()


def test_lines_that_repeat_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    log = RateLimitedLog(logging.getLogger("subnetact.test"))
    for now[0], error in ((0.0, KeyError("a")), (1.0, KeyError("b")), (2.0, OSError("c")), (9.9, KeyError())):
        log.log(logging.WARNING, "a request failed: %s", error, error=error)
    now[0] = 10.0
    log.log(logging.WARNING, "a request failed: %s", "d", error=KeyError("d"))
    lines = [record.getMessage() for record in caplog.records]
    failed = "a request failed: "
    assert lines == [f"{failed}'a'", f"{failed}c", f"{failed}d (2 more since the last such line)"]
    assert "KeyError: 'a'" in caplog.text, "with a traceback"


def test_a_callback_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def leave(_: Any) -> None:
        raise SystemExit("from a callback")

    go = threading.Event()
    with caplog.at_level(logging.ERROR), Batcher(Engine(), policy=Fixed(TABLE, 0), slo_ms=36.0) as batcher:
        held = batcher.submit(lambda: go.wait(20), FOREVER)
        futures = [batcher.submit(i, FOREVER) for i in range(4)]
        for future in futures:
            future.add_done_callback(leave)
        go.set()
        assert [f.result(20).output for f in futures] == [0, 1, 2, 3]
        assert batcher.drain(20)
        assert held.done()
        assert batcher.stats().died == 0
    assert "a callback of a request's future raised" in caplog.text


def test_a_system_without_threads_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, []

    def scarce(self: threading.Thread) -> None:
        if len(refused) < 3:
            refused.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    def kill() -> None:
        raise SystemExit("killed")

    with Batcher(Engine(), policy=Fixed(TABLE, 0), slo_ms=36.0) as batcher:
        monkeypatch.setattr(threading.Thread, "start", scarce)
        guilty = batcher.submit(kill, FOREVER)
        assert isinstance(guilty.exception(20), BatchFailed)
        assert batcher.submit(1, FOREVER).result(20).output == 1
    assert len(refused) == 3


def test_draining_from_a_callback_does_not_block(wait_for: Any) -> None:
    drained: list[bool] = []
    with Batcher(Engine(), policy=Fixed(TABLE, 0), slo_ms=36.0) as batcher:
        go = threading.Event()
        future = batcher.submit(lambda: go.wait(20), FOREVER)
        future.add_done_callback(lambda _: drained.append(batcher.drain()))
        go.set()
        wait_for(lambda: drained)
    assert drained == [False], "this very outcome is still being delivered"


def test_closing_from_a_callback_does_not_block(wait_for: Any) -> None:
    batcher = Batcher(Engine(), policy=Fixed(TABLE, 0), slo_ms=36.0)
    future = batcher.submit(1, FOREVER)
    future.add_done_callback(lambda _: batcher.close())
    assert future.result(20).output == 1
    wait_for(lambda: not threads_of_batchers())


def test_an_event_loop_that_is_gone_harms_nobody() -> None:
    go = threading.Event()
    with Batcher(Engine(), policy=Fixed(TABLE, 0), slo_ms=36.0) as batcher:
        batcher.submit(lambda: go.wait(20), FOREVER)

        async def leave() -> None:
            asyncio.ensure_future(batcher.infer(1, FOREVER)).add_done_callback(lambda t: t.cancelled())
            await asyncio.sleep(0)

        asyncio.run(leave())
        go.set()
        assert batcher.submit(2, FOREVER).result(20).output == 2
        assert batcher.drain(20)
        assert batcher.stats().cancelled == 1


# -- priorities ------------------------------------------------------------------------------


def queue_of(*entries: tuple[float, int]) -> EDFQueue[Request]:
    queue: EDFQueue[Request] = EDFQueue(attrgetter("ask.priority"))
    for deadline, priority in entries:
        queue.push(deadline, Request(Ask(deadline, priority=priority), 0.0))
    return queue


def expired(queue: EDFQueue[Request], free: list[float]) -> list[int]:
    return unaffordable(queue, 0.0, free, (2.0, 4), 1.0)


def test_while_all_deadlines_can_be_met_priority_does_nothing() -> None:
    assert expired(queue_of(*[(2.0, 0)] * 4, *[(4.0, 5)] * 4), [0.0]) == []
    assert expired(queue_of(*[(2.0, 0)] * 4, *[(2.0, 5)] * 4), [0.0, 0.0]) == []


def test_in_overload_the_least_important_expire() -> None:
    entries = [(2.0, 0)] * 3 + [(2.0, 1)] + [(2.5, 1)] * 2
    assert expired(queue_of(*entries), [0.0]) == [0, 1]
    assert expired(queue_of(*entries), [0.0, float("inf")]) == [0, 1]
    assert expired(queue_of(*[(2.5, 1)] * 4, *[(2.5, 0)] * 2), [0.0]) == [4, 5]


def test_among_equals_nobody_expires() -> None:
    assert expired(queue_of(*[(2.5, 3)] * 9), [0.0]) == []
    assert expired(queue_of(*[(2.5, 3)] * 9), [float("inf")]) == []


@pytest.mark.parametrize("rule", ["drop", "defer", "serve"])
def test_priority_decides_who_misses(rule: str) -> None:
    dropped: list[Request] = []
    dispatcher = Dispatcher(Fixed(TABLE, 0), [TABLE], [0.0], 36.0, rule, dropped.extend)
    dispatcher.queue = dispatcher.context.queue = queue_of(
        *[(2.0 + i / 100, 0) for i in range(4)], *[(2.5, 1)] * 4
    )
    batch = dispatcher.next_batch(0.0, 0)
    assert batch is not None
    served = {request.ask.priority for request in batch.part}
    assert served == ({0} if rule == "serve" else {1})
    assert len(dropped) == (4 if rule == "drop" else 0)
    assert len(dispatcher.deferred) == (4 if rule == "defer" else 0)


def test_an_answer_tells_how_long_the_request_waited() -> None:
    clock, started, gate = Clock(), threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        gate.wait(60)

    with open_batcher(clock, watchdog_ms=FOREVER, learn=False) as batcher:
        first = batcher.submit(hold, FOREVER)
        assert started.wait(60)
        second = batcher.submit("x", FOREVER)
        clock.now = 50.0
        gate.set()
        assert (first.result(60).waited_ms, first.result(60).latency_ms) == (0.0, 50.0)
        assert (second.result(60).waited_ms, second.result(60).latency_ms) == (50.0, 50.0)


def test_a_worker_is_up_once_it_has_entered(wait_for: Any) -> None:
    go = threading.Event()

    class Slow(Engine):
        def enter_worker(self, threads: int | None) -> None:
            assert go.wait(60)

    with Batcher(Slow(), policy=Fixed(TABLE, 0), slo_ms=36.0) as batcher:
        assert batcher.stats().workers_up == 0
        future = batcher.submit(1, FOREVER)
        go.set()
        assert future.result(60).output == 1
        assert batcher.stats().workers_up == 1


class Unprintable(Exception):
    def __str__(self) -> str:
        raise AttributeError("detail")

    __repr__ = __str__


def test_an_exception_that_cannot_be_printed_costs_its_request_only() -> None:
    def fail() -> None:
        raise Unprintable

    with open_batcher(Clock()) as batcher:
        futures = [batcher.submit(x, FOREVER) for x in (1, 2, fail, 3, 4)]
        with pytest.raises(BatchFailed, match="Unprintable \\(its __str__ raised\\)"):
            futures[2].result(60)
        assert [future.result(60).output for future in futures if future is not futures[2]] == [1, 2, 3, 4]
        assert batcher.stats().died == 0


def test_an_input_is_not_copied() -> None:
    x = torch.ones(2)
    with open_batcher(Clock()) as batcher:
        assert batcher.submit(x, FOREVER).result(60).output is x


def test_a_cancelled_request_takes_no_outcome_of_one_that_was_dropped_for_it(wait_for: Any) -> None:
    table = LatencyTable(["a"], [70.0], [1], [[1.0]])
    clock, started = Clock(), list[int]()
    gates = [threading.Event() for _ in range(3)]

    def hold(i: int) -> None:
        started.append(i)
        gates[i].wait(60)

    class One(Engine):
        keys = ("a",)

    with Batcher(
        One(), policy=Fixed(table, 0), slo_ms=FOREVER, workers=2, expired="defer", max_queue=2, clock_ms=clock
    ) as batcher:
        busy = [batcher.submit(partial(hold, i), FOREVER) for i in range(2)]
        wait_for(lambda: len(started) == 2)
        late = [batcher.submit("late", 5.0)]
        busy.append(batcher.submit(partial(hold, 2), FOREVER))
        clock.now = 10.0
        gates[1].set()
        wait_for(lambda: len(started) == 3)  # by this decision, what is late was deferred
        late.append(batcher.submit("later", FOREVER))
        patient = batcher.submit("made room", FOREVER)
        assert patient.cancel()
        with pytest.raises(DeadlinePassed):
            late[0].result(60)
        for gate in gates:
            gate.set()
        assert all(future.exception(60) is None for future in (*busy, late[1]))
