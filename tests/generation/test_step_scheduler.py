"""One object decides the steps of the generator and of the simulation, and no event breaks its rules."""

from __future__ import annotations

import random
from collections import deque
from contextlib import suppress
from typing import Any

import pytest
from generation_tables import ACCURACY, KEYS, step_table
from held_steps import Clock
from hypothesis import given, settings
from hypothesis import strategies as st

from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    DeadlinePassed,
    InvalidRequest,
    PolicyError,
    QueueFull,
    TraceError,
)
from subnetact.generation import (
    Generated,
    Generator,
    Phase,
    Prompt,
    StepPolicy,
    StepTable,
    TokenDeadlines,
    simulate_generation,
)
from subnetact.generation.phases import CacheKinds
from subnetact.generation.simulation import replay
from subnetact.generation.step_request import StepRequest, TokenAsk
from subnetact.generation.step_scheduler import Step, StepScheduler
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet


def made(**options: Any) -> StepScheduler:
    given: dict[str, Any] = {"places": 2, "step_tokens": 16} | options
    return StepScheduler(StepPolicy(step_table(), 6.0), **given)


def asked(prompt: int = 4, answer: int = 3, first_ms: float = 60.0, **facts: Any) -> StepRequest:
    return StepRequest(TokenAsk(range(prompt), answer, TokenDeadlines(first_ms, 6.0), **facts))


def begun(scheduler: StepScheduler, now_ms: float, held: StepRequest | None = None) -> Step | None:
    """Begin the next step with all who are wanted, but for one who has no room."""
    step = scheduler.candidates(now_ms)
    for request, tokens in step.wanted():
        if request is not held:
            step.take(request, tokens)
    return scheduler.begin(now_ms)


def trace(seed: int) -> list[Prompt]:
    """Return prompts of a second, some of which demand accuracy, at twice the rate in its middle."""
    rng, now, found = random.Random(seed), 0.0, []
    while now < 1000.0:
        now += rng.expovariate(0.25 if 300.0 < now < 600.0 else 0.1)
        floor = rng.choice((0.0, 0.0, 0.0, 41.0, 45.0))
        deadlines = TokenDeadlines(rng.choice((3.0, 20.0, 60.0)), 6.0)
        phases = [Phase()]
        if rng.random() < 0.3:
            phases = [
                Phase(tokens=3, subnets=rng.choice((0, 1))),
                Phase(subnets=2, recompute=rng.choice((None, True))),
            ]
            floor = 0.0
        found.append(Prompt(now, rng.randint(1, 40), rng.randint(1, 24), deadlines, floor, phases))
    return found


class Steps:
    """A step loop that takes the time of the table, on a clock that it moves; it submits a trace on time."""

    def __init__(self, clock: Clock, table: StepTable, prompts: list[Prompt]) -> None:
        self.clock, self.table, self.left = clock, table, deque(prompts)
        self.generator: Generator | None = None
        self.running: list[Any] = []
        self.longest = 10**6

    def __call__(self, _: Any, **facts: Any) -> Steps:
        return self

    def tear_down(self) -> None:
        """Free nothing."""

    def cache_used(self) -> float:
        return 0.0

    def refresh(self) -> None:
        if self.generator is None:
            return
        if self.left and not self.generator.stats().active:
            self.clock.now_ms = max(self.clock.now_ms, self.left[0].arrival_ms)
        now = self.clock.now_ms
        while self.left and self.left[0].arrival_ms <= now:
            self.clock.now_ms = self.left[0].arrival_ms
            self._submit(self.generator, self.left.popleft())
            self.clock.now_ms = now
        self.generator._do(self.generator._scheduler.tick)

    def reserve(self, step: Step) -> None:
        step.take_all()

    def compute(self, step: Step) -> Any:
        self.clock.now_ms += self.table.latencies_ms(*step.size)[step.subnet]
        return [-1] * len(step.answered)

    def _submit(self, generator: Generator, one: Prompt) -> None:
        times = {"first_ms": one.deadlines.first_ms, "token_ms": one.deadlines.token_ms}
        prompt = [1] * one.tokens
        facts: Any = {"max_new_tokens": one.answer, "min_accuracy": one.min_accuracy, **times}
        facts["phases"] = one.phases
        try:
            self.running.append(generator.submit(prompt, **facts))
        except DeadlinePassed as error:
            self.running.append(error)


def outcome_of(completion: Any) -> Generated | str:
    if isinstance(completion, DeadlinePassed):
        return str(completion)
    try:
        answer: Generated = completion.result(60)
    except DeadlinePassed as error:
        return str(error)
    return answer


