"""The threads of a batcher: workers that hang or die, and clients that harm nobody else."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fake_runners import FOREVER, TABLE, Echo, batcher_threads

from subnetact.errors import BatcherClosed, BatchFailed, DeadlinePassed
from subnetact.latency.table import LatencyTable
from subnetact.serving import Fixed
from subnetact.serving.live import interpreter_exit
from subnetact.serving.live.batcher import Batcher


class Clock:
    """A clock that a test moves, and a batch that hangs until `back` is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.began, self.back, self.tries = threading.Event(), threading.Event(), 0

    def __call__(self) -> float:
        return self.now

    def hang(self) -> str:
        self.tries += 1
        if self.tries > 1:
            return "the second try"
        self.began.set()
        assert self.back.wait(60)
        return "the late one"


def opened(engine: Any = None, **options: Any) -> Batcher:
    options = {"policy": Fixed(TABLE, 0), "slo_ms": 36.0, **options}
    return Batcher(Echo() if engine is None else engine, **options)


def watched(clock: Clock, **options: Any) -> Batcher:
    return opened(clock_ms=clock, watchdog_ms=60.0, **options)


@pytest.fixture(autouse=True)
def left_behind(wait_for: Any) -> Iterator[None]:
    """No thread of a batcher is left behind."""
    before = batcher_threads()
    yield
    wait_for(lambda: batcher_threads() <= before)


