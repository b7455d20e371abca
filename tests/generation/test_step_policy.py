"""The subnet of a step: as accurate as the most urgent token permits, never below the minimum accuracy."""

from __future__ import annotations

import math
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
from subnetact.latency.table import LatencyTable


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


def test_a_step_takes_its_sequences_and_its_prompts() -> None:
    table = step_table()
    assert table.latencies_ms(1, 10)[0] == pytest.approx(1.1)
    assert table.latencies_ms(3, 10)[0] == pytest.approx(1.4), "as long as four sequences"
    assert table.latencies_ms(1, 33)[0] == pytest.approx(1.65), "the next context"
    assert table.latencies_ms(1, 5000)[0] == pytest.approx(1.65), "the largest context"
    assert table.latencies_ms(32, 10)[0] == pytest.approx(2 * 2.6), "in proportion to the largest number"
    assert table.latencies_ms(0, 1, 8)[1] == pytest.approx(1.3 * 1.4)
    assert table.latencies_ms(0, 1, 36)[1] == pytest.approx(1.3 * (1 + 0.05 * 36)), "between two prompts"
    assert table.latencies_ms(0, 1, 128)[1] == pytest.approx(2 * 1.3 * 4.2)
    both = table.latencies_ms(4, 20)[1] + table.latencies_ms(0, 1, 8)[1]
    assert table.latencies_ms(4, 20, 8)[1] == pytest.approx(both - 1.3), "the weights are read once"
    one = StepTable(table.decode, table.prefill.select(batch_sizes=[8]))
    assert one.latencies_ms(4, 20, 8)[1] == pytest.approx(both), "nothing tells what is read once"
    assert table.latencies_ms(0, 20)[1] == 0.0


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 300), st.integers(0, 300), st.integers(0, 2))
def test_more_work_never_takes_less_time(few: int, more: int, context: int, prompt: int, subnet: int) -> None:
    table = step_table()
    low, high = sorted((few, more))
    for less, work in (
        ((low, context, prompt), (high, context, prompt)),
        ((low, context, low), (low, context, high)),
    ):
        assert table.latencies_ms(*less)[subnet] <= table.latencies_ms(*work)[subnet] + 1e-9


def test_a_table_comes_back_from_the_tables_of_an_engine() -> None:
    table = step_table()
    names = ["scheduler", "prefill", "decode-128", "decode-32"]  # in any order
    tables = {name: {"scheduler": table.prefill, **table.to_tables()}[name] for name in names}
    found = StepTable.from_tables(tables)
    assert (list(found.decode.items()), found.prefill) == (list(table.decode.items()), table.prefill)
    assert found.with_accuracy([1.5, 2.5, 3.5]).accuracy == (1.5, 2.5, 3.5)
    for lacking in ({}, {"scheduler": table.prefill}, {"prefill": table.prefill}):
        with pytest.raises(TableError, match="no step table"):
            StepTable.from_tables(lacking)


def _other(**changes: Any) -> LatencyTable:
    facts = {"keys": KEYS, "sizes": [1, 4, 16], "first": 1.0} | changes
    rows = [[1.0 + i for i in range(len(facts["sizes"]))] for _ in facts["keys"]]
    rows[0][0] = facts["first"]
    return LatencyTable(facts["keys"], [50.0] * len(facts["keys"]), facts["sizes"], rows)


@pytest.mark.parametrize(
    ("decode", "prefill", "words"),
    [
        ({}, _other(), "decode: empty"),
        ([_other()], _other(), "mapping"),
        ({0: _other()}, _other(), "0 is not a positive integer"),
        ({True: _other()}, _other(), "True is not a positive integer"),
        ({16: _other(), 8: _other()}, _other(), "8 does not ascend from 16"),
        ({8: "steps.json"}, _other(), "got str"),
        ({8: _other(), 16: _other(keys=["a", "b", "c"])}, _other(), "different subnets"),
        ({8: _other()}, _other(keys=["a", "b", "c"]), "different subnets"),
        ({8: _other(), 16: _other(sizes=[1, 2])}, _other(), "different numbers"),
        ({8: _other(first=math.nan)}, _other(), "not measured"),
    ],
)
def test_what_is_no_step_table_is_refused(decode: Any, prefill: Any, words: str) -> None:
    with pytest.raises(TableError, match=words):
        StepTable(decode, prefill)
