"""The subnet of a step: as accurate as the most urgent token permits, never below the minimum accuracy."""

from __future__ import annotations

from typing import Any

import pytest
from generation_tables import KEYS, step_table
from hypothesis import given
from hypothesis import strategies as st

from subnetact.errors import PolicyError, TableError
from subnetact.generation import StepPolicy, StepTable
from subnetact.latency.table import LatencyTable
from subnetact.serving.policies import Fixed, HullFit, SlackFit

POLICIES = {
    "none": None,
    "HullFit": lambda table: HullFit(table, 50.0),
    "SlackFit": lambda table: SlackFit(table, 50.0),
    "largest": lambda table: Fixed(table, 2),
}


@pytest.mark.parametrize("name", POLICIES)
@given(
    st.lists(st.floats(-20.0, 200.0), min_size=1, max_size=16),
    st.integers(1, 200),
    st.integers(0, 100),
    st.floats(0.2, 5.0),
)
def test_a_step_is_in_time_if_any_subnet_is(
    name: str, slacks: list[float], context: int, prompt: int, slowdown: float
) -> None:
    table = step_table()
    policy = StepPolicy(table, 50.0, POLICIES[name], margin=0.1)
    policy.slowdown = slowdown
    facts = {"sequences": len(slacks), "context": float(context), "prompt_tokens": prompt}
    chosen = policy.choose(1000.0, [1000.0 + slack for slack in slacks], **facts)  # type: ignore[arg-type]
    times = [1.1 * slowdown * table.latency_ms(i, len(slacks), context, prompt) for i in range(3)]
    if min(times) <= min(slacks):
        assert times[chosen] <= min(slacks)
    else:
        assert chosen == times.index(min(times))


def test_spare_time_buys_accuracy_and_little_time_does_not() -> None:
    policy = StepPolicy(step_table(), 50.0)
    assert policy.choose(0.0, [50.0] * 4, sequences=4) == 2
    assert policy.choose(0.0, [1.6, 50.0, 50.0, 50.0], sequences=4) == 0
    assert policy.choose(0.0, [-5.0], sequences=1) == 0, "late already: the fastest"
    assert policy.choose(0.0, [2.2], sequences=1) == 2
    assert policy.choose(0.0, [2.2], sequences=0, prompt_tokens=16) == 0, "the prompt takes the rest"
    assert policy.choose(0.0, [50.0] * 4, sequences=4, pace_ms=1.6) == 0, "others wait for a place"


@given(st.lists(st.integers(0, 50), max_size=8), st.lists(st.floats(-50.0, 500.0), max_size=8))
def test_at_this_pace_waiting_requests_get_a_place_in_time(left: list[int], due: list[float]) -> None:
    pace, due = StepPolicy.pace(0.0, left, sorted(due)), sorted(due)
    for steps, latest in zip(sorted(left), due, strict=False):
        assert pace * (steps + 1) <= max(latest, 0.0) + 1e-9
    if not left or not due:
        assert pace == float("inf")


def test_a_fixed_policy_is_only_left_for_faster_subnets() -> None:
    middle = StepPolicy(step_table(), 50.0, lambda table: Fixed(table, 1))
    assert middle.choose(0.0, [50.0], sequences=1) == 1
    assert middle.choose(0.0, [1.3], sequences=1) == 0


def test_the_minimum_accuracy_holds_although_the_step_is_late() -> None:
    policy = StepPolicy(step_table(), 50.0)
    assert policy.choose(0.0, [-5.0], sequences=1, floor=45.0) == 1
    assert policy.choose(0.0, [-5.0], sequences=1, floor=45.1) == 2
    with pytest.raises(PolicyError, match=r"50\.50? percent; no subnet"):
        policy.choose(0.0, [50.0], sequences=1, floor=50.5)


def test_slow_steps_are_learned_and_forgotten() -> None:
    policy = StepPolicy(step_table(), 50.0)
    assert policy.choose(0.0, [2.5], sequences=1) == 2
    for _ in range(200):
        policy.observe(2, 1, 1.0, 0, 3 * policy.table.latency_ms(2, 1))
    assert policy.slowdown == pytest.approx(3.0, rel=0.01)
    assert policy.choose(0.0, [2.5], sequences=1) == 0
    for _ in range(200):
        policy.observe(2, 1, 1.0, 0, policy.table.latency_ms(2, 1))
    assert policy.choose(0.0, [2.5], sequences=1) == 2


class _Other:
    table = LatencyTable(["another"], [50.0], [1], [[1.0]])

    def decide(self, context: Any) -> None:
        """Never run anything."""


@pytest.mark.parametrize(
    ("table", "token_ms", "policy", "error", "words"),
    [
        ("steps.json", 50.0, None, PolicyError, "expected a StepTable, got str"),
        (step_table(), 0.0, None, PolicyError, "token_ms"),
        (step_table(), 0.5, None, TableError, "give more time per token"),
        (step_table(), 50.0, lambda _: "slackfit", PolicyError, "no policy object"),
        (step_table(), 50.0, lambda _: _Other(), PolicyError, "other subnets"),
        (step_table(KEYS, (40.0, 45.0, float("nan"))), 50.0, None, TableError, "not known"),
    ],
)
def test_what_cannot_choose_is_refused(
    table: StepTable, token_ms: float, policy: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        StepPolicy(table, token_ms, policy)
