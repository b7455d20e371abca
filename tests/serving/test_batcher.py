"""The live batcher: every request gets its own answer, or one outcome of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import os
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fake_runners import FOREVER, TABLE, Echo, NeverDecides, Timed, batcher_threads

import subnetact
from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    InvalidRequest,
    OutputNotFinite,
    ProfileMismatch,
    QueueFull,
)
from subnetact.latency.table import LatencyTable
from subnetact.serving import Fixed, HullFit, SlackFit
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.live.finite import not_finite
from subnetact.supernet.supernet import Supernet


def opened(engine: Any, policy: Any = None, **options: Any) -> Batcher:
    return Batcher(engine, policy=policy or Fixed(engine.table, 0), **{"slo_ms": 36.0, **options})


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [SlackFit, HullFit])
def test_threads_get_their_own_answers(a40: LatencyTable, policy: Any) -> None:
    engine = Echo(a40)
    with (
        opened(engine, policy(a40, slo_ms=36.0), workers=2) as batcher,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        futures = list(pool.map(lambda x: batcher.submit(x, FOREVER), range(500)))
        for x, future in enumerate(futures):
            answer = future.result(20)
            assert answer.output == x
            assert answer.accuracy == a40.accuracy[answer.subnet]
            assert answer.met
            assert answer.latency_ms >= answer.waited_ms >= 0
            assert answer.batch_size in a40.batch_sizes
        stats = batcher.stats()
    assert (stats.submitted, stats.met, stats.queued, stats.attainment) == (500, 500, 0, 1.0)
    assert sum(stats.served_by.values()) == 500
    assert stats.batches == len(engine.ran) == sum(stats.batch_sizes.values())


def test_many_event_loops_share_one_batcher() -> None:
    async def ask(start: int) -> list[int]:
        answers = await asyncio.gather(*(batcher.infer(x, FOREVER) for x in range(start, start + 50)))
        return [answer.output for answer in answers]

    async def close() -> None:
        async with batcher:
            assert (await batcher.infer(1)).output == 1, "with the usual time"

    batcher, starts = opened(Echo(), SlackFit(TABLE, slo_ms=FOREVER)), range(0, 4000, 1000)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda start: asyncio.run(ask(start)), starts))
    assert found == [list(range(start, start + 50)) for start in starts]
    asyncio.run(close())
    assert batcher.stats().met == 201


def test_a_real_engine_answers_as_it_does_without_a_batcher(digits: Supernet) -> None:
    images = torch.randn(40, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    space = digits.space
    specs = [space.smallest(), space.spec(depth=2, expand=0.25, width=0.5), space.largest()]
    subnetact.calibrate(digits, specs, [images], progress=False)
    engine = subnetact.Engine(digits, specs, example=torch.zeros(1, 1, 16, 16))
    latency = [[1.0, 2.0, 3.0], [2.0, 3.0, 5.0], [5.0, 9.0, 16.0]]

    def table(supernet: str) -> LatencyTable:
        stamp = {"supernet": supernet}
        return LatencyTable(engine.keys, [60.0, 70.0, 80.0], [1, 4, 8], latency, stamp=stamp)

    async def serve() -> list[Any]:
        floors = [0.0, 65.0, 75.0, 0.0]
        async with Batcher(engine, table=table(engine.fingerprint), slo_ms=FOREVER) as batcher:
            for x in (images[0].double(), torch.zeros(1, 8, 8), "digit"):
                with pytest.raises(InvalidRequest, match="input: "):
                    batcher.submit(x)
            asks = (batcher.infer(x, min_accuracy=floors[i % 4]) for i, x in enumerate(images))
            return await asyncio.gather(*asks)

    for i, answer in enumerate(asyncio.run(serve())):
        expected = engine(images[i : i + 1], subnet=answer.subnet)[0]
        torch.testing.assert_close(answer.output, expected, atol=5e-5, rtol=1e-4)
        assert answer.subnet >= (0, 1, 2, 0)[i % 4]
    with pytest.raises(ProfileMismatch, match="measured on supernet 0123"):
        Batcher(engine, table=table("0123"), slo_ms=36.0)


def test_the_most_urgent_go_first_in_padded_batches_and_the_log_tells_it(
    a40: LatencyTable, tmp_path: Any
) -> None:
    engine, path = Echo(a40), tmp_path / "decisions.jsonl"
    with opened(engine, Fixed(a40, 2), decision_log=path) as batcher:
        futures = [engine.held(batcher), *(batcher.submit(x, FOREVER - 100 * x) for x in range(1, 20))]
        engine.gate.set()
        concurrent.futures.wait(futures, 20)
    assert engine.ran == [(2, ["first"], 1), (2, list(range(19, 3, -1)), 16), (2, [3, 2, 1], 4)]
    seen = [one for one in map(json.loads, path.read_text().splitlines()) if "s" in one]
    told = [(one["queued"], one["s"], one["b"], len(one["a"])) for one in seen]
    assert told == [(1, 2, 1, 1), (19, 2, 16, 16), (3, 2, 4, 3)]
    assert all(0 < one["slack"] <= FOREVER for one in seen)


def test_expired_requests_do_not_run_and_late_answers_say_so() -> None:
    now, engine = [0.0], Echo()
    with opened(engine, clock_ms=lambda: now[0], watchdog_ms=math.inf) as batcher:
        first = engine.held(batcher, 5.0)
        late, live = batcher.submit(1, 10.0), batcher.submit(2, 100.0)
        now[0] = 9.5
        engine.gate.set()
        with pytest.raises(DeadlinePassed, match="in time"):
            late.result(20)
        answer = live.result(20)
        assert (answer.output, answer.met, answer.waited_ms, answer.latency_ms) == (2, True, 9.5, 9.5)
        answer = first.result(20)
        assert (answer.met, answer.waited_ms, answer.latency_ms) == (False, 0.0, 9.5)
        stats = batcher.stats()
    assert (stats.dropped, stats.late) == (1, 1)
    assert all(1 not in inputs for _, inputs, _ in engine.ran)


def test_a_request_without_a_deadline_gets_the_usual_time_and_a_table_is_enough(tmp_path: Any) -> None:
    engine = Timed()
    log = tmp_path / "log.jsonl"
    with Batcher(
        engine, table=TABLE, slo_ms=40.0, clock_ms=engine.clock_ms, decision_log=log, learn=False
    ) as batcher:
        for factor, met in ((13.0, True), (14.0, False)):  # of the 3 ms that the best subnet takes
            engine.factor = factor
            answer = batcher.submit("x").result(20)
            assert (answer.subnet, answer.met) == (1, met)
        with pytest.raises(TypeError, match=r"submit\(\) got an unexpected keyword argument 'foo'"):
            batcher.submit("x", foo=1)  # type: ignore[call-arg]
    assert json.loads(log.read_text().splitlines()[0])["policy"] == "HullFit"


@pytest.mark.parametrize("number", [np.float16(40.0), np.float32(40.0), np.int64(40), 40, 40.0])
def test_a_deadline_of_any_number_type_is_kept_exactly(number: Any) -> None:
    """On a clock that has run for days, 16-bit deadlines would be infinite and 32-bit ones 24 ms later."""
    engine = Timed(factor=41.0)
    engine.now = 1e9
    with opened(engine, clock_ms=engine.clock_ms) as batcher:
        assert batcher.submit(0, deadline_ms=number).result(60).met is False
        batcher.submit(0, deadline_ms=1e308).result(60)
        assert all(math.isfinite(h.total) for h in batcher.stats().histograms.values())


# -- what fails --------------------------------------------------------------------------------------


def test_only_the_guilty_request_fails(a40: LatencyTable) -> None:
    def fail() -> None:
        raise RuntimeError("negative")

    engine = Echo(a40)
    with opened(engine, Fixed(a40, 2)) as batcher:
        first = engine.held(batcher)
        xs = [fail if x in (3, 9) else x for x in range(16)]
        futures = [batcher.submit(x, FOREVER) for x in xs]
        engine.gate.set()
        for x, future in zip(xs, futures, strict=True):
            if x is not fail:
                assert future.result(20).output is x, "inputs and outputs are not copied"
                continue
            with pytest.raises(BatchFailed, match="alone in its batch: RuntimeError: negative") as caught:
                future.result(20)
            assert isinstance(caught.value.__cause__, RuntimeError)
        assert first.result(20).output == "first"
        stats = batcher.stats()
    assert (stats.met, stats.failed, stats.bisected) == (15, 2, 7)
    assert [inputs for _, inputs, _ in engine.ran[1:4]] == [xs, xs[:8], xs[:4]]


class Lazy(list[Any]):
    def __iter__(self) -> Any:
        raise ZeroDivisionError("read too late")


@pytest.mark.parametrize(
    ("outputs", "error", "match"),
    [
        (lambda _: [], BatchFailed, "0 outputs for 1"),
        (lambda inputs: {"0": inputs[0]}, BatchFailed, "a mapping"),
        (Lazy, BatchFailed, "read too late"),
        (lambda _: [{"scores": [torch.zeros(2), torch.tensor(math.nan)]}], OutputNotFinite, "check_outputs="),
    ],
)
def test_a_run_that_goes_wrong_fails_its_requests_only(
    outputs: Any, error: Any, match: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Echo):
        def run(self, subnet: int, inputs: Any, batch_size: int) -> Any:
            return iter(inputs) if "good" in inputs else outputs(inputs)

    with opened(Odd()) as batcher:
        with pytest.raises(error, match=match):
            batcher.submit("bad", FOREVER).result(20)
        assert batcher.submit("good", FOREVER).result(20).output == "good"
        stats = batcher.stats()
        assert (stats.died, stats.failed, stats.not_finite) == (0, 1, error is OutputNotFinite)
    assert ("1 of 1 outputs of a batch are not finite" in caplog.text) == (error is OutputNotFinite)
    with opened(Echo(), check_outputs=False) as batcher:
        assert batcher.submit(lambda: math.nan, FOREVER).result(20).met
        assert batcher.stats().not_finite == 0


# -- clients that leave, and the end -----------------------------------------------------------------


def test_a_cancelled_call_on_an_event_loop_does_not_run() -> None:
    engine = Echo()

    async def main() -> Any:
        async with opened(engine) as batcher:
            engine.held(batcher)
            doomed = asyncio.ensure_future(batcher.infer("doomed", FOREVER))
            kept = asyncio.ensure_future(batcher.infer("kept", FOREVER))
            await asyncio.sleep(0)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            engine.gate.set()
            assert (await kept).output == "kept"
            return batcher.stats()

    stats = asyncio.run(main())
    assert (stats.cancelled, stats.met) == (1, 2)
    assert "doomed" not in [x for _, inputs, _ in engine.ran for x in inputs]


def test_cancelling_a_future_makes_room_in_the_queue() -> None:
    engine = Echo()
    with opened(engine, max_queue=2) as batcher:
        running = engine.held(batcher)
        first, second = batcher.submit(1, FOREVER), batcher.submit(2, FOREVER)
        with pytest.raises(QueueFull, match="2 requests wait"):
            batcher.submit(3, FOREVER)
        assert (first.cancel(), first.cancel(), batcher.stats().queued) == (True, True, 1)
        third = batcher.submit(3, FOREVER)
        assert concurrent.futures.wait([first], timeout=5).done == {first}
        assert running.cancel(), "its answer is discarded"
        engine.gate.set()
        assert (second.result(20).output, third.result(20).output) == (2, 3)
        assert not second.cancel()
        stats = batcher.stats()
    assert (stats.cancelled, stats.met, stats.submitted) == (2, 2, 4)


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("policy", [None, NeverDecides()])
def test_closing_gives_every_request_an_outcome(drain: bool, policy: Any, wait_for: Any) -> None:
    before, engine = batcher_threads(), Echo()
    batcher = opened(engine, policy)
    first = [] if policy else [engine.held(batcher)]
    waiting = [batcher.submit(x, FOREVER) for x in range(40)]
    if drain and first:
        assert not batcher.drain(timeout=0.05)
        with pytest.raises(BatcherClosed, match="draining"):
            batcher.submit(1, FOREVER)
    closer = threading.Thread(target=batcher.close, kwargs={"drain": drain})
    closer.start()
    wait_for(lambda: batcher.closing)
    with pytest.raises(BatcherClosed):
        batcher.submit(1, FOREVER)
    if not drain:
        wait_for(waiting[-1].done)  # before the worker could take it
    engine.gate.set()
    closer.join(60)
    assert not closer.is_alive()
    for x, future in [*zip(["first"], first, strict=False), *enumerate(waiting)]:
        if drain or x == "first":
            assert future.result(0).output == x
        else:
            assert isinstance(future.exception(0), BatcherClosed)
    assert batcher_threads() <= before
    stats = batcher.stats()
    assert stats.met + stats.closed == stats.submitted == 40 + len(first)
    assert batcher.drain()
    batcher.close()
    with pytest.raises(BatcherClosed):
        batcher.__enter__()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_that_the_batcher_stayed_behind() -> None:
    with opened(Echo()) as batcher:
        late = [partial(batcher.submit, 0, deadline_ms=ms) for ms in (20.0, -1.0)]
        with batcher._driver.lock:  # the child inherits a lock that nobody there releases
            child = os.fork()
            if child == 0:
                told = 0
                try:
                    signal.alarm(60)
                    for use in (*late, batcher.stats, batcher.replan, batcher.__enter__):
                        try:
                            use()
                        except BatcherClosed as error:
                            told += "forked" in str(error)
                    told += not batcher.drain(timeout=1.0)
                    batcher.close()
                finally:
                    os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
        assert batcher.submit(0, FOREVER).result(60).output == 0


def test_requests_from_many_threads_each_get_one_outcome_while_the_batcher_closes() -> None:
    """Clients add requests without the lock; those that come too late are refused, and none is forgotten."""

    def client(start: int) -> int:
        futures = {}
        for x in range(start, start + 400):
            try:
                futures[x] = batcher.submit(x, FOREVER)
            except QueueFull:
                continue
            except BatcherClosed:
                break
        assert all(future.result(60.0).output == x for x, future in futures.items())
        return len(futures)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(8):
            batcher = opened(Echo(), SlackFit(TABLE, slo_ms=FOREVER), max_queue=1000)
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                counts = pool.map(client, range(0, 4000, 1000))
                while batcher.stats().submitted < 100:
                    time.sleep(0.0)
                batcher.close()
                answered = sum(counts)
            stats = batcher.stats()
            assert stats.submitted == answered == stats.met + stats.late
    finally:
        sys.setswitchinterval(switch)


@pytest.mark.parametrize(
    "bad",
    [
        *(torch.tensor([1.0, math.nan]), torch.full((100, 100), math.inf)),
        torch.tensor(-math.inf, dtype=torch.float16),
        *(math.nan, np.array([1.0, math.inf]), np.float32("nan"), [0.0, math.inf]),
        (torch.zeros(2), {"scores": torch.tensor([math.nan])}),
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_what_is_not_finite_is_found_among_others_of_its_kind(bad: Any) -> None:
    good = _finite(bad)
    assert not_finite([good, bad, good, bad]) == [1, 3]
    assert not_finite([good, good]) == []
    assert not_finite(["another kind", bad]) == [1]


def _finite(value: Any) -> Any:
    """Return a value of the same form whose numbers are all finite."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_finite, value))
    return torch.nan_to_num(value) if isinstance(value, torch.Tensor) else np.nan_to_num(value)


@pytest.mark.parametrize(
    "fine",
    [
        *(torch.full((4,), 3e38), torch.full((3,), 6e4, dtype=torch.float16)),
        torch.ones(2, dtype=torch.bool),
        *(1e308, "text", None, np.array(["a"]), np.array([object()]), torch.zeros(0), (), [], {}),
        *(torch.eye(2).to_sparse(), torch.tensor([1 + 2j]), [np.zeros(3), "a", torch.zeros(1)]),
    ],
    ids=lambda fine: type(fine).__name__,
)
def test_what_is_finite_or_holds_no_numbers_passes(fine: Any) -> None:
    assert not_finite([fine, fine]) == []
    assert not_finite([fine, math.nan]) == [1]
