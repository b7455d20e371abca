"""Compares the scheduler with a plain model; the test drives the clock and the workers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fake_runners import NeverDecides
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduled import Scheduled
from soak import soak

from subnetact.errors import BatcherClosed, BatchFailed, DeadlinePassed, QueueFull, WorkerHung
from subnetact.latency.table import LatencyTable
from subnetact.serving import HullFit, MaxAcc, SlackFit
from subnetact.serving.scheduling.context import Context
from subnetact.serving.scheduling.request import Job

TABLE = LatencyTable(["a", "b"], [70.0, 80.0], [1, 2, 4], [[1.0, 1.5, 2.0], [3.0, 4.0, 6.0]], stamp={})


POLICIES = {
    "never": NeverDecides,
    "slackfit": lambda: SlackFit(TABLE, slo_ms=20.0),
    "hullfit": lambda: HullFit(TABLE, slo_ms=20.0),
    "maxacc": lambda: MaxAcc(TABLE),
}
BOUND = 8
ROOMY = 1000
WORKERS = 2
WATCHDOG_MS = 100.0


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error, by which the batcher recognises it."""


def opened(
    policy: str, expired: str, watchdog_ms: float | None = WATCHDOG_MS, bound: float = BOUND
) -> Scheduled:
    options = {"workers": WORKERS, "max_queue": bound, "expired": expired, "watchdog_ms": watchdog_ms}
    return Scheduled(POLICIES[policy](), TABLE, slo_ms=20.0, **options)


