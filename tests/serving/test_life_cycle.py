"""Compares the core of the batcher with a plain model; the test drives a fake clock and the workers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    QueueFull,
    WorkerDied,
    WorkerHung,
    failure_text,
)
from subnetact.latency.table import LatencyTable
from subnetact.serving.live.batch_job import BatchJob
from subnetact.serving.live.core import Core
from subnetact.serving.policies import HullFit, MaxAcc, SlackFit
from subnetact.serving.scheduling.context import Context

TABLE = LatencyTable(["a", "b"], [70.0, 80.0], [1, 2, 4], [[1.0, 1.5, 2.0], [3.0, 4.0, 6.0]], stamp={})


class NeverDecides:
    """A policy that waits for more requests, whatever happens."""

    table = TABLE

    def decide(self, context: Context) -> None:
        return None


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


def core_of(
    policy: str,
    expired: str,
    clock: list[float],
    workers: int = WORKERS,
    watchdog_ms: float | None = WATCHDOG_MS,
    bound: int = BOUND,
) -> Core:
    return Core(
        POLICIES[policy](),
        TABLE,
        workers=workers,
        max_queue=bound,
        expired=expired,
        slo_ms=20.0,
        clock_ms=lambda: clock[0],
        watchdog_ms=watchdog_ms,
        learn=True,
    )


class LifeCycle(RuleBasedStateMachine):
    """Submit, cancel, advance; workers answer, raise, hang and die; drain and close."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        expired=st.sampled_from(["drop", "defer", "serve"]),
        bound=st.sampled_from([BOUND, ROOMY]),
    )
    def start(self, policy: str, expired: str, bound: int) -> None:
        self.clock = [0.0]
        self.core = core_of(policy, expired, self.clock, bound=bound)
        self.expired = expired
        self.bound = bound
        self.accepted: dict[Any, Any] = {}
        self.ended: dict[Any, Any] = {}
        self.full = 0
        self.jobs: dict[int, BatchJob | None] = dict.fromkeys(range(WORKERS))
        self.starting: list[int] = []
        self.zombies: list[BatchJob] = []

    def collect(self, outcomes: list[Any]) -> None:
        for request, answer, error in outcomes:
            x = request.x
            assert x not in self.ended, "a second outcome"
            self.ended[x] = answer if error is None else error
            if answer is not None:
                assert answer.output == ("out", x)
                assert answer.accuracy >= request.floor
                assert answer.met == (self.clock[0] <= request.deadline_ms)
        if outcomes:
            self.core.delivered()

    def count(self, kind: type) -> int:
        return sum(isinstance(outcome, kind) for outcome in self.ended.values())

    def working(self, job: BatchJob | None) -> bool:
        return job is not None and bool(job.part) and not job.abandoned

    def free(self) -> list[int]:
        return [w for w, job in self.jobs.items() if job is None]

    def busy(self) -> list[int]:
        return [w for w, job in self.jobs.items() if self.working(job)]

    @rule(
        deadline=st.sampled_from([0.5, 2.0, 5.0, 20.0, 2000.0, 2000.0, 2000.0]),
        floor=st.sampled_from([0.0, 0.0, 75.0]),
        priority=st.sampled_from([0, 0, 1, -1]),
    )
    def submit(self, deadline: float, floor: float, priority: int) -> None:
        x = len(self.accepted) + self.full
        try:
            self.accepted[x] = self.core.admit(x, deadline, floor, priority, None, None)
        except QueueFull:
            assert self.core.stats().queued >= self.bound  # retried requests may exceed the bound
            self.full += 1
        except BatcherClosed:
            assert self.core.closing
        if self.core.stats().dropped > self.count(DeadlinePassed):
            self.tick()  # a deferred request was dropped to make room; the supervisor delivers its outcome

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        x = data.draw(st.sampled_from(sorted(self.accepted)))
        withdrawn = self.core.withdraw(self.accepted[x])
        assert withdrawn == (x not in self.ended)
        if withdrawn:
            self.ended[x] = "cancelled"

    @rule(ms=st.sampled_from([0.1, 1.0, 3.0, 10.0, 60.0, 400.0]))
    def advance(self, ms: float) -> None:
        self.clock[0] += ms

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def take(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(self.free()))
        job, outcomes = self.core.next_job(worker, wait=False)
        self.collect(outcomes)
        if job is not None:
            assert 1 <= len(job.part) <= 4
            assert len(job.part) <= job.size
            assert all(request.x not in self.ended for request in job.part)
            self.jobs[worker] = job

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def answer(self, data: Any) -> None:
        self.finish(data.draw(st.sampled_from(self.busy())))

    def finish(self, worker: int) -> None:
        job = self.jobs[worker]
        assert job is not None
        self.collect(self.core.answered(job, [("out", request.x) for request in job.part]))
        if not job.part:
            self.jobs[worker] = None

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), error=st.sampled_from([ValueError("bad"), OutOfMemoryError("full")]))
    def fail(self, data: Any, error: Exception) -> None:
        worker = data.draw(st.sampled_from(self.busy()))
        job = self.jobs[worker]
        assert job is not None
        before = [request for request in job.part if request.open]
        self.collect(self.core.raised(job, error))
        if len(before) == 1:
            failure = self.ended[before[0].x]
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
        up = self.core.stats().workers_up
        self.collect(self.core.died(worker, self.jobs.pop(worker), SystemExit()))
        assert self.core.stats().workers_up == up - 1

    @rule()
    def tick(self) -> None:
        revived, outcomes = self.core.tick()
        self.collect(outcomes)
        for worker, job in list(self.jobs.items()):
            if job is not None and job.abandoned:
                assert self.clock[0] > job.started_ms + WATCHDOG_MS
                self.zombies.append(job)
                del self.jobs[worker]
        for worker in revived:
            assert worker not in self.jobs
            self.starting.append(worker)
        self.core.replan()

    @precondition(lambda self: self.starting)
    @rule(dies=st.sampled_from([False, False, True]))
    def end_a_start(self, dies: bool) -> None:
        worker = self.starting.pop()
        if dies:
            self.collect(self.core.died(worker, None, SystemExit()))
        else:
            self.core.entered(worker)
            self.jobs[worker] = None

    @precondition(lambda self: self.busy())
    @rule()
    def hang(self) -> None:
        self.clock[0] += WATCHDOG_MS + 1.0
        self.tick()
        assert not self.busy()

    @precondition(lambda self: self.zombies)
    @rule(how=st.sampled_from(["answers", "raises", "dies"]))
    def come_back(self, how: str) -> None:
        job = self.zombies.pop()
        if how == "dies":
            assert self.core.died(job.worker, job, SystemExit()) == []
            return
        if how == "answers":
            assert self.core.answered(job, [("out", request.x) for request in job.part]) == []
        else:
            assert self.core.raised(job, ValueError("late")) == []
        self.core.returned(job)

    @rule()
    def stop_admitting(self) -> None:
        self.core.stop_admitting()

    @precondition(lambda self: self.core.closing)
    @rule()
    def abandon_queue(self) -> None:
        self.collect(self.core.abandon_queue())
        assert self.core.stats().queued == 0

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "core"):
            return
        seen = self.core.stats()
        assert seen.workers_up == len(self.jobs), "who starts or is down is not up"
        assert seen.submitted == len(self.accepted)
        assert seen.queued + seen.running == len(self.accepted) - len(self.ended)
        assert seen.retried == sum(request.retried for request in self.accepted.values())
        assert seen.queued <= self.bound + sum(r.retried and r.open for r in self.accepted.values())
        assert seen.cancelled == self.count(str)
        assert seen.dropped == self.count(DeadlinePassed)
        assert seen.failed == self.count(BatchFailed)
        assert seen.closed == self.count(BatcherClosed)
        assert seen.met + seen.late == self.count(tuple)
        assert seen.full == self.full
        for x, request in self.accepted.items():
            assert request.open == (x not in self.ended)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.stop_admitting()
        for _ in range(200):
            if len(self.ended) == len(self.accepted) and not any(self.jobs.values()):
                break
            while self.zombies:
                self.come_back("answers")
            while self.starting:
                self.end_a_start(dies=False)
            for worker in self.busy():
                self.finish(worker)
            for worker in self.free():
                job, outcomes = self.core.next_job(worker, wait=False)
                self.collect(outcomes)
                self.jobs[worker] = job
            self.clock[0] += 150.0 if not self.jobs else 0.5
            self.tick()
        assert sorted(self.ended) == sorted(self.accepted), "a request without an outcome"
        assert self.core.wait_until_drained(0.0), "or one that was not delivered"
        assert self.core.next_job(0) == (None, []), "workers may end"
        assert not self.core.wait_until_watched(0.0), "and the supervisor"