def test_a_hung_worker_is_replaced_and_what_it_returns_is_discarded(
    wait_for: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock, before = Clock(), batcher_threads()
    with watched(clock) as batcher:
        threads = len(batcher_threads() - before)
        hangs = batcher.submit(clock.hang, FOREVER)
        assert clock.began.wait(60)
        clock.now = 1000.0
        assert hangs.result(60).output == "the second try"
        assert batcher.submit("next", FOREVER).result(60).output == "next"
        stats = batcher.stats()
        assert (stats.hung, stats.revived, stats.retried, stats.met) == (1, 1, 1, 2)
        clock.back.set()
        wait_for(lambda: len(batcher_threads() - before) == threads)
        assert batcher.stats().met == 2
    (line,) = [record.getMessage() for record in caplog.records]
    told = "batcher worker 0 hung: its batch of 1 on subnet 0 has run for 1000 ms, 1.0 ms were"
    assert line.startswith(told)


@pytest.mark.parametrize("busy", ["a callback", "planning", "the disk"])
def test_a_hang_is_noticed_whatever_else_takes_its_time(
    busy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, go, stuck = Clock(), threading.Event(), threading.Event()

    def block(*_: Any) -> None:
        stuck.set()
        go.wait(60)

    batcher = watched(clock, decision_log=tmp_path / "log.jsonl")
    try:
        hangs = batcher.submit(clock.hang, FOREVER)
        assert clock.began.wait(60)
        if busy == "a callback":
            doomed = batcher.submit("x", 10.0)
            doomed.add_done_callback(block)
            clock.now = 20.0
        elif busy == "planning":
            monkeypatch.setattr(batcher._driver.learner, "refresh", block)
        else:
            monkeypatch.setattr(batcher._driver.log, "flush", block)
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
def test_closing_does_not_wait_for_a_thread_that_hangs(cancel: bool) -> None:
    clock = Clock()
    batcher = watched(clock)
    try:
        future = batcher.submit(clock.hang, FOREVER if cancel else 50.0)
        assert clock.began.wait(60)
        assert not cancel or future.cancel()
        clock.now = 100.0
        closing = threading.Thread(target=batcher.close, daemon=True)
        closing.start()
        closing.join(50)
        assert not closing.is_alive()
        assert future.done()
    finally:
        clock.back.set()


def kill() -> None:
    raise SystemExit("killed")


def test_a_killed_worker_is_revived(caplog: pytest.LogCaptureFixture) -> None:
    with opened() as batcher:
        with pytest.raises(BatchFailed, match="died over this request, twice: SystemExit") as caught:
            batcher.submit(kill, FOREVER).result(20)
        assert isinstance(caught.value.__cause__, SystemExit)
        assert batcher.submit(1, FOREVER).result(20).output == 1
        stats = batcher.stats()
    assert (stats.died, stats.revived, stats.failed, stats.met) == (2, 2, 1, 1)
    assert [r.getMessage() for r in caplog.records] == ["batcher worker 0 died: SystemExit: killed"] * 2


def test_a_worker_that_cannot_enter_is_not_up_does_not_spin_and_every_request_ends(wait_for: Any) -> None:
    go = threading.Event()

    class Broken(Echo):
        def enter_worker(self, threads: int | None) -> None:
            assert go.wait(60)
            self.threads.append(threads)
            raise SystemExit("no device")

    engine, clock = Broken(), Clock()
    batcher = opened(engine, expired="serve", clock_ms=clock)
    first = batcher.submit(1, 300.0)
    assert batcher.stats().workers_up == 0
    go.set()
    wait_for(lambda: batcher.stats().died == 2)
    assert (batcher.stats().workers_up, len(engine.threads)) == (0, 2), "the next start is after a pause"
    clock.now = 301.0
    with pytest.raises(DeadlinePassed):
        first.result(20)
    last = batcher.submit(1, FOREVER)
    batcher.close(drain=False)
    with pytest.raises(BatcherClosed):
        last.result(20)


def test_several_engines_share_one_queue(wait_for: Any) -> None:
    meet = threading.Barrier(3)
    engines = [Echo() for _ in range(3)]
    with opened(engines, threads_per_worker=2) as batcher:
        futures = []
        for _ in range(3):
            futures.append(batcher.submit(lambda: meet.wait(20), FOREVER))
            wait_for(lambda: batcher.stats().queued == 0)
        assert sorted(f.result(20).output for f in futures) == [0, 1, 2]
        assert batcher.stats().workers == 3
    assert [len(engine.ran) for engine in engines] == [1, 1, 1]
    assert [engine.threads for engine in engines] == [[2], [2], [2]]


def test_inputs_and_outputs_are_released(wait_for: Any) -> None:
    class Value:
        def __call__(self) -> Any:
            return Value()

    x, engine = Value(), Echo()
    seen = weakref.ref(x)
    with opened(engine) as batcher:
        future = batcher.submit(x, FOREVER)
        output = weakref.ref(future.result(20).output)
        assert output() is not None
        engine.ran.clear()
        gc.disable()
        try:
            del x
            wait_for(lambda: seen() is None)
            del future
            wait_for(lambda: output() is None)
        finally:
            gc.enable()


def test_callbacks_that_raise_drain_or_close_harm_nobody(
    wait_for: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(_: Any) -> None:
        raise SystemExit("from a callback")

    engine, drained = Echo(), list[bool]()
    with caplog.at_level(logging.ERROR), opened(engine) as batcher:
        held = engine.held(batcher)
        held.add_done_callback(lambda _: drained.append(batcher.drain()))
        held.add_done_callback(lambda _: (batcher.close(), drained.append(True)))
        futures = [batcher.submit(i, FOREVER) for i in range(4)]
        for future in futures:
            future.add_done_callback(leave)
        engine.gate.set()
        assert [f.result(20).output for f in futures] == [0, 1, 2, 3]
        wait_for(lambda: len(drained) == 2)
        assert batcher.drain(20)
        assert batcher.stats().died == 0
    assert drained == [False, True], "this very outcome was still being delivered"
    assert "a callback of a request's future raised" in caplog.text


def test_a_system_without_threads_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, []

    def scarce(self: threading.Thread) -> None:
        if len(refused) < 3:
            refused.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    with opened() as batcher:
        monkeypatch.setattr(threading.Thread, "start", scarce)
        guilty = batcher.submit(kill, FOREVER)
        assert isinstance(guilty.exception(20), BatchFailed)
        assert batcher.submit(1, FOREVER).result(20).output == 1
    assert len(refused) == 3


def test_an_event_loop_that_is_gone_harms_nobody() -> None:
    engine, kept = Echo(), list[weakref.ref[Any]]()
    with opened(engine) as batcher:
        engine.held(batcher)

        async def leave() -> None:
            asyncio.ensure_future(batcher.infer(1, FOREVER)).add_done_callback(lambda t: t.cancelled())
            await asyncio.sleep(0)
            kept.append(weakref.ref(asyncio.get_running_loop()))

        asyncio.run(leave())
        engine.gate.set()
        assert batcher.submit(2, FOREVER).result(20).output == 2
        assert batcher.drain(20)
        assert batcher.stats().cancelled == 1
        gc.collect()
        assert kept[0]() is None


def test_a_cancelled_request_takes_no_outcome_of_one_that_was_dropped_for_it(wait_for: Any) -> None:
    table = LatencyTable(["a"], [70.0], [1], [[1.0]])
    clock, started = Clock(), list[int]()
    gates = [threading.Event() for _ in range(3)]

    def hold(i: int) -> None:
        started.append(i)
        gates[i].wait(60)

    how = {"slo_ms": FOREVER, "workers": 2, "expired": "defer", "max_queue": 2, "clock_ms": clock}
    with opened(Echo(table), policy=Fixed(table, 0), **how) as batcher:
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


TESTS = Path(__file__).parents[1]
BATCHING = """
import threading, time
import torch
from torch import nn
import subnetact
from subnetact.serving import Fixed, Preemptive
torch.set_num_threads(1)
began = set()

class Long(nn.Linear):
    def forward(self, x):
        if threading.current_thread() is not threading.main_thread():
            began.add(threading.get_ident())
            for _ in range(5):
                self.weight @ self.weight
        return super().forward(x)

def engine():
    network = nn.Sequential(nn.Linear(16, 1024), Long(1024, 1024), nn.Linear(1024, 4)).eval()
    space = subnetact.SubnetSpace(
        "m", [subnetact.Axis.uniform("w", ["a"], [32, 1024])], lambda v: {"w": v["w"][0]}
    )
    on = subnetact.WeightSlice.on
    supernet = subnetact.insert_(network, space, {"0": on(out="w"), "1": on(in_="w")})
    return subnetact.Engine(supernet, [space.largest()], example=torch.zeros(1, 16))

engines = [engine(), engine()]
table = subnetact.LatencyTable(engines[0].keys, [50.0], [1], [[1.0]])
policies = Fixed(table, 0), Preemptive(Fixed(table, 0))
batchers = [subnetact.Batcher(e, policy=p, slo_ms=1e6) for e, p in zip(engines, policies)]
for batcher in batchers:
    for _ in range(20):
        batcher.submit(torch.zeros(16), deadline_ms=1e6)
end = time.monotonic() + 60
while len(began) < len(batchers):
    assert time.monotonic() < end
    time.sleep(0.001)
"""
GENERATING = """
import torch
import subnetact
torch.set_num_threads(1)
from generation_tables import step_table
from small_decoders import small_decoder
from subnetact.generation import Generator
sizes = {"intermediate_size": 1024, "hidden_size": 512, "num_hidden_layers": 2}
model = small_decoder("LlamaConfig", **sizes, max_position_embeddings=5000)
supernet = subnetact.insert_(model, example=torch.arange(8).view(1, 8), axes=("ffn",))
spec = supernet.space.largest()
generator = Generator(supernet, [spec], step_table([spec.key], (50.0,)), token_ms=1e6)
completion = generator.submit([1, 2, 3], max_new_tokens=4000)
next(iter(completion))
"""
GENERATES = "assert not completion.done\n"


def test_the_interpreter_ends_while_threads_compute() -> None:
    """Batchers, with and without blocks, and a generator compute at the end of one program."""
    program = GENERATING + BATCHING + GENERATES if find_spec("transformers") else BATCHING
    program = f"import atexit, gc\natexit.unregister(gc.freeze)\n{program}"  # What is left is looked through.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_end_waits_for_no_thread_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter_exit, "WAIT_S", 0.0)
    now = interpreter_exit._Computing()
    now.threads.add(-1)
    end = threading.Thread(target=now.end_all, daemon=True)
    end.start()
    end.join(60)
    assert not end.is_alive()