class LifeCycle(RuleBasedStateMachine):
    """Submit, cancel, advance; workers answer, raise, hang and die; drain and close."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        expired=st.sampled_from(["drop", "defer", "serve"]),
        bound=st.sampled_from([BOUND, ROOMY]),
    )
    def start(self, policy: str, expired: str, bound: int) -> None:
        self.live = opened(policy, expired, bound=bound)
        self.bound = bound
        self.accepted: dict[Any, Any] = {}
        self.outcomes: dict[Any, Any] = {}
        self.full = 0
        self.jobs: dict[int, Job | None] = dict.fromkeys(range(WORKERS))
        self.starting: list[int] = []
        self.zombies: list[Job] = []

    def collect(self) -> None:
        for x, outcome in self.live.ended().items():
            assert x not in self.outcomes, "a second outcome"
            self.outcomes[x] = outcome

    def count(self, *kinds: Any) -> int:
        return sum(
            outcome in kinds or isinstance(outcome, tuple(k for k in kinds if isinstance(k, type)))
            for outcome in self.outcomes.values()
        )

    def free(self) -> list[int]:
        return [w for w, job in self.jobs.items() if job is None]

    def busy(self) -> list[int]:
        return [w for w, job in self.jobs.items() if job is not None and job.part and not job.abandoned]

    @precondition(lambda self: not self.live.scheduler.closing)
    @rule(
        deadline=st.sampled_from([0.5, 2.0, 5.0, 20.0, 2000.0, 2000.0, 2000.0]),
        floor=st.sampled_from([0.0, 0.0, 80.0]),
        priority=st.sampled_from([0, 0, 1, -1]),
    )
    def submit(self, deadline: float, floor: float, priority: int) -> None:
        x = len(self.accepted) + self.full
        try:
            self.accepted[x] = self.live.admit(x, deadline, floor, priority)
        except QueueFull:
            assert len(self.live.scheduler) >= self.bound  # retried requests may exceed the bound
            self.full += 1
        self.collect()  # a deferred request may have been dropped to make room

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        x = data.draw(st.sampled_from(sorted(self.accepted)))
        self.live.scheduler.withdraw(self.accepted[x])
        self.collect()
        assert x in self.outcomes

    @rule(ms=st.sampled_from([0.1, 1.0, 3.0, 10.0, 60.0, 400.0]))
    def advance(self, ms: float) -> None:
        self.live.now += ms

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def take(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(self.free()))
        job = self.live.idle(worker)
        self.collect()
        if job is not None:
            assert 1 <= len(job.part) <= 4
            assert len(job.part) <= job.size
            assert all(request.x not in self.outcomes for request in job.part)
            assert all(TABLE.accuracy[job.subnet] >= request.ask.floor for request in job.part)
            self.jobs[worker] = job

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def answer(self, data: Any) -> None:
        self.finish(data.draw(st.sampled_from(self.busy())))

    def finish(self, worker: int) -> None:
        job = self.jobs[worker]
        assert job is not None
        for x in self.live.finish(job):
            assert x not in self.outcomes, "a second outcome"
            self.outcomes[x] = "answered"
        if not job.part:
            self.jobs[worker] = None

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), error=st.sampled_from([ValueError("bad"), OutOfMemoryError("full")]))
    def fail(self, data: Any, error: Exception) -> None:
        worker = data.draw(st.sampled_from(self.busy()))
        job = self.jobs[worker]
        assert job is not None
        before = [request for request in job.part if request.open]
        self.live.failed(job, error)
        self.collect()
        if len(before) == 1:
            failure = self.outcomes[before[0].x]
            assert isinstance(failure, BatchFailed)
            assert failure.__cause__ is error
        else:
            assert all(request.open for request in before), "mates of a failure are tried again"
        if not job.part:
            self.jobs[worker] = None

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(self.busy()))
        up = self.live.scheduler.workers.up()
        del self.jobs[worker]
        self.live.lose(worker)
        self.collect()
        assert self.live.scheduler.workers.up() == up - 1

    @rule()
    def tick(self) -> None:
        revived = self.live.tick()
        self.collect()
        for worker, job in list(self.jobs.items()):
            if job is not None and job.abandoned:
                assert self.live.now > job.started_ms + WATCHDOG_MS
                self.zombies.append(job)
                del self.jobs[worker]
        for worker in revived:
            assert worker not in self.jobs
            self.starting.append(worker)
        self.live.learner.refresh()

    @precondition(lambda self: self.starting)
    @rule(dies=st.sampled_from([False, False, True]))
    def end_a_start(self, dies: bool) -> None:
        worker = self.starting.pop()
        if dies:
            self.live.lose(worker)
        else:
            self.live.start(worker)
            self.jobs[worker] = None

    @precondition(lambda self: self.busy())
    @rule()
    def hang(self) -> None:
        self.live.now += WATCHDOG_MS + 1.0
        self.tick()
        assert not self.busy()

    @precondition(lambda self: self.zombies)
    @rule(answers=st.booleans())
    def come_back(self, answers: bool) -> None:
        job = self.zombies.pop()
        if answers:
            assert self.live.finish(job) == []
        else:
            self.live.failed(job, ValueError("late"))
            assert not self.live.ended()
        self.live.scheduler.workers.hung_thread_ended(job.worker)

    @rule()
    def stop_admitting(self) -> None:
        self.live.scheduler.closing = True

    @precondition(lambda self: self.live.scheduler.closing)
    @rule()
    def close_all(self) -> None:
        self.live.scheduler.close_all()
        self.collect()
        assert not len(self.live.scheduler)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "live"):
            return
        scheduler, counts = self.live.scheduler, self.live.scheduler.counts
        assert scheduler.workers.up() == len(self.jobs), "who starts or is down is not up"
        assert counts["submitted"] == len(self.accepted)
        unfinished = len(self.accepted) - len(self.outcomes)
        assert len(scheduler) + scheduler.running == scheduler.unfinished == unfinished
        assert counts["retried"] == sum(request.retried for request in self.accepted.values())
        assert len(scheduler) <= self.bound + sum(r.retried and r.open for r in self.accepted.values())
        assert counts["cancelled"] == self.count("cancelled")
        assert counts["dropped"] == self.count(DeadlinePassed)
        assert counts["failed"] == self.count(BatchFailed)
        assert counts["closed"] == self.count(BatcherClosed)
        assert counts["answered"] == self.count("answered")
        for x, request in self.accepted.items():
            assert request.open == (x not in self.outcomes)

    def teardown(self) -> None:
        if not hasattr(self, "live"):
            return
        self.live.scheduler.closing = True
        for _ in range(200):
            if len(self.outcomes) == len(self.accepted) and not any(self.jobs.values()):
                break
            while self.zombies:
                self.come_back(answers=True)
            while self.starting:
                self.end_a_start(dies=False)
            for worker in self.busy():
                self.finish(worker)
            for worker in self.free():
                self.jobs[worker] = self.live.idle(worker)
                self.collect()
            self.live.now += 150.0 if not self.jobs else 0.5
            self.tick()
        assert sorted(self.outcomes) == sorted(self.accepted), "a request without an outcome"
        assert self.live.scheduler.is_over


TestLifeCycle = LifeCycle.TestCase
TestLifeCycle.settings = settings(max_examples=60, stateful_step_count=40)


def first_job(live: Scheduled, worker: int = 0) -> Job:
    job = live.idle(worker)
    assert job is not None
    return job


def test_a_request_that_hangs_twice_fails_and_the_others_of_its_batch_are_served() -> None:
    live = opened("maxacc", "drop")
    for x in range(4):
        live.admit(x, 5000.0)
    first = first_job(live)
    assert len(first.part) == 4
    live.now = 101.0
    assert (live.tick(), live.ended(), first.abandoned) == ([0], {}, True)
    assert live.idle(0) is None, "the second try is another worker's"
    answers, errors = [], {}
    for _ in range(4):
        job = first_job(live, 1)
        assert len(job.part) == 1, "suspects run alone"
        if job.part[0].x == 2:
            live.now += 101.0
            live.tick()
            errors.update(live.ended())
            live.start(1)
        else:
            answers += live.finish(job)
    assert answers == [0, 1, 3]
    assert isinstance(errors[2], WorkerHung)
    assert "hung over this request, twice" in str(errors[2])
    assert "raise watchdog_ms" in str(errors[2])
    assert live.finish(first) == []


def test_a_worker_that_keeps_dying_comes_back_ever_later() -> None:
    live = opened("slackfit", "drop")
    pauses = []
    for _ in range(10):
        live.lose(0)
        start = live.now
        while live.tick() != [0]:
            live.now += 10.0
        pauses.append(live.now - start)
        live.start(0)
    assert pauses[:4] == [0.0, 100.0, 200.0, 400.0]
    assert max(pauses) == 10_000.0


def test_while_too_many_of_its_threads_hang_a_worker_stays_down() -> None:
    live = opened("slackfit", "drop")
    for x in range(4):
        live.admit(x, 90.0)
        first_job(live)
        live.now += 101.0
        revived = live.tick()
        while not revived and x < 3:
            live.now += 10.0
            revived = live.tick()
        if revived:
            live.start(0)
    live.now += 1e6
    assert live.tick() == []
    live.scheduler.workers.hung_thread_ended(0)
    assert live.tick() == [0]


@pytest.mark.parametrize("expired", ["drop", "defer", "serve"])
def test_requests_of_a_lost_batch_end_at_their_deadline_while_workers_start(expired: str) -> None:
    live = opened("maxacc", expired, watchdog_ms=math.inf)
    for worker in range(WORKERS):
        live.scheduler.workers.starting(worker)
    live.admit("kept", 5.0)
    live.now = 10.0
    live.tick()
    kept = live.ended() == {}
    assert kept == (expired != "drop"), "workers start for the first time"
    for worker in range(WORKERS):
        live.start(worker)
    if kept:
        live.finish(first_job(live))
    for x in range(4):
        live.admit(x, 500.0)
    first_job(live)
    live.admit(4, 500.0)  # is still queued
    live.lose(0)
    live.lose(1)
    assert live.tick() == [0, 1], "both start again at once, and are not up"
    assert live.scheduler.workers.up() == 0
    live.now = 500.0
    assert (live.tick(), live.ended()) == ([], {}), "there is time left"
    live.now = 511.0
    live.tick()
    assert live.ended() == dict.fromkeys(range(5), DeadlinePassed)
    live.start(0)
    live.start(1)
    for worker, (x, deadline) in enumerate((("lost", 500.0), ("long", 5000.0))):
        live.admit(x, deadline)
        first_job(live, worker)
    live.lose(0)
    live.now += 501.0
    live.tick()
    assert live.ended() == {"lost": DeadlinePassed}, "although another worker is busy"


def test_closing_does_not_wait_for_workers_that_only_die() -> None:
    live = opened("maxacc", "drop")
    live.admit("first", 1e9)
    live.scheduler.closing = True
    ended: dict[Any, Any] = {}
    for _ in range(6):
        assert not ended
        for worker in range(WORKERS):
            live.lose(worker)
        live.tick()
        ended = live.ended()
        live.now += 1e5
        for worker in live.tick():
            live.start(worker)
    assert isinstance(ended["first"], BatcherClosed)


def test_the_policy_sees_the_workers_that_are_up() -> None:
    seen: list[int] = []

    class Counting(MaxAcc):
        def decide(self, context: Context) -> tuple[int, int]:
            seen.append(sum(free < math.inf for free in context.free_at_ms))
            return super().decide(context)

    live = Scheduled(Counting(TABLE), workers=3, slo_ms=20.0, watchdog_ms=WATCHDOG_MS)

    def decide(worker: int = 2) -> Job:
        live.admit("x", 5000.0)
        return first_job(live, worker)

    live.finish(decide())
    live.lose(0)
    live.finish(decide())
    live.start(0)
    decide(worker=1)
    live.now = 60.0  # far longer than expected
    live.tick()
    decide()
    assert seen == [3, 2, 3, 2]


def test_running_out_of_memory_halves_the_largest_batch() -> None:
    live = opened("maxacc", "drop")
    for x in range(8):
        live.admit(x, 5000.0)
    job = first_job(live)
    assert (job.subnet, job.size) == (1, 4)
    live.failed(job, OutOfMemoryError("CUDA out of memory"))
    assert live.finish(job) == [0, 1]
    assert live.finish(job) == [2, 3]
    assert live.scheduler.dispatcher.limits == {1: 2}
    following = first_job(live)
    assert (following.subnet, following.size) == (1, 2), "later batches of that subnet are no larger"
    assert live.learner.refresh(), "and the policy is made anew without those cells"
    live.failed(following, OutOfMemoryError("again"))
    live.failed(following, OutOfMemoryError("alone"))
    [error] = live.ended().values()
    assert isinstance(error, BatchFailed)


def test_the_first_run_of_a_subnet_at_a_size_is_given_time_to_warm_up() -> None:
    live = opened("slackfit", "drop", watchdog_ms=None)
    limits = []
    for worker in (0, 1, 0):  # each worker has its own time to warm up
        live.admit(worker, 500.0)
        job = first_job(live, worker)
        limits.append(job.limit_ms - live.now)
        live.now += job.expected_ms
        live.finish(job)
    assert limits == [30_000.0, 30_000.0, 1000.0]


def test_a_deferred_request_makes_room_for_a_live_one() -> None:
    live = opened("slackfit", "defer")
    for x in range(BOUND):
        live.admit(x, 5.0)
    live.now = 10.0  # all requests have expired
    running = [request.x for request in first_job(live).part]
    while len(live.scheduler) < BOUND:
        live.admit("more", 50.0)
    assert live.admit("live", 50.0).open
    assert live.ended() == {next(x for x in range(BOUND) if x not in running): DeadlinePassed}
    assert len(live.scheduler) == BOUND


def test_every_request_of_a_faulty_day_gets_its_one_outcome() -> None:
    result = soak(24_000)
    counters, faults = result["counters"], result["faulty_runs"]
    assert set(faults) == {"raises", "slow", "hangs", "kills", "memory"}, "every fault was met"
    assert counters["hung"] >= 4
    assert counters["died"] >= 8
    assert counters["revived"] >= 1
    assert counters["bisected"] >= 10
    assert counters["cancelled"] >= 50
    assert counters["met"] > 10_000