TestLifeCycle = LifeCycle.TestCase
TestLifeCycle.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


def test_a_request_that_hangs_twice_fails_and_the_others_of_its_batch_are_served(clock: list[float]) -> None:
    core = core_of("maxacc", "drop", clock)
    for x in range(4):
        core.admit(x, 5000.0, 0.0, 0, None, None)
    first, _ = core.next_job(0, wait=False)
    assert first is not None
    assert len(first.part) == 4
    clock[0] = 101.0
    revived, outcomes = core.tick()
    assert (revived, outcomes, first.abandoned) == ([0], [], True)
    assert core.next_job(0, wait=False) == (None, []), "the second try is another worker's"
    answers, errors = {}, {}
    for _ in range(4):
        job, _ = core.next_job(1, wait=False)
        assert job is not None
        assert len(job.part) == 1, "suspects run alone"
        if job.part[0].x == 2:
            clock[0] += 101.0
            for request, _, error in core.tick()[1]:
                errors[request.x] = error
        else:
            for request, answer, _ in core.answered(job, [job.part[0].x]):
                answers[request.x] = answer.output
    assert answers == {0: 0, 1: 1, 3: 3}
    assert isinstance(errors[2], WorkerHung)
    assert "hung over this request, twice" in str(errors[2])
    assert core.answered(first, ["late"] * 4) == []


