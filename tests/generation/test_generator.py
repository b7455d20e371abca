"""Generation under deadlines: the same tokens as alone, one end per request, and faults that stay alone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from generation_tables import ACCURACY, step_table
from held_steps import Clock, Gate, steer

from subnetact.digits import new_digits_supernet
from subnetact.errors import (
    BatcherClosed,
    BatchFailed,
    CacheMismatch,
    DeadlinePassed,
    InsertError,
    InvalidRequest,
    PolicyError,
    ProfileMismatch,
    QueueFull,
)
from subnetact.generation import Completion, Generator, Phase, StepTable, profile_steps
from subnetact.generation.step_scheduler import Step
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

pytest.importorskip("transformers")
Alone = Callable[[list[int], tuple[int, ...]], list[int]]
Make = Callable[..., Generator]
LONG = {"first_ms": 60_000.0, "token_ms": 60_000.0}
LATE = {"first_ms": 1e-3, "token_ms": 1e-3}
"""Nothing is in time, so that the fastest subnet that is accurate enough runs."""


def prompts(number: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randint(97, (3 + 5 * (i % 4),), generator=generator).tolist() for i in range(number)]


@pytest.fixture
def make(llama: Supernet, widths: list[SubnetSpec], table: StepTable) -> Iterator[Make]:
    """Return a function that makes a generator, which is closed after the test."""
    made: list[Generator] = []

    def generator(**options: Any) -> Generator:
        given: dict[str, Any] = {"token_ms": 50.0, "allow_approximate": True, "seed": 0} | options
        choose = given.pop("choose", None)
        made.append(Generator(llama, given.pop("subnets", widths), given.pop("table", table), **given))
        if choose is not None:
            steer(made[-1]._scheduler.policy, choose)
        return made[-1]

    yield generator
    for one in made:
        one.close(drain=False)


def test_a_fixed_subnet_generates_what_transformers_does(
    llama: Supernet, widths: list[SubnetSpec], make: Make
) -> None:
    for subnet, spec in enumerate(widths):
        plain: Any = llama.extract(spec)
        table = step_table([spec.key], (50.0,))
        generator = make(subnets=[spec], table=table)
        for prompt in prompts(2):
            expected = plain.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)
            answer = generator.submit(prompt, max_new_tokens=9, **LONG).result(60)
            assert list(answer.tokens) == expected[0, len(prompt) :].tolist(), subnet
            assert (answer.finish, answer.met, answer.subnets) == ("length", True, (0,) * 9)
            assert answer.subnets_used == (spec.key,)


@pytest.mark.parametrize("cache_tokens", [16_384, 160])
def test_sequences_that_join_leave_and_switch_get_the_same_tokens_as_alone(
    make: Make, alone: Alone, cache_tokens: int
) -> None:
    generator = make(
        choose=partial(random.Random(0).randrange, 3), max_sequences=8, cache_tokens=cache_tokens
    )
    given = prompts(20)
    running = []
    for i, prompt in enumerate(given):
        running.append(generator.submit(prompt, max_new_tokens=4 + 3 * (i % 5), **LONG))
        if i % 3 == 2:
            next(iter(running[i - 2]))  # the next ones join when this one is under way
    answers = [one.result(60) for one in running]
    used = {subnet for answer in answers for subnet in answer.subnets}
    assert used == {0, 1, 2}
    for prompt, answer, i in zip(given, answers, range(20), strict=True):
        assert len(answer.tokens) == 4 + 3 * (i % 5)
        if cache_tokens > 1000:  # What a full cache pushes out is computed again, by one subnet.
            assert list(answer.tokens) == alone(prompt, answer.subnets)
    stats = generator.stats()
    assert (stats.requests, stats.finished, stats.active, stats.failed) == (20, 20, 0, 0)
    assert stats.tokens == sum(len(answer.tokens) for answer in answers)


def test_thinking_ends_with_its_token_and_the_answer_goes_on_from_there(
    llama: Supernet, widths: list[SubnetSpec], make: Callable[..., Generator]
) -> None:
    generator, prompt = make(thinking={3: 1.0}), prompts(1)[0]
    phases = [Phase(end=7, tokens=8, subnets=0), Phase(subnets=0)]
    answer = generator.submit(prompt, max_new_tokens=12, phases=phases, **LONG).result(60)
    plain: Any = llama.extract(widths[0])
    thought = plain.generate(torch.tensor([prompt]), max_new_tokens=2, do_sample=False)[0].tolist()
    expected = plain.generate(torch.tensor([[*thought, 7]]), max_new_tokens=4, do_sample=False)[0]
    assert [*prompt, *answer.tokens] == expected.tolist(), "3 tokens instead of 8, and 4 of an answer"
    assert answer.finish == "length"


def test_generators_beside_each_other_leave_the_network_as_it_was(
    llama: Supernet, make: Make, alone: Alone
) -> None:
    before, (prompt,) = dict(vars(llama.network.config)), prompts(1)
    expected = alone(prompt, (2,) * 12)
    generators = [make() for _ in range(3)]
    running = [one.submit(prompt, max_new_tokens=100, **LONG) for one in generators for _ in range(2)]
    while not all(one.done for one in running):
        assert dict(vars(llama.network.config)) == before, "other threads read the configuration"
        assert alone(prompt, (2,) * 12) == expected
    assert all(list(one.result().tokens[:12]) == expected for one in running)


def test_a_client_that_leaves_while_a_step_is_put_together_changes_no_other_answer(
    make: Make, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = make(choose=lambda: 1)
    gate = Gate(generator, monkeypatch)
    first, second = prompts(4)[2:]
    leaving = generator.submit(first, max_new_tokens=20, **LONG)
    gate.wait()
    staying = generator.submit(second, max_new_tokens=20, **LONG)
    reserve = generator._loop.reserve

    def leave_first(step: Step) -> None:
        if len(leaving.tokens()) == 3:
            leaving.cancel()
        reserve(step)

    monkeypatch.setattr(generator._loop, "reserve", leave_first)
    gate.free.release(100)
    assert list(staying.result(60).tokens) == alone(second, (1,) * 20)
    answer = leaving.result(60)
    assert (answer.tokens, answer.finish, answer.met) == (tuple(alone(first, (1,) * 3)), "cancelled", False)
    leaving.cancel()
    assert generator.stats().cancelled == 1


def test_sampling_leaves_greedy_neighbours_alone_and_follows_its_limits(make: Make, alone: Alone) -> None:
    generator = make()
    first, second = prompts(2)
    sampled = [generator.submit(first, max_new_tokens=20, temperature=3.0, **LONG) for _ in range(4)]
    greedy = generator.submit(second, max_new_tokens=20, **LONG)
    only = generator.submit(second, max_new_tokens=20, temperature=3.0, top_k=1, **LONG)
    nucleus = generator.submit(second, max_new_tokens=20, temperature=1.0, top_p=1e-9, **LONG)
    expected = alone(second, (2,) * 20)
    for one in (greedy, only, nucleus):
        assert list(one.result(60).tokens) == expected
    assert len({one.result(60).tokens for one in sampled}) > 1
    for temperature in (0.0, 1e-320):
        cold = generator.submit(second, max_new_tokens=20, temperature=temperature, **LONG)
        assert list(cold.result(60).tokens) == expected


def test_a_seed_decides_what_is_drawn_whatever_else_is_in_the_steps(make: Make) -> None:
    first, second = prompts(2)
    warm: dict[str, Any] = {"max_new_tokens": 20, "temperature": 2.0, **LONG}
    drawn = [make(seed=i).submit(first, seed=7, **warm).result(60).tokens for i in range(2)]
    generator = make(cache_tokens=160)  # too few for all, so that some are pushed out and computed again
    crowd = [generator.submit(second, top_k=9, **warm) for _ in range(4)]
    same = [generator.submit(first, seed=7, **warm) for _ in range(2)]
    other = generator.submit(first, seed=-8, **warm)
    assert {one.result(60).tokens for one in same} == {*drawn}
    assert len({one.result(60).tokens for one in (*crowd, same[0], other)}) == 6
    again = {make(seed=3).submit(first, **warm).result(60).tokens for _ in range(2)}
    assert len(again) == 1, "a generator's seed gives its requests theirs"


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    pytest.importorskip("transformers")
    from subnetact.generation.step_loop import _Draws

    draws, scores = _Draws(), torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).log()
    draws.sources = [torch.Generator().manual_seed(i) for i in range(4000)]
    ids = torch.zeros(1, dtype=torch.long)
    shares = draws(ids, scores.expand(4000, -1).clone()).argmax(-1).bincount(minlength=5) / 4000
    assert torch.allclose(shares, scores.exp(), atol=0.03)
    assert shares[4] == 0.0
    draws.sources = [None]
    assert torch.equal(draws(ids, scores[None].clone())[0], scores), "others are left alone"


def test_log_probabilities_are_those_of_the_model(
    llama: Supernet, widths: list[SubnetSpec], make: Make
) -> None:
    generator, warm = make(choose=lambda: 1, step_tokens=6), {"temperature": 3.0}
    plain: Any = llama.extract(widths[1])
    for prompt in prompts(2):
        asks: list[Any] = [(0, {}), (5, warm), (20, {}), (None, warm)]
        asked = [generator.submit(prompt, max_new_tokens=8, logprobs=k, **o, **LONG) for k, o in asks]
        for (k, _), completion in zip(asks, asked, strict=True):
            answer = completion.result(60)
            assert answer.logprobs == completion.logprobs()
            assert completion.logprobs(6) == answer.logprobs[6:]
            if k is None:
                assert answer.logprobs == ()
                continue
            with torch.inference_mode():
                logits = plain(torch.tensor([[*prompt, *answer.tokens]])).logits[0, len(prompt) - 1 : -1]
            for row, token, one in zip(logits.log_softmax(-1), answer.tokens, answer.logprobs, strict=True):
                assert one.own == pytest.approx(float(row[token]), abs=1e-4)
                values = [logprob for _, logprob in one.likely]
                assert values == pytest.approx(row.topk(k).values.tolist(), abs=1e-4)
                assert values == pytest.approx([float(row[token]) for token, _ in one.likely], abs=1e-4)


def test_late_tokens_are_counted_and_requests_that_cannot_begin_are_dropped(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    generator = make(max_sequences=1, clock_ms=clock)
    gate = Gate(generator, monkeypatch)
    late = generator.submit([5, 6], max_new_tokens=6, first_ms=100.0, token_ms=1.0)
    gate.wait()
    expiring = generator.submit([7, 8], max_new_tokens=6, first_ms=15.0)
    clock.now_ms += 20.0  # in the first step, which answers the first request in time
    with pytest.raises(DeadlinePassed, match="token 1 was due after 15 ms"):
        expiring.result(60)
    gate.free.release()
    gate.wait(2)
    clock.now_ms += 200.0
    gate.free.release(100)
    answer = late.result(60)
    assert (len(answer.tokens), answer.first_ms, answer.late) == (6, 20.0, 5)
    stats = generator.stats()
    assert (stats.expired, stats.finished) == (1, 1)
    serving = Clock()
    served = make(max_sequences=1, expired="serve", clock_ms=serving)
    gate = Gate(served, monkeypatch)
    one = served.submit([5, 6], max_new_tokens=6, first_ms=0.01, token_ms=0.001)
    gate.wait()
    serving.now_ms += 500.0
    gate.free.release(100)
    assert (one.result(60).late, one.result().met) == (6, False)


def test_a_step_that_hangs_is_seen_and_requests_end_at_their_deadlines(
    make: Make, monkeypatch: pytest.MonkeyPatch, alone: Alone
) -> None:
    clock, prompt = Clock(), prompts(1)[0]
    generator = make(clock_ms=clock, choose=lambda: 1, expired="serve", watchdog_ms=2e3)
    gate = Gate(generator, monkeypatch)
    begun = generator.submit(prompt, max_new_tokens=9, first_ms=5e3, token_ms=4e3)
    gate.free.release()
    gate.wait(2)
    first = generator.submit(prompt, max_new_tokens=9, first_ms=3e3)
    patient = generator.submit(prompt, max_new_tokens=4, first_ms=1e6, token_ms=1e6)
    leaving = generator.submit(prompt, max_new_tokens=4, first_ms=1e6, token_ms=1e6)
    clock.now_ms += 1.9e3
    assert generator.stats().up
    clock.now_ms += 1.2e3
    assert not generator.stats().up
    with pytest.raises(DeadlinePassed, match="token 1 was due after 3000 ms"):
        first.result(60)
    leaving.cancel()
    assert leaving.result(60).finish == "cancelled"
    clock.now_ms += 8e3
    with pytest.raises(DeadlinePassed, match="token 2 was due after 9000 ms"):
        begun.result(60)
    assert not patient.done
    assert len(begun.tokens()) == 1
    gate.free.release(100)
    assert list(patient.result(60).tokens) == alone(prompt, (1,) * 4), "the generator goes on"
    assert generator.stats().up
    assert len(begun.tokens()) == 1
    stats = generator.stats()
    assert (stats.expired, stats.cancelled, stats.finished, stats.active) == (2, 1, 1, 0)


@pytest.mark.parametrize("wait", [True, False])
def test_closing_does_not_wait_for_a_step_that_hangs(
    make: Make, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    clock = Clock()
    generator = make(clock_ms=clock)
    gate = Gate(generator, monkeypatch)
    running = generator.submit([1, 2], max_new_tokens=9, **LONG)
    gate.wait()
    clock.now_ms += 1e5
    closing = threading.Thread(target=generator.close, args=(wait,))
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    with pytest.raises(BatcherClosed):
        running.result(60)
    gate.free.release(100)
    generator._thread.join(60)
    assert not generator._thread.is_alive()
    assert not generator.stats().up


def test_a_loop_that_dies_is_seen(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = make()
    assert generator.stats().up
    monkeypatch.setattr(generator._loop, "refresh", lambda: 1 / 0)
    generator._thread.join(60)
    assert not generator.stats().up
    with pytest.raises(BatcherClosed, match="ZeroDivisionError"):
        generator.submit([1, 2])


def test_a_minimum_accuracy_is_kept_and_steps_that_it_lifts_are_counted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = make(expired="serve")
    for floor, subnet in ((50.0, 2), (44.0, 1)):
        answer = generator.submit([1, 2], max_new_tokens=4, min_accuracy=floor, **LATE).result(60)
        assert set(answer.subnets) == {subnet}
    assert generator.stats().lifted == 0, "they lifted nobody else"
    gate = Gate(generator, monkeypatch)
    modest = generator.submit([1, 2], max_new_tokens=20, **LATE)
    gate.wait()
    demanding = generator.submit([1, 2], max_new_tokens=4, min_accuracy=50.0, **LATE)
    gate.free.release(100)
    assert set(demanding.result(60).subnets) == {2}
    subnets = modest.result(60).subnets
    assert (subnets[0], subnets[-1]) == (0, 0)
    assert generator.stats().lifted == subnets.count(2) > 0


def test_phases_switch_subnets_at_a_token_or_a_count(
    widths: list[SubnetSpec], make: Make, alone: Alone
) -> None:
    generator, running = make(), []
    for prompt in prompts(8):
        small = alone(prompt, (0,) * 3)
        end = small[-1]  # generated at the latest as the third
        at_token = [(end, widths[0]), (None, str(widths[2]))]
        at_count = [Phase(end, 0, tokens=2), Phase(subnets=[1, 2], recompute=True)]
        for phases, first in ((at_token, small.index(end) + 1), (at_count, min(small.index(end) + 1, 2))):
            completion = generator.submit(prompt, max_new_tokens=12, phases=phases, **LONG)
            running.append((prompt, first, phases is at_count, completion))
    for prompt, first, recomputed, completion in running:
        answer = completion.result(60)
        assert answer.subnets == (0,) * first + (2,) * (12 - first)
        tokens = alone(prompt, answer.subnets)
        if recomputed:  # the second subnet computed all of it again
            tokens = tokens[:first] + alone(prompt + tokens[:first], (2,) * (12 - first))
        assert (list(answer.tokens), answer.cache) == (tokens, "exact" if recomputed else "approximate")
    assert generator.stats().recomputed == 8


def test_a_phase_whose_cache_is_exact_answers_as_its_subnet_from_the_beginning(llama: Supernet) -> None:
    last = [llama.space.spec(depth=[1.0], ffn=[64, 64, width]) for width in (16, 64)]
    table = step_table([spec.key for spec in last], (40.0, 50.0))
    with Generator(llama, last, table, token_ms=1e6) as generator:
        for prompt in prompts(4):
            phases = [Phase(tokens=5, subnets=0), Phase(subnets=1, recompute=True)]
            answer = generator.submit(prompt, max_new_tokens=12, phases=phases).result(60)
            assert (answer.subnets, answer.cache) == ((0,) * 5 + (1,) * 7, "exact")
            plain: Any = llama.extract(last[1])
            given = [*prompt, *answer.tokens[:5]]
            expected = plain.generate(torch.tensor([given]), max_new_tokens=7, do_sample=False)
            assert list(answer.tokens[5:]) == expected[0, len(given) :].tolist()
        assert generator.stats().recomputed == 0, "there was nothing to compute again"


def test_a_step_that_fails_ends_its_requests_and_the_service_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = make()
    forward, failing = generator._loop._decoder.forward, [False]

    def broken(**kwargs: Any) -> Any:
        if failing[0]:
            raise RuntimeError("no memory")
        return forward(**kwargs)

    monkeypatch.setattr(generator._loop._decoder, "forward", broken)
    for failing[0] in (False, True, False):
        completion = generator.submit([1, 2], max_new_tokens=2, **LONG)
        if failing[0]:
            with pytest.raises(BatchFailed, match="RuntimeError: no memory"):
                completion.result(60)
        else:
            assert completion.result(60).met
    assert generator.stats().failed == 1


PROMPTS: list[tuple[Any, str]] = [
    *(([], "it is empty"), ("text", "got str"), (None, "got NoneType"), ([1] * 113, "more than 128")),
    *(([1, 97], "token 1 is 97"), ([-1], "token 0 is -1"), ([1.5], "token 0 is 1.5"), ([True], "token 0 is")),
    (torch.zeros(1, 3, dtype=torch.long), "token 0 is"),
]
WRONG: dict[str, list[Any]] = {
    "max_new_tokens": [0, 2.5],
    "ignore_eos": [1],
    "temperature": [-1.0],
    "top_k": [0],
    "top_p": [1.5, "all"],
    "stop": [["a"], 5, None],
    "logprobs": [21, -1, True],
    "first_ms": [0.0, -1.0, float("inf"), "soon"],
    "token_ms": [0.0, -1.0, float("inf"), float("nan")],
    "deadline_ms": [0.0, -1.0, float("inf"), -float("inf")],
    "min_accuracy": [float("nan"), ACCURACY[-1] + 1],
    "seed": [1.5, 2**64],
}
PHASES: list[tuple[Any, str]] = [
    *(([], "at least one Phase"), ("think", "at least one Phase"), ([3], r"phases\[0\]: expected a Phase")),
    ([Phase(subnets="ffn=12"), Phase()], "nothing ends it"),
    ([Phase(end=3, subnets="ffn=12"), Phase()], "ffn=12 is no subnet of this generator"),
    ([Phase(subnets=3)], "3 is no subnet of this generator; give an index from 0 to 2"),
    ([Phase(subnets=[])], "the list is empty"),
    ([Phase(end=97), Phase()], r"phases\[0\]\.end: 97 must be a whole number from 0 to 96"),
    ([Phase(tokens=0), Phase()], r"tokens: 0 must be a whole number of at least 1"),
    ([Phase(end=3)], "the last phase goes to the end of the answer"),
    ([Phase(end=3, recompute="yes"), Phase()], "is not True, False or None"),  # type: ignore[arg-type]
]
HARD = {"phases": [Phase(end=3, subnets=0), Phase()], "min_accuracy": 45.0}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *((prompt, {}, words) for prompt, words in PROMPTS),
    *(([1], {name: value}, name) for name, values in WRONG.items() for value in values),
    *(([1], {"phases": phases}, words) for phases, words in PHASES),
    ([1], HARD, "none of its subnets has the minimum accuracy"),
    ([1], {"max_new_tokens": 3, "min_tokens": 4}, "min_tokens: 4 must be a whole number from 0 to 3"),
    ([1], {"deadline_ms": 5.0, "first_ms": 5.0}, "deadline_ms"),
]


def test_what_cannot_be_generated_is_refused_at_once(make: Make) -> None:
    generator = make()
    for prompt, options, words in REFUSED:
        with pytest.raises(InvalidRequest, match=words):
            generator.submit(prompt, **options)
    assert generator.stats().requests == 0


def test_too_many_requests_and_a_closed_generator_are_told(make: Make) -> None:
    generator = make(max_queue=3)
    running = [generator.submit([1, 2], max_new_tokens=100, **LONG) for _ in range(3)]
    with pytest.raises(QueueFull):
        generator.submit([1, 2])
    with pytest.raises(TimeoutError):
        running[0].result(0.0)
    generator.close(drain=False)
    for one in running:
        for end in (lambda one=one: one.result(60), lambda one=one: list(one)):
            with pytest.raises(BatcherClosed):
                end()
    with pytest.raises(BatcherClosed):
        generator.submit([1, 2])
    generator.close()
    finishing = make()
    last = finishing.submit([1, 2], max_new_tokens=5, **LONG)
    finishing.close()
    assert (last.done, last.result().finish) == (True, "length")


def test_what_is_no_generator_is_refused(
    llama: Supernet, widths: list[SubnetSpec], table: StepTable, make: Make
) -> None:
    with pytest.raises(CacheMismatch, match="allow_approximate=True"):
        Generator(llama, widths, table, token_ms=50.0)
    short = [llama.space.smallest(), widths[-1]]
    digits = new_digits_supernet().eval()
    specs, facts = digits.space.sample(0, 3), {"token_ms": 50.0, "allow_approximate": True}
    with pytest.raises(CacheMismatch, match="incompatible"):
        Generator(llama, short, step_table([spec.key for spec in short], (40.0, 50.0)), **facts)
    with pytest.raises(InsertError, match="no language model"):
        Generator(digits, specs, step_table([spec.key for spec in specs]), **facts)
    with pytest.raises(ProfileMismatch, match="other subnets"):
        make(table=step_table(["a", "b", "c"]))
    wrong = {"token_ms": 0.0, "max_sequences": 0, "max_queue": -1, "cache_tokens": 0, "step_tokens": None}
    for name, value in {**wrong, "expired": "defer", "watchdog_ms": 0.0, "clock_ms": 5.0}.items():
        with pytest.raises(PolicyError, match=name):
            make(**{name: value})


def test_measured_steps_make_a_table(llama: Supernet, widths: list[SubnetSpec]) -> None:
    cells: Any = {"sequences": [1, 2], "contexts": [8, 16], "prompt_tokens": [4, 8], "rounds": 1}
    specs = [widths[0], widths[-1]]
    table = profile_steps(llama, specs, **cells, accuracy=[40.0, 50.0], progress=False)
    assert (table.subnets, table.sequences) == ((widths[0].key, widths[-1].key), (1, 2))
    assert all(table.latencies_ms(2, 16, 8)[i] > 0.0 for i in range(2))
    assert table.prefill.stamp["machine"]["device"] == "cpu"


def test_an_event_loop_gets_tokens_and_results_and_is_woken_once_a_step(make: Make, alone: Alone) -> None:
    given, woken = prompts(6), list[str]()
    expected = [alone(prompt, (2,) * 9) for prompt in given]

    async def tokens(one: Completion) -> list[int]:
        return [token async for token in one]

    async def serve() -> list[list[int]]:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def counted(*arguments: Any, **facts: Any) -> Any:
            woken.append(threading.current_thread().name)
            return call(*arguments, **facts)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        async with make() as generator:
            running = [generator.submit(prompt, max_new_tokens=9, **LONG) for prompt in given]
            streamed = await asyncio.gather(*map(tokens, running))
            assert [list((await one).tokens) for one in running] == streamed
            hopeless = generator.submit(given[0], max_new_tokens=100, **LONG)
            generator.close(drain=False)
            with pytest.raises(BatcherClosed):
                await hopeless
            assert 0 < woken.count("subnetact-generator") <= sum(generator.stats().steps.values()) + 1
        return streamed

    assert asyncio.run(serve()) == expected


@pytest.mark.parametrize("several", [False, True])
def test_the_end_tokens_of_the_model_or_of_a_request_end_an_answer(
    llama: Supernet, make: Make, alone: Alone, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    (prompt,) = prompts(1)
    tokens = alone(prompt, (2,) * 12)
    end = tokens[4]
    first = tokens.index(end) + 1
    completion = make().submit(prompt, max_new_tokens=12, stop=[end], **LONG)
    assert (list(completion), completion.result().finish) == (tokens[:first], "stop")
    config: Any = llama.network.generation_config
    monkeypatch.setattr(config, "eos_token_id", [96, end] if several else end)
    generator = make()
    asked: list[dict[str, Any]] = [{}, {"ignore_eos": True}, {"min_tokens": 12}]
    asked.append({"phases": [Phase(end=end), Phase()]})
    found = [generator.submit(prompt, max_new_tokens=12, **one, **LONG).result(60) for one in asked]
    assert [one.tokens for one in found] == [tuple(tokens[:first]), *[tuple(tokens)] * 3]
    assert [one.finish for one in found[:2]] == ["stop", "length"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_is_told_that_the_generator_stayed_behind(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = make()
    gate = Gate(generator, monkeypatch)
    under_way = generator.submit([1, 2], max_new_tokens=4, **LONG)
    gate.wait()
    with generator._lock:  # the child inherits a lock that nobody there releases
        child = os.fork()
        if child == 0:
            told = 0
            try:
                signal.alarm(60)
                for use in (lambda: generator.submit([1], **LONG), under_way.result):
                    try:
                        use()
                    except BatcherClosed as error:
                        told += "forked" in str(error)
                told += not generator.stats().up
                generator.close()
            finally:
                os._exit(told)
    gate.free.release(10)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert len(under_way.result(60).tokens) == 4
