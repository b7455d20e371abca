import asyncio
import concurrent.futures
import json
import math
import threading

import pytest

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    InvalidRequest,
    PolicyError,
    ProfileMismatch,
    QueueFull,
)
from subnetact.serving.live.answers import AnswerFuture
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.policies import Fixed, HullFit, SlackFit

FOREVER = 1e7


class Doubler:
    """A runner that returns (subnet, 2 x), records its batches, and can be held or made to fail."""

    def __init__(self, table):
        self.keys = table.subnets
        self.ran = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def check(self, x):
        if not isinstance(x, int):
            raise InvalidRequest(f"x: {x!r} is not an int")

    def run(self, subnet, inputs, batch_size):
        self.entered.release()
        assert self.gate.wait(20)
        self.ran.append((subnet, list(inputs), batch_size))
        if any(x < 0 for x in inputs):
            raise RuntimeError("negative")
        return [(subnet, 2 * x) for x in inputs]


@pytest.fixture
def engine(a40):
    return Doubler(a40)


def held(engine, batcher):
    """Occupy the only worker, so that further requests wait in the queue."""
    engine.gate.clear()
    first = batcher.submit(0, FOREVER)
    assert engine.entered.acquire(timeout=20)
    return first


def test_threads_get_their_own_answers(a40, engine):
    with (
        Batcher(engine, policy=SlackFit(a40, slo_ms=36.0), workers=2) as batcher,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        futures = list(pool.map(lambda x: batcher.submit(x, FOREVER), range(500)))
        for x, future in enumerate(futures):
            answer = future.result(20)
            assert answer.output == (answer.subnet, 2 * x)
            assert answer.accuracy == a40.accuracy[answer.subnet]
            assert answer.met
            assert answer.latency_ms >= 0
            assert answer.batch_size in a40.batch_sizes
        stats = batcher.stats()
    assert (stats.submitted, stats.met, stats.queued) == (500, 500, 0)
    assert stats.attainment == 1.0
    assert sum(stats.served_by.values()) == 500
    assert stats.batches == len(engine.ran) == sum(stats.batch_sizes.values())


def test_asyncio_gets_its_own_answers(a40, engine):
    before = set(threading.enumerate())

    async def main():
        async with Batcher(engine, policy=HullFit(a40, slo_ms=36.0)) as batcher:
            answers = await asyncio.gather(*(batcher.infer(x, FOREVER) for x in range(300)))
        assert [answer.output[1] for answer in answers] == [2 * x for x in range(300)]
        return batcher

    batcher = asyncio.run(main())
    assert batcher.stats().met == 300
    assert set(threading.enumerate()) <= before


def test_many_event_loops_at_once(a40, engine):
    with Batcher(engine, policy=SlackFit(a40, slo_ms=36.0)) as batcher:

        async def ask(start):
            answers = await asyncio.gather(*(batcher.infer(x, FOREVER) for x in range(start, start + 50)))
            return [answer.output[1] for answer in answers]

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for start, outputs in zip(
                range(4), pool.map(lambda s: asyncio.run(ask(1000 * s)), range(4)), strict=True
            ):
                assert outputs == [2 * x for x in range(1000 * start, 1000 * start + 50)]


def test_the_most_urgent_go_first_in_padded_batches(a40, engine):
    with Batcher(engine, policy=Fixed(a40, 2), slo_ms=36.0) as batcher:
        first = held(engine, batcher)
        others = [batcher.submit(x, FOREVER - 100 * x) for x in range(1, 20)]
        engine.gate.set()
        concurrent.futures.wait([first, *others], 20)
    assert engine.ran == [
        (2, [0], 1),
        (2, list(range(19, 3, -1)), 16),
        (2, [3, 2, 1], 4),
    ]


def test_the_log_tells_what_was_decided(a40, engine, tmp_path):
    path = tmp_path / "decisions.jsonl"
    with Batcher(engine, policy=Fixed(a40, 1), slo_ms=36.0, decision_log=path) as batcher:
        first = held(engine, batcher)
        others = [batcher.submit(x, FOREVER) for x in range(3)]
        engine.gate.set()
        concurrent.futures.wait([first, *others], 20)
    _, *seen = map(json.loads, path.read_text().splitlines())
    assert [(d["queued"], d["s"], d["b"], len(d["a"])) for d in seen] == [(1, 1, 1, 1), (3, 1, 4, 3)]
    assert all(0 < d["slack"] <= FOREVER for d in seen)


def test_expired_requests_are_answered_at_once_without_running(a40, engine):
    now = [0.0]
    with Batcher(engine, policy=SlackFit(a40, slo_ms=36.0), clock_ms=lambda: now[0]) as batcher:
        first = held(engine, batcher)
        late, live = batcher.submit(1, 10.0), batcher.submit(2, 100.0)
        now[0] = 9.0
        engine.gate.set()
        with pytest.raises(DeadlinePassed, match="in time"):
            late.result(20)
        assert live.result(20).output[1] == 4
        assert first.result(20).met
        stats = batcher.stats()
    assert stats.dropped == 1
    assert all(1 not in inputs for _, inputs, _ in engine.ran)


def test_late_answers_say_so(a40, engine):
    now = [0.0]
    with Batcher(engine, policy=SlackFit(a40, slo_ms=36.0), clock_ms=lambda: now[0]) as batcher:
        engine.gate.clear()
        future = batcher.submit(1, 20.0)
        assert engine.entered.acquire(timeout=20)
        now[0] = 25.0
        engine.gate.set()
        answer = future.result(20)
        assert (answer.met, answer.latency_ms) == (False, 25.0)
        assert batcher.stats().late == 1


def test_only_the_guilty_request_fails(a40, engine):
    with Batcher(engine, policy=Fixed(a40, 2), slo_ms=36.0) as batcher:
        first = held(engine, batcher)
        xs = [1, 2, 3, -4, 5, 6, 7, 8, 9, -10, 11, 12, 13, 14, 15, 16]
        futures = [batcher.submit(x, FOREVER) for x in xs]
        engine.gate.set()
        for x, future in zip(xs, futures, strict=True):
            if x > 0:
                assert future.result(20).output == (2, 2 * x)
            else:
                with pytest.raises(BatchFailed, match="alone in its batch: RuntimeError: negative") as caught:
                    future.result(20)
                assert isinstance(caught.value.__cause__, RuntimeError)
        assert first.result(20).output[1] == 0
        stats = batcher.stats()
    assert (stats.met, stats.failed, stats.bisected) == (15, 2, 7)
    assert [inputs for _, inputs, _ in engine.ran[1:4]] == [xs, xs[:8], xs[:4]]


def test_an_engine_that_loses_outputs_is_caught(a40, engine):
    engine.run = lambda subnet, inputs, batch_size: []
    with (
        Batcher(engine, policy=SlackFit(a40, slo_ms=36.0)) as batcher,
        pytest.raises(BatchFailed, match="0 outputs for 1"),
    ):
        batcher.submit(1, FOREVER).result(20)


def test_a_policy_that_raises_does_not_stop_the_worker(a40, engine):
    class Moody(SlackFit):
        def decide(self, context):
            if context.queue.deadline() - context.now_ms > FOREVER / 2:
                raise ZeroDivisionError("moody")
            return super().decide(context)

    with Batcher(engine, policy=Moody(a40, slo_ms=36.0)) as batcher:
        with pytest.raises(BatchFailed, match="moody"):
            batcher.submit(1, FOREVER).result(20)
        assert batcher.submit(2, FOREVER / 4).result(20).output[1] == 4


@pytest.mark.parametrize("deadline", [0.0, -1.0, math.nan, math.inf])
def test_bad_deadlines_are_refused_before_they_are_queued(a40, engine, deadline):
    with Batcher(engine, policy=SlackFit(a40, slo_ms=36.0)) as batcher:
        with pytest.raises(InvalidRequest, match="deadline_ms"):
            batcher.submit(1, deadline)
        assert batcher.stats().refused == 1
        assert batcher.stats().submitted == 0


def test_a_request_without_a_deadline_gets_the_usual_time(a40, engine):
    with Batcher(engine, policy=SlackFit(a40, slo_ms=36.0), slo_ms=FOREVER) as batcher:
        assert batcher._admit(AnswerFuture(), None, 1, None).ask.deadline_ms == FOREVER
        assert batcher.submit(1).result(20).met
        assert asyncio.run(batcher.infer(1)).met
        with pytest.raises(TypeError, match=r"submit\(\) got an unexpected keyword argument 'foo'"):
            batcher.submit(1, foo=1)


def test_bad_inputs_and_floors_are_refused_before_they_are_queued(a40, engine):
    with Batcher(engine, policy=SlackFit(a40, slo_ms=36.0)) as batcher:
        with pytest.raises(InvalidRequest, match="not an int"):
            batcher.submit("x", FOREVER)
        for floor in (99.0, math.nan):
            with pytest.raises(InvalidRequest, match="min_accuracy"):
                batcher.submit(1, FOREVER, min_accuracy=floor)


def test_floors_are_kept(a40, engine):
    with Batcher(engine, policy=Fixed(a40, 0), slo_ms=36.0) as batcher:
        first = held(engine, batcher)
        demanding = batcher.submit(1, FOREVER, min_accuracy=79.0)
        easy = batcher.submit(2, FOREVER)
        engine.gate.set()
        assert easy.result(20).subnet == 0
        assert demanding.result(20).accuracy >= 79.0
        assert first.result(20).subnet == 0


def test_a_full_queue_refuses(a40, engine):
    with Batcher(engine, policy=SlackFit(a40, slo_ms=36.0), max_queue=3) as batcher:
        first = held(engine, batcher)
        waiting = [batcher.submit(x, FOREVER) for x in range(3)]
        with pytest.raises(QueueFull, match="3 requests wait"):
            batcher.submit(4, FOREVER)
        engine.gate.set()
        concurrent.futures.wait([first, *waiting], 20)
        assert batcher.submit(5, FOREVER).result(20).output[1] == 10


def test_cancelled_requests_do_not_run(a40, engine):
    async def main():
        async with Batcher(engine, policy=SlackFit(a40, slo_ms=36.0)) as batcher:
            engine.gate.clear()
            first = asyncio.ensure_future(batcher.infer(0, FOREVER))
            assert await asyncio.to_thread(engine.entered.acquire, timeout=20)
            doomed = asyncio.ensure_future(batcher.infer(1, FOREVER))
            kept = asyncio.ensure_future(batcher.infer(2, FOREVER))
            await asyncio.sleep(0)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            future = batcher.submit(3, FOREVER)
            assert future.cancel()
            engine.gate.set()
            assert (await first).output[1] == 0
            assert (await kept).output[1] == 4
            return batcher

    stats = asyncio.run(main()).stats()
    assert stats.cancelled == 2
    assert stats.met == 2
    assert sorted(x for _, inputs, _ in engine.ran for x in inputs) == [0, 2]


@pytest.mark.parametrize("drain", [True, False])
def test_closing_gives_every_request_an_outcome(a40, engine, drain, wait_for):
    before = set(threading.enumerate())
    batcher = Batcher(engine, policy=SlackFit(a40, slo_ms=36.0))
    first = held(engine, batcher)
    waiting = [batcher.submit(x, FOREVER) for x in range(40)]
    closer = threading.Thread(target=batcher.close, kwargs={"drain": drain})
    assert not batcher.closing
    closer.start()
    wait_for(lambda: batcher.closing)
    with pytest.raises(BatcherClosed):
        batcher.submit(1, FOREVER)
    if not drain:
        wait_for(waiting[-1].done)  # before the worker could take it
    engine.gate.set()
    closer.join(60)
    assert not closer.is_alive()
    assert first.result(0).output[1] == 0
    for x, future in enumerate(waiting):
        if drain:
            assert future.result(0).output[1] == 2 * x
        else:
            with pytest.raises(BatcherClosed):
                future.result(0)
    assert set(threading.enumerate()) <= before
    stats = batcher.stats()
    assert stats.met + stats.closed == stats.submitted == 41
    batcher.close()


def test_foreign_tables_are_refused(a40, engine):
    with pytest.raises(ProfileMismatch, match="profile this engine"):
        Batcher(engine, policy=SlackFit(a40.select([1, 0, 2, 3, 4, 5]), slo_ms=36.0))
    with pytest.raises(ProfileMismatch, match="has 6"):
        Batcher(engine, policy=SlackFit(a40.select([0, 1]), slo_ms=36.0))
    with pytest.raises(ProfileMismatch, match="made for other"):
        Batcher(engine, policy=SlackFit(a40.select([0, 1]), slo_ms=36.0), table=a40)
    with pytest.raises(PolicyError, match="give a policy"):
        Batcher(engine)
    for changes in ({"workers": 0}, {"max_queue": 0}, {"expired": "pray"}):
        with pytest.raises(PolicyError):
            Batcher(engine, policy=SlackFit(a40, slo_ms=36.0), **changes)
    with pytest.raises(PolicyError, match="slo_ms: Fixed has none"):
        Batcher(engine, policy=Fixed(a40, 0))


def test_a_table_and_an_slo_are_enough(a40, engine, monkeypatch):
    made = []

    class Recorded(HullFit):
        def decide(self, context):
            made.append(self.slo_ms)
            return super().decide(context)

    monkeypatch.setattr("subnetact.serving.live.batcher.HullFit", Recorded)
    with pytest.raises(PolicyError, match="a table and slo_ms"):
        Batcher(engine, table=a40)
    with Batcher(engine, table=a40, slo_ms=36.0) as batcher:
        assert batcher.submit(3, FOREVER).result(20).output[1] == 6
    assert set(made) == {36.0}, "HullFit decides if no policy is given"


def test_the_policy_hears_how_long_batches_took(a40, engine):
    class Listening(SlackFit):
        heard = ()

        def observe(self, subnet, batch_size, expected_ms, measured_ms):
            self.heard = (*self.heard, (subnet, batch_size, expected_ms, measured_ms))

    policy = Listening(a40, slo_ms=36.0)
    with Batcher(engine, policy=policy) as batcher:
        subnet = batcher.submit(3, FOREVER).result(20).subnet
    assert policy.heard[0][:3] == (subnet, 1, a40.latency_ms[subnet, 0])
    assert policy.heard[0][3] >= 0