def test_a_worker_that_keeps_dying_comes_back_ever_later(clock: list[float]) -> None:
    core = core_of("slackfit", "drop", clock)
    pauses = []
    for _ in range(10):
        core.died(0, None, SystemExit())
        start = clock[0]
        while core.tick()[0] != [0]:
            clock[0] += 10.0
        pauses.append(clock[0] - start)
        core.entered(0)
    assert pauses[:4] == [0.0, 100.0, 200.0, 400.0]
    assert max(pauses) == 10_000.0


def test_while_too_many_of_its_threads_hang_a_worker_stays_down(clock: list[float]) -> None:
    core = core_of("slackfit", "drop", clock)
    stuck = []
    for x in range(4):
        core.admit(x, 90.0, 0.0, 0, None, None)
        job, _ = core.next_job(0, wait=False)
        assert job is not None
        stuck.append(job)
        clock[0] += 101.0
        revived, _ = core.tick()
        while not revived and x < 3:
            clock[0] += 10.0
            revived, _ = core.tick()
        if revived:
            core.entered(0)
    clock[0] += 1e6
    assert core.tick()[0] == []
    core.returned(stuck[0])
    assert core.tick()[0] == [0]


def test_without_a_worker_requests_still_end(clock: list[float]) -> None:
    core = core_of("slackfit", "serve", clock)
    for worker in range(WORKERS):
        for _ in range(3):
            core.died(worker, None, SystemExit())
    core.admit(0, 15.0, 0.0, 0, None, None)
    clock[0] = 10.0
    assert core.tick() == ([], [])
    clock[0] = 20.0
    _, [(_, _, error)] = core.tick()
    assert isinstance(error, DeadlinePassed)


