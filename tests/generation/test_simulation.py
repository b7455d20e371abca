"""The simulator of generation: what is served in time; switching beats every fixed subnet in a burst."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from generation_tables import ACCURACY, KEYS, step_table

from subnetact.errors import InvalidRequest, PolicyError, TraceError
from subnetact.generation import Phase, Prompt, TokenDeadlines, simulate_generation

DEADLINES = TokenDeadlines(60.0, 6.0)


def trace(seed: int, rates: tuple[float, ...] = (0.05, 0.15, 0.05)) -> list[Prompt]:
    """Return prompts at several rates per ms, each for a second."""
    rng, found = random.Random(seed), []
    for second, rate in enumerate(rates):
        now = 1000.0 * second
        while (now := now + rng.expovariate(rate)) < 1000.0 * (second + 1):
            found.append(Prompt(now, rng.randint(4, 40), rng.randint(8, 24), DEADLINES))
    return found


def test_without_load_every_token_is_in_time_and_of_the_largest_subnet() -> None:
    result = simulate_generation(trace(0, (0.005,)), step_table(scale=0.5), token_ms=6.0)
    assert result.attainment == 1.0
    assert result.effective_accuracy > 49.0
    assert result.dropped == 0


@pytest.mark.parametrize("seed", range(3))
def test_in_a_burst_switching_beats_every_fixed_subnet(seed: int) -> None:
    table, prompts = step_table(), trace(seed, (0.05, 0.2, 0.05))
    elastic = simulate_generation(prompts, table, token_ms=6.0)
    fixed = [simulate_generation(prompts, table.select([i]), token_ms=6.0) for i in range(3)]
    assert fixed[2].attainment < 0.95, "the burst is more than the largest subnet sustains"
    assert elastic.effective_accuracy > max(one.effective_accuracy for one in fixed)


@pytest.mark.parametrize("expired", ["drop", "serve"])
@pytest.mark.parametrize("seed", range(3))
def test_every_token_is_counted_once(expired: str, seed: int) -> None:
    prompts = trace(seed, (0.3,))
    result = simulate_generation(prompts, step_table(), token_ms=6.0, max_sequences=4, expired=expired)
    assert result.tokens == sum(one.answer for one in prompts)
    assert 0 <= result.in_time <= result.tokens
    assert 40.0 * result.in_time <= result.accuracy_in_time <= 50.0 * result.in_time
    assert (result.dropped > 0) == (expired == "drop")
    kept = len(prompts) - result.dropped
    assert result.steps >= max(one.answer for one in prompts) * (kept > 0)


def test_faster_machines_serve_more_in_time() -> None:
    prompts = trace(1, (0.2,))
    shares = [
        simulate_generation(prompts, step_table(scale=scale), token_ms=6.0, expired="serve").attainment
        for scale in (0.25, 0.5, 1.0, 2.0)
    ]
    assert all(faster >= slower for faster, slower in pairwise(shares))
    assert shares[0] > shares[-1]


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
    prompts = [Prompt(one.arrival_ms, 8, 72, due, phases=thinks) for one in trace(0, (0.02, 0.3, 0.02))]
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
