"""The subnet of a step: as accurate as the most urgent token permits, never below the minimum accuracy."""

from __future__ import annotations

import pytest
from generation_tables import KEYS, step_table
from hypothesis import given
from hypothesis import strategies as st

from subnetact.errors import PolicyError, TableError
from subnetact.generation import StepPolicy, StepTable


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


@given(st.lists(st.integers(0, 50), max_size=8), st.lists(st.floats(-50.0, 500.0), max_size=8))
def test_at_this_pace_waiting_requests_get_a_place_in_time(left: list[int], due: list[float]) -> None:
    pace, due = StepPolicy.pace(0.0, left, sorted(due)), sorted(due)
    for steps, latest in zip(sorted(left), due, strict=False):
        assert pace * (steps + 1) <= max(latest, 0.0) + 1e-9
    if not left or not due:
        assert pace == float("inf")


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
