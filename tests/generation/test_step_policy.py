"""The subnet of a step: as accurate as the most urgent token permits, never below the minimum accuracy."""

from __future__ import annotations

from typing import Any

import pytest
from generation_tables import KEYS, step_table
from hypothesis import given
from hypothesis import strategies as st

from subnetact.errors import PolicyError, TableError
from subnetact.generation import Phase, StepPolicy, StepTable, TokenDeadlines
from subnetact.generation.phases import PlannedPhase
from subnetact.generation.step_policy import Crowd
from subnetact.generation.step_request import StepRequest, TokenAsk


@given(
    st.floats(-20.0, 200.0), st.integers(1, 16), st.integers(1, 200), st.integers(0, 100), st.floats(0.2, 5.0)
)
def test_a_step_is_in_time_if_any_subnet_is(
    slack: float, sequences: int, context: int, prompt: int, slowdown: float
) -> None:
    table = step_table()
    policy = StepPolicy(table, 50.0, margin=0.1)
    policy.slowdown = slowdown
    chosen = policy.choose(slack, sequences=sequences, context=context, prompt_tokens=prompt)
    times = [1.1 * slowdown * table.latencies_ms(sequences, context, prompt)[i] for i in range(3)]
    if min(times) <= slack:
        assert chosen == max(i for i in range(3) if times[i] <= slack), "the most accurate in time"
    else:
        assert chosen == times.index(min(times))
    assert policy.tabled_ms == table.latencies_ms(sequences, context, prompt)[chosen]


def test_spare_time_buys_accuracy_and_little_time_does_not() -> None:
    policy = StepPolicy(step_table(), 50.0)
    assert policy.choose(50.0, sequences=4) == 2
    assert policy.choose(1.6, sequences=4) == 0
    assert policy.choose(-5.0, sequences=1) == 0, "late already: the fastest"
    assert policy.choose(2.2, sequences=1) == 2
    assert policy.choose(2.2, sequences=0, prompt_tokens=16) == 0, "the prompt takes the rest"


def crowd(left: list[int], due: list[float], answers: list[int], places: int) -> Crowd:
    """Return requests with so many tokens left in their places, and others that wait for their first ones."""

    def request(answer: int, due_ms: float) -> StepRequest:
        ask = TokenAsk([1], answer, TokenDeadlines(max(due_ms, 1e-3), 1e6))
        return StepRequest(ask, due_ms=due_ms, most=answer, planned=[PlannedPhase(frozenset({0, 1, 2}))])

    waiting = [request(*one) for one in zip(answers, due, strict=True)]
    return Crowd(0.0, [request(tokens, 1e6) for tokens in left[:places]], waiting, places)


@given(st.lists(st.integers(1, 50), max_size=6), st.lists(st.integers(1, 50), max_size=8), st.integers(1, 6))
def test_whoever_waits_takes_the_place_that_is_free_first(
    left: list[int], answers: list[int], places: int
) -> None:
    asked = crowd(left, [1e6] * len(answers), answers, places)
    claims = StepPolicy(step_table(), 50.0).claims(asked, [1.0], [0.0])[len(asked.active) :]
    busy, waiting, found = sorted(left[:places]), list(answers), []
    for step in range(1000):  # one after the other, as a queue in front of servers
        busy = [end for end in busy if end > step]
        while waiting and len(busy) < places:
            found.append(step + 1)
            busy.append(step + waiting.pop(0))
    assert [claim.steps for claim in claims] == found


def test_the_third_wave_of_requests_counts_before_it_is_urgent() -> None:
    policy = StepPolicy(step_table(), 50.0)
    asked = crowd([10] * 4, [100.0] * 12, [10] * 12, 4)
    facts: dict[str, Any] = {"sequences": 4, "crowd": asked}
    assert policy.choose(100.0, **facts) == 0, "31 steps are to fit into half of 100 ms"
    assert policy.choose(100.0, **facts | {"crowd": asked._replace(waiting=asked.waiting[:4])}) == 2
    lost = crowd([10] * 4, [5.0] * 12, [10] * 12, 4)
    assert policy.choose(100.0, **facts | {"crowd": lost}) == 2, "nobody can help those"


def test_the_load_sets_how_long_requests_think() -> None:
    found = []
    for gap_ms in (1000.0, 12.0, 1.0):
        policy = StepPolicy(step_table(), 50.0, thinking={10: 0.6, 40: 0.9, 160: 1.0})
        ask = TokenAsk([1] * 8, 170, TokenDeadlines(100.0, 50.0), phases=[Phase(end=7, tokens=160), Phase()])
        for number in range(50):
            policy.arrived(ask, gap_ms * number)
        policy.choose(50.0, sequences=4, crowd=Crowd(gap_ms * 49, [], [], 4))
        found.append(policy.budget)
    assert found[0] == 160
    assert found[2] == 10
    assert 10 < found[1] < 160


def test_the_subnets_that_requests_permit_hold_although_the_step_is_late() -> None:
    policy = StepPolicy(step_table(), 50.0)
    assert (policy.choose(-5.0, sequences=1, among={1, 2}), policy.lifted) == (1, True)
    assert (policy.choose(-5.0, sequences=1, among={2}), policy.lifted) == (2, True)
    assert (policy.choose(50.0, sequences=1, among={2}), policy.lifted) == (2, False)
    assert (policy.choose(50.0, sequences=1, among={0, 1}), policy.lifted) == (1, False)
    with pytest.raises(PolicyError, match="none of the subnets 0 to 2"):
        policy.choose(50.0, sequences=1, among=())


def test_slow_steps_are_learned_and_forgotten() -> None:
    policy = StepPolicy(step_table(), 50.0)
    assert policy.choose(2.5, sequences=1) == 2
    for _ in range(200):
        policy.observe(1.5, 4.5)
    assert policy.slowdown == pytest.approx(3.0, rel=0.01)
    assert policy.choose(2.5, sequences=1) == 0
    for _ in range(200):
        policy.observe(1.5, 1.5)
    assert policy.choose(2.5, sequences=1) == 2


@pytest.mark.parametrize(
    ("table", "token_ms", "error", "words"),
    [
        ("steps.json", 50.0, PolicyError, "expected a StepTable, got str"),
        (step_table(), 0.0, PolicyError, "token_ms"),
        (step_table(), 0.5, TableError, "give more time per token"),
        (step_table(KEYS, (40.0, 45.0, float("nan"))), 50.0, TableError, "not known"),
    ],
)
def test_what_cannot_choose_is_refused(
    table: StepTable, token_ms: float, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        StepPolicy(table, token_ms)