@pytest.mark.parametrize("expired", ["drop", "serve"])
def test_the_generator_does_what_the_simulation_predicts(
    llama: Supernet, widths: list[SubnetSpec], table: StepTable, monkeypatch: pytest.MonkeyPatch, expired: str
) -> None:
    prompts, clock = trace(1), Clock()
    clock.now_ms = 0.0
    rules: dict[str, Any] = {"expired": expired, "step_tokens": 32}
    kinds = CacheKinds([0, 0, 0], [0, 1, 2])
    scheduler = StepScheduler(StepPolicy(table, 6.0), places=4, kinds=kinds, **rules)
    predicted: dict[int, Generated | str] = {}
    for _, request in replay(deque(prompts), scheduler):
        if outcome := request.outcome:
            predicted[id(request.owner)] = outcome if isinstance(outcome, Generated) else str(outcome)

    steps = Steps(clock, table, prompts)
    monkeypatch.setattr("subnetact.generation.step_loop.StepLoop", steps)
    facts: Any = {"max_sequences": 4, "clock_ms": clock, **rules}
    with Generator(llama, widths, table, token_ms=6.0, allow_approximate=True, **facts) as generator:
        steps.generator = generator
        while len(steps.running) < len(prompts):
            generator._thread.join(0.01)
            assert generator._thread.is_alive()
        outcomes = [outcome_of(completion) for completion in steps.running]
        stats = generator.stats()
    for one, outcome in zip(prompts, outcomes, strict=True):
        assert outcome == predicted[id(one)], "the same tokens, each when it was to come, or the same error"
    assert {name: getattr(stats, name) for name in scheduler.counts} == scheduler.counts
    assert stats.steps == {i: count for i, count in enumerate(scheduler.steps) if count}
    assert len(stats.steps) == 3
    assert min(stats.lifted, stats.recomputed, stats.late) > 0
    assert (stats.expired > 0) == (expired == "drop")


PHASES = (
    (Phase(),),
    (Phase(tokens=2, subnets=0), Phase(subnets=2, recompute=True)),
    (Phase(end=7, subnets=[1, 2]), Phase(tokens=1, subnets=0), Phase()),
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "step", "step", "cancel", "push_out", "fail", "hang", "tick"]),
        st.integers(0, 40),
        st.sampled_from([0.0, 41.0, 50.0]),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(EVENTS, st.integers(1, 3), st.integers(1, 20), st.sampled_from(["drop", "serve"]), st.data())
def test_every_request_ends_once_and_steps_keep_to_their_limits(
    events: list[tuple[str, int, float]], places: int, step_tokens: int, expired: str, data: st.DataObject
) -> None:
    scheduler = made(places=places, step_tokens=step_tokens, expired=expired, watchdog_ms=5.0)
    now, all_requests, told = 0.0, list[StepRequest](), list[Any]()
    for kind, number, floor in events:
        now += number / 4
        if kind == "submit":
            phases = PHASES[number % len(PHASES)] if not floor else (Phase(),)
            request = asked(1 + number, 1 + number % 5, 1.0 + 2 * number, min_accuracy=floor, phases=phases)
            with suppress(DeadlinePassed):  # less time than the fastest subnets need
                scheduler.submit(request, now)
                all_requests.append(request)
        elif kind in ("cancel", "push_out") and all_requests:
            request = all_requests[number % len(all_requests)]
            if kind == "cancel":
                told += scheduler.cancel(request, now)
            else:
                scheduler.push_out(request)
        elif kind == "tick":
            told += scheduler.tick(now)
        else:
            full = number % 7 == 0
            held = data.draw(st.sampled_from(all_requests)) if full and all_requests else None
            step = begun(scheduler, now, held)
            if step is None:
                continue
            assert 0 < len(step.parts) <= places
            assert sum(tokens for _, tokens in step.parts) <= step_tokens
            assert ACCURACY[step.subnet] >= max(request.ask.min_accuracy for request, _ in step.parts)
            assert all(step.subnet in request.among for request, _ in step.parts)
            assert all(request.outcome is None and request is not held for request, _ in step.parts)
            if kind == "hang":
                now += 10.0
                told += scheduler.tick(now)
                assert all(request.due_ms >= now for request in scheduler.requests.values())
            if kind == "fail":
                told += scheduler.failed(ValueError("no"), now)
            else:
                now += 2.0
                told += scheduler.step_done([7] * len(step.answered), now)
    told += scheduler.close("", BatcherClosed("over"))
    assert all(request.outcome for request in all_requests)
    for request in all_requests:
        news = len(request.tokens) + (getattr(request.outcome, "finish", "") not in ("stop", "length"))
        assert told.count(request) == news, "once for every token, and for an end without one"
    assert not scheduler.requests
    counts = scheduler.counts
    assert counts["tokens"] == sum(len(request.tokens) for request in all_requests)
    assert counts["requests"] == sum(counts[name] for name in ("finished", "expired", "cancelled", "failed"))
    for request in all_requests:
        assert len(request.tokens) <= request.ask.answer
        assert all(ACCURACY[subnet] >= request.ask.min_accuracy for subnet in request.subnets)