@pytest.mark.parametrize("expired", ["drop", "defer", "serve"])
def test_requests_of_a_lost_batch_end_at_their_deadline_while_workers_start(
    clock: list[float], expired: str
) -> None:
    core = core_of("maxacc", expired, clock)
    for x in range(4):
        core.admit(x, 500.0, 0.0, 0, None, None)
    lost, _ = core.next_job(0, wait=False)
    assert lost is not None
    core.admit("queued", 500.0, 0.0, 0, None, None)
    assert core.stats().workers_up == 2
    core.died(0, lost, SystemExit())
    core.died(1, None, SystemExit())
    assert core.tick() == ([0, 1], []), "both start again at once, and are not up"
    assert core.stats().workers_up == 0
    clock[0] = 490.0
    assert core.tick() == ([], []), "there is time left"
    clock[0] = 501.0
    _, outcomes = core.tick()
    assert {request.x for request, _, _ in outcomes} == {0, 1, 2, 3, "queued"}
    assert all(isinstance(error, DeadlinePassed) for _, _, error in outcomes)
    core.entered(0)
    assert core.stats().workers_up == 1


def test_requests_of_a_lost_batch_end_at_their_deadline_while_another_worker_is_busy(
    clock: list[float],
) -> None:
    core = core_of("maxacc", "drop", clock, watchdog_ms=math.inf)
    core.admit("long", 5000.0, 0.0, 0, None, None)
    assert core.next_job(1, wait=False)[0] is not None
    core.admit("lost", 500.0, 0.0, 0, None, None)
    job, _ = core.next_job(0, wait=False)
    core.died(0, job, SystemExit())
    clock[0] = 501.0
    _, [(request, _, error)] = core.tick()
    assert (request.x, type(error)) == ("lost", DeadlinePassed)


def test_a_request_is_kept_while_workers_start_for_the_first_time(clock: list[float]) -> None:
    core = core_of("maxacc", "serve", clock)
    for worker in range(WORKERS):
        core.entering(worker)
    core.admit("late", 5.0, 0.0, 0, None, None)
    clock[0] = 10.0
    assert core.tick() == ([], []), "expired requests are served"
    core.entered(0)
    job, _ = core.next_job(0, wait=False)
    assert job is not None


def test_closing_does_not_wait_for_workers_that_only_die(clock: list[float]) -> None:
    core = core_of("maxacc", "drop", clock)
    core.admit("first", 1e9, 0.0, 0, None, None)
    core.stop_admitting()
    ended = []
    for _ in range(6):
        for worker in range(WORKERS):
            assert not ended
            core.died(worker, None, SystemExit())
        ended = core.tick()[1]
        clock[0] += 1e5
        for worker in core.tick()[0]:
            core.entered(worker)
    [(_, _, error)] = ended
    assert isinstance(error, BatcherClosed)


def test_a_batch_that_was_booked_is_not_lost_with_a_thread_that_never_got_it(clock: list[float]) -> None:
    core = core_of("maxacc", "drop", clock)
    core.admit("x", 500.0, 0.0, 0, None, None)
    assert core.next_job(0, wait=False)[0] is not None
    core.died(0, None, MemoryError())
    job, _ = core.next_job(1, wait=False)
    assert job is not None
    assert [request.x for request in job.part] == ["x"]


class Unprintable(Exception):
    """An exception whose constructor forgot what its message needs."""

    def __str__(self) -> str:
        raise AttributeError("detail")

    __repr__ = __str__


def test_an_error_that_cannot_be_printed_ends_its_request_only(clock: list[float]) -> None:
    core = core_of("maxacc", "drop", clock, workers=1)
    core.admit("x", 500.0, 0.0, 0, None, None)
    job, _ = core.next_job(0, wait=False)
    assert job is not None
    cause = Unprintable()
    [(_, _, error)] = core.raised(job, cause)
    assert "Unprintable (its __str__ raised)" in str(error)
    assert error.__cause__ is cause
    core.admit("y", 5000.0, 0.0, 0, None, None)
    errors = []
    for _ in range(2):
        job, _ = core.next_job(0, wait=False)
        assert job is not None
        errors += core.died(0, job, Unprintable())
        for worker in core.tick()[0]:
            core.entered(worker)
    [(_, _, error)] = errors
    assert isinstance(error, WorkerDied)
    assert core.stats().running == core.stats().queued == 0