def test_the_most_urgent_get_places_and_a_sequence_that_lost_its_place_is_computed_again() -> None:
    scheduler = made()
    late, soon, sooner = (asked(first_ms=ms) for ms in (60.0, 50.0, 40.0))
    for request in (late, soon, sooner):
        scheduler.submit(request, 0.0)
    step = begun(scheduler, 0.0)
    assert step is not None
    assert step.parts == [(sooner, 4), (soon, 4)]
    scheduler.step_done([1, 2], 1.0)
    scheduler.push_out(sooner)
    step = begun(scheduler, 1.0)
    assert step is not None
    assert step.parts == [(soon, 1), (sooner, 5)], (
        "its prompt and its token, before requests that are due later"
    )
    assert step.size == (1, 5.0, 5)


def test_prompts_take_what_is_left_of_a_step() -> None:
    scheduler = made(places=3, step_tokens=6)
    first, second = asked(4), asked(9, first_ms=61.0)
    scheduler.submit(first, 0.0)
    scheduler.submit(second, 0.0)
    parts = []
    for now in (0.0, 1.0, 2.0):
        step = begun(scheduler, now)
        assert step is not None
        parts.append([tokens for _, tokens in step.parts])
        scheduler.step_done([7] * len(step.answered), now + 1.0)
    assert parts == [[4, 2], [1, 5], [1, 2]]
    assert (len(first.tokens), len(second.tokens)) == (3, 1)


@pytest.mark.parametrize(
    ("deadlines", "late"), [(TokenDeadlines(3.0, 3.0), 2), (TokenDeadlines.total(9.0, 3), 0)]
)
def test_with_a_time_for_the_whole_answer_no_token_before_its_end_is_late(
    deadlines: TokenDeadlines, late: int
) -> None:
    scheduler = made(expired="serve")
    scheduler.submit(request := StepRequest(TokenAsk([1], 3, deadlines)), 0.0)
    for now in (4.0, 7.0, 9.0):
        begun(scheduler, now - 1.0)
        scheduler.step_done([7], now)
    outcome: Any = request.outcome
    assert (outcome.late, outcome.met, scheduler.counts["late"]) == (late, not late, late)
    assert outcome.times_ms == (4.0, 7.0, 9.0)


@pytest.mark.parametrize("first_ms", [1e9, float("inf")])
def test_requests_of_different_phases_take_turns_and_none_waits_for_long(first_ms: float) -> None:
    scheduler = made(places=8)
    urgent = [asked(1, 60, 10.0, phases=[Phase(subnets=i)]) for i in (0, 0, 1)]
    patient = [asked(1, 3, first_ms, phases=[Phase(subnets=2)]) for _ in range(2)]
    for request in (*urgent, *patient):
        scheduler.submit(request, 0.0)
    ran = []
    for step in range(40):
        found = begun(scheduler, float(step))
        assert found is not None
        assert len(found.parts) == (1 if found.subnet == 1 else 2), (
            "all that share the subnet are in the step"
        )
        ran.append(found.subnet)
        scheduler.step_done([7] * len(found.answered), step + 1.0)
    assert [len(one.tokens) for one in patient] == [3, 3]
    assert ran[:30].count(2) == 3
    assert {0, 1, 2} == set(ran)
    assert all(one.approximate is False for one in urgent)


def test_minimum_accuracies_are_those_of_subnets() -> None:
    scheduler = made()
    found = []
    for floor in (0.0, 30.0, 40.5, 45.0, 49.99):
        scheduler.submit(request := asked(min_accuracy=floor), 0.0)
        found.append(sorted(request.among))
    assert found == [[0, 1, 2], [0, 1, 2], [1, 2], [1, 2], [2]]
    with pytest.raises(InvalidRequest, match="no subnet reaches 50"):
        scheduler.submit(asked(min_accuracy=50.5), 0.0)


def test_requests_below_priority_0_wait_behind_others_and_leave_a_full_queue_for_them() -> None:
    scheduler = made(places=1, max_queue=3)
    running, low, lower = asked(), asked(first_ms=5.0, sheddable=True), asked(first_ms=6.0, sheddable=True)
    for request in (running, low, lower):
        assert scheduler.submit(request, 0.0) == []
    step = begun(scheduler, 0.0)
    assert step is not None
    assert step.parts == [(running, 4)]
    assert scheduler.places_now() == {"running": 1, "waiting": 2}
    with pytest.raises(QueueFull):
        scheduler.submit(asked(sheddable=True), 0.0)
    urgent = asked(first_ms=50.0)
    assert scheduler.submit(urgent, 0.0) == [lower]
    assert isinstance(lower.outcome, QueueFull)
    scheduler.step_done([0], 1.0)
    scheduler.cancel(running, 1.0)
    assert scheduler.candidates(1.0).candidates == [urgent]
    assert scheduler.submit(asked(), 1.0) == []
    assert scheduler.submit(asked(), 1.0) == [low]
    with pytest.raises(QueueFull):  # nobody leaves for one that has no more right to the place
        scheduler.submit(asked(), 1.0)
    assert scheduler.counts["shed"] == 2


def test_a_request_that_may_be_shed_makes_no_subnet_smaller_while_it_waits() -> None:
    chosen = {}
    for sheddable in (False, True):
        scheduler = made(places=1)
        scheduler.submit(asked(answer=9, first_ms=1e4), 0.0)
        begun(scheduler, 0.0)
        scheduler.submit(asked(first_ms=25.0, sheddable=sheddable), 0.0)
        scheduler.step_done([0], 1.0)
        step = begun(scheduler, 1.0)
        assert step is not None
        chosen[sheddable] = step.subnet
    assert chosen[False] < chosen[True]


@pytest.mark.parametrize(
    ("facts", "least_ms"),
    [
        ({"first_ms": 0.0}, 3.2),  # a step of 16 tokens and one of 4, of the smallest subnet
        ({"first_ms": 0.0, "min_accuracy": 45.0}, 4.16),
        ({"total_ms": 0.0, "stop": frozenset({1})}, 3.2),
        ({"total_ms": 0.0, "stop": frozenset({1}), "least": 2}, 4.3),
        ({"total_ms": 0.0}, 5.4),  # no token ends it: all three come
    ],
)
def test_deadlines_below_what_the_fastest_subnet_needs_alone_are_refused_at_once(
    facts: dict[str, Any], least_ms: float
) -> None:
    def submit(scheduler: StepScheduler, time_ms: float) -> None:
        options = {name: value for name, value in facts.items() if not name.endswith("_ms")}
        deadlines = TokenDeadlines(time_ms, 6.0)
        if "total_ms" in facts:
            deadlines = TokenDeadlines.total(time_ms, 3)
        scheduler.submit(StepRequest(TokenAsk(range(20), 3, deadlines, **options)), 0.0)

    scheduler = made(places=1)
    with pytest.raises(DeadlinePassed, match=f"needs at least {least_ms} ms"):
        submit(scheduler, least_ms - 0.01)
    assert (scheduler.counts["requests"], scheduler.counts["expired"]) == (1, 1)
    submit(scheduler, least_ms + 0.01)
    submit(made(expired="serve"), least_ms - 0.01)


DEADLINES = TokenDeadlines(60.0, 6.0)


def prompts_at(seed: int, rates: tuple[float, ...] = (0.05, 0.15, 0.05)) -> list[Prompt]:
    """Return prompts at several rates per ms, each for a second."""
    rng, found = random.Random(seed), []
    for second, rate in enumerate(rates):
        now = 1000.0 * second
        while (now := now + rng.expovariate(rate)) < 1000.0 * (second + 1):
            found.append(Prompt(now, rng.randint(4, 40), rng.randint(8, 24), DEADLINES))
    return found


def test_without_load_every_token_is_in_time_and_of_the_largest_subnet() -> None:
    result = simulate_generation(prompts_at(0, (0.005,)), step_table(scale=0.5), token_ms=6.0)
    assert result.attainment == 1.0
    assert result.effective_accuracy > 49.0
    assert result.dropped == 0


@pytest.mark.parametrize("seed", range(3))
def test_in_a_burst_switching_beats_every_fixed_subnet(seed: int) -> None:
    table, prompts = step_table(), prompts_at(seed, (0.05, 0.2, 0.05))
    elastic = simulate_generation(prompts, table, token_ms=6.0)
    fixed = [simulate_generation(prompts, table.select([i]), token_ms=6.0) for i in range(3)]
    assert fixed[2].attainment < 0.95, "the burst is more than the largest subnet sustains"
    assert elastic.effective_accuracy > max(one.effective_accuracy for one in fixed)