def test_a_message_of_any_length_fits_into_an_error() -> None:
    text = failure_text(ValueError("x" * 10**6))
    assert text.startswith("ValueError: xxx")
    assert len(text) < 3000
    assert "1000000 characters" in text


def test_a_message_that_ends_its_thread_does_not_end_ours() -> None:
    class Leaving(Exception):
        def __str__(self) -> str:
            raise SystemExit(3)

    assert failure_text(Leaving()) == "Leaving (its __str__ raised)"


def test_running_out_of_memory_halves_the_largest_batch(clock: list[float]) -> None:
    core = core_of("maxacc", "drop", clock)
    for x in range(8):
        core.admit(x, 5000.0, 0.0, 0, None, None)
    job, _ = core.next_job(0, wait=False)
    assert job is not None
    assert (job.subnet, job.size) == (1, 4)
    assert core.raised(job, OutOfMemoryError("CUDA out of memory")) == []
    assert [request.x for request in job.part] == [0, 1]
    assert len(core.answered(job, [0, 1])) == 2
    assert len(core.answered(job, [2, 3])) == 2
    assert core.stats().batch_limits == {1: 2}
    following, _ = core.next_job(0, wait=False)
    assert following is not None
    assert (following.subnet, following.size) == (1, 2), "later batches of that subnet are no larger"
    assert core.replan(), "and the policy is made anew without those cells"
    core.raised(following, OutOfMemoryError("again"))
    [(_, _, error)] = core.raised(following, OutOfMemoryError("alone"))
    assert isinstance(error, BatchFailed)


def test_expired_requests_are_answered_while_every_worker_is_busy(clock: list[float]) -> None:
    core = core_of("slackfit", "drop", clock)
    for x in range(2 * 4 + 1):
        if x == 8:
            for worker in range(WORKERS):
                assert core.next_job(worker, wait=False)[0] is not None
        core.admit(x, 20.0, 0.0, 0, None, None)
    clock[0] = 19.5
    _, [(request, _, error)] = core.tick()
    assert request.x == 8
    assert isinstance(error, DeadlinePassed)
    assert "20 ms were given, after 19.5 ms" in str(error)


def test_the_first_run_of_a_subnet_at_a_size_is_given_time_to_warm_up(clock: list[float]) -> None:
    core = core_of("slackfit", "drop", clock, workers=1, watchdog_ms=None)
    limits = []
    for x in range(2):
        core.admit(x, 500.0, 0.0, 0, None, None)
        job, _ = core.next_job(0, wait=False)
        assert job is not None
        limits.append(job.limit_ms - clock[0])
        clock[0] += job.expected_ms
        core.answered(job, [x])
    assert limits == [30_000.0, 1000.0]


def test_the_time_to_warm_up_is_each_workers_own(clock: list[float]) -> None:
    core = core_of("slackfit", "drop", clock, workers=2, watchdog_ms=None)
    limits = []
    for worker in (0, 1, 0):
        core.admit(worker, 500.0, 0.0, 0, None, None)
        job, _ = core.next_job(worker, wait=False)
        assert job is not None
        limits.append(job.limit_ms - clock[0])
        core.answered(job, [worker])
    assert limits == [30_000.0, 30_000.0, 1000.0]


def test_a_deferred_request_makes_room_for_a_live_one(clock: list[float]) -> None:
    core = core_of("slackfit", "defer", clock)
    for x in range(BOUND):
        core.admit(x, 5.0, 0.0, 0, None, None)
    clock[0] = 10.0  # all requests have expired
    job, _ = core.next_job(0, wait=False)
    assert job is not None
    running = [request.x for request in job.part]
    deferred = [x for x in range(BOUND) if x not in running]
    while core.stats().queued < BOUND:
        core.admit("more", 50.0, 0.0, 0, None, None)
    live = core.admit("live", 50.0, 0.0, 0, None, None)
    assert not core.wait_until_drained(0.0)
    _, [(request, _, error)] = core.tick()
    assert request.x == deferred[0]
    assert isinstance(error, DeadlinePassed)
    assert live.open
    assert core.stats().queued == BOUND