@pytest.mark.parametrize("expired", ["drop", "serve"])
@pytest.mark.parametrize("seed", range(3))
def test_every_token_is_counted_once(expired: str, seed: int) -> None:
    prompts = prompts_at(seed, (0.3,))
    result = simulate_generation(prompts, step_table(), token_ms=6.0, max_sequences=4, expired=expired)
    assert result.tokens == sum(one.answer for one in prompts)
    assert 0 <= result.in_time <= result.tokens
    assert 40.0 * result.in_time <= result.accuracy_in_time <= 50.0 * result.in_time
    assert (result.dropped > 0) == (expired == "drop")
    kept = len(prompts) - result.dropped
    assert result.steps >= max(one.answer for one in prompts) * (kept > 0)


def test_what_cannot_be_simulated_is_refused() -> None:
    wrong = [("tokens", 0, "a prompt has tokens: 0 must be"), ("answer", 0, "a prompt has answer: 0 must be")]
    for name in ("arrival_ms", "min_accuracy"):
        values = (float("nan"), float("inf"), -1e16, "soon", None)
        wrong += [(name, value, f"{name}: .* must be a number from") for value in values]
    facts: dict[str, Any] = {"arrival_ms": 1.0, "tokens": 3, "answer": 3, "deadlines": DEADLINES}
    for name, value, words in wrong:
        with pytest.raises(TraceError, match=words):
            simulate_generation([Prompt(**{**facts, name: value})], step_table(), token_ms=6.0)
    for name, value in {"token_ms": -1.0, "max_sequences": 0, "step_tokens": 0, "expired": "?"}.items():
        with pytest.raises(PolicyError):
            simulate_generation([], step_table(), **{"token_ms": 6.0, name: value})
    assert simulate_generation([], step_table(), token_ms=6.0).attainment == 1.0, "nothing is asked for"


def test_a_minimum_accuracy_is_met_or_refused() -> None:
    prompts = [Prompt(0.0, 3, 3, DEADLINES, 45.5)]
    assert simulate_generation(prompts, step_table(scale=9.0), token_ms=20.0).accuracy_in_time == 150.0
    with pytest.raises(InvalidRequest, match="no subnet reaches 60"):
        simulate_generation([Prompt(0.0, 3, 3, DEADLINES, 60.0)], step_table(), token_ms=6.0)


def test_under_load_thinking_is_shorter_and_the_answers_are_as_long() -> None:
    thinks, due = [Phase(end=1, tokens=64), Phase()], TokenDeadlines.total(600.0, 72, 6.0)
    prompts = [Prompt(one.arrival_ms, 8, 72, due, phases=thinks) for one in prompts_at(0, (0.02, 0.3, 0.02))]
    budgets, table = {4: 0.5, 16: 0.8, 64: 1.0}, step_table(KEYS[:1], ACCURACY[:1])

    def run(prompts: list[Prompt], **options: Any) -> Any:
        return simulate_generation(prompts, table, token_ms=6.0, **options)

    fixed = [run(prompts, thinking={b: budgets[b]}).dropped for b in budgets]
    assert fixed[2] > fixed[1] > fixed[0], "the load is more than long thoughts permit"
    chosen = run(prompts, thinking=budgets).dropped
    assert fixed[1] > chosen, "each budget alone drops requests in the burst, or wastes the lulls"
    calm = [Prompt(0.0, 8, 72, due, phases=thinks)]
    steps = [run(calm, thinking={b: 1.0}).steps for b in budgets]
    assert steps == [12, 24, 72], "a budget and 8 tokens of an answer"


def test_a_step_that_fails_ends_its_requests_only() -> None:
    scheduler = made(places=1, max_queue=2)
    first, second = asked(), asked()
    scheduler.submit(first, 0.0)
    scheduler.submit(second, 0.0)
    with pytest.raises(QueueFull):
        scheduler.submit(asked(), 0.0)
    begun(scheduler, 0.0)
    (ended,) = scheduler.failed(ValueError("no"), 1.0)
    assert ended is first
    assert isinstance(ended.outcome, BatchFailed)
    step = begun(scheduler, 2.0)
    assert step is not None
    assert step.parts == [(second, 4)]
    scheduler.close()
    with pytest.raises(BatcherClosed):
        scheduler.submit(asked(), 2.0)
    assert second.outcome is None, "those under way go on"
