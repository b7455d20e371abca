"""Subnets of many kinds of models in the pages of continuous batching: who may continue on whose pages."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from generation_tables import step_table
from held_steps import Gate, steer
from small_decoders import SIZES, randomize_, small_decoder

import ofa_adapters
from subnetact import SubnetSpec, Supernet, insert_
from subnetact.errors import CacheMismatch, InvalidRequest, PolicyError
from subnetact.generation import Generator, Phase, profile_steps
from subnetact.insertion.key_value_cache import cache_relation, switch

pytest.importorskip("transformers")
LONG = {"first_ms": 60_000.0, "token_ms": 60_000.0}
LAST = SIZES["num_hidden_layers"] - 1
TYPES = ["sliding_attention", "full_attention"] * 3
SLIDING = {"sliding_window": 4, "layer_types": TYPES}
GEMMA3N = {
    **SIZES,
    **SLIDING,
    "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": 50,
    "hidden_size_per_layer_input": 4,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.9] * 2 + [0.0] * 4,
}
"""Layers 1 and 2 store the keys and values that layers 3, 4 and 5 share."""


def decoder(config: str, **settings: Any) -> Supernet:
    choices = {"depth": (0, 1), "ffn": (8, 24), "heads": (1, 2)}
    tokens = {"input_ids": torch.arange(2, 10).view(1, 8)}
    model = small_decoder(config, **settings)
    return insert_(model, example=tokens, axes=tuple(choices), choices=choices, each_block=True)


def gemma3n() -> Supernet:
    supernet = ofa_adapters.load("gemma3n", config=GEMMA3N, widths=[8, 24])
    randomize_(supernet.network)
    return supernet


KINDS: dict[str, Callable[[], Supernet]] = {
    "qwen3": lambda: decoder("Qwen3Config"),
    "gemma3": lambda: decoder("Gemma3TextConfig", **SLIDING),
    "gemma3n": gemma3n,
}


@cache
def kind_of(kind: str) -> Supernet:
    """Return a supernet of a kind, which no test changes."""
    supernet = KINDS[kind]()
    gc.collect()
    gc.freeze()  # as for the Llama of all modules
    return supernet


@pytest.fixture(scope="module")
def supernet() -> Supernet:
    return kind_of("qwen3")


def changed(supernet: Supernet, **changes: tuple[int, int]) -> SubnetSpec:
    """Return the largest subnet with other choices: axis=(slot, choice)."""
    values = {axis.name: [slot.choices[-1] for slot in axis.slots] for axis in supernet.space.axes}
    for axis, (slot, choice) in changes.items():
        values[axis][slot] = choice
    return supernet.space.spec(**values)


def generator_of(supernet: Supernet, specs: list[SubnetSpec], **options: Any) -> Generator:
    accuracy = tuple(40.0 + i for i in range(len(specs)))
    table = step_table([spec.key for spec in specs], accuracy)
    generator = Generator(supernet, specs, table, token_ms=50.0, **options)
    steer(generator._scheduler.policy, partial(random.Random(0).randrange, len(specs)))
    return generator


@torch.inference_mode()
def from_scratch(
    supernet: Supernet, specs: list[SubnetSpec], prompt: list[int], subnets: tuple[int, ...]
) -> list[int]:
    """Return the tokens if the subnet of every token computes the whole sequence itself."""
    tokens = list(prompt)
    for subnet in subnets:
        logits = supernet.subnet(specs[subnet])(torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def exact_subnets(kind: str, supernet: Supernet) -> list[SubnetSpec]:
    if kind != "gemma3n":
        return [changed(supernet, ffn=(LAST, 8)), supernet.space.largest()]
    spec = supernet.space.spec
    return [
        spec(keep=[1, 1, 1, 1, 1, 0], ffn=[24, 24, 24, 8, 24, 8]),
        spec(keep=[1, 1, 1, 0, 0, 1], ffn=[24, 24, 8, 24, 8, 24]),
        spec(keep=[1] * 6, ffn=24),
    ]


@pytest.mark.parametrize(("kind", "cache_tokens"), [("qwen3", 64), ("gemma3", 16_384), ("gemma3n", 96)])
def test_exact_subnets_switch_as_if_each_ran_from_scratch(kind: str, cache_tokens: int) -> None:
    """Eight places, sequences that join, leave and are pushed out of small caches, and prompts in parts."""
    supernet = kind_of(kind)
    specs = exact_subnets(kind, supernet)
    assert {cache_relation(supernet, a, b) for a in specs for b in specs} == {"exact"}
    rng, running, used = random.Random(1), [], set()
    options = {"max_sequences": 8, "step_tokens": 24, "cache_tokens": cache_tokens}
    with generator_of(supernet, specs, **options) as generator:
        for i in range(12):
            prompt = [rng.randrange(2, 50) for _ in range(3 + 5 * (i % 4))]
            running.append((prompt, generator.submit(prompt, max_new_tokens=4 + 3 * (i % 5), **LONG)))
            if i % 3 == 2:
                next(iter(running[i - 2][1]))  # the next ones join when this one is under way
        for prompt, completion in running:
            answer = completion.result(60)
            assert list(answer.tokens) == from_scratch(supernet, specs, prompt, answer.subnets)
            used.update(answer.subnets)
    assert used == set(range(len(specs)))


def test_subnets_with_fewer_heads_and_layers_generate_what_transformers_does(supernet: Supernet) -> None:
    for change in ({"heads": (1, 1)}, {"depth": (2, 0)}, {"heads": (4, 1), "depth": (0, 0)}):
        spec = changed(supernet, **change)
        plain: Any = supernet.extract(spec)
        with generator_of(supernet, [spec]) as generator:
            for prompt in ([5, 6, 7], list(range(2, 25))):
                expected = plain.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)
                answer = generator.submit(prompt, max_new_tokens=9, **LONG).result(60)
                assert list(answer.tokens) == expected[0, len(prompt) :].tolist()


def test_pages_belong_to_one_supernet(supernet: Supernet) -> None:
    other, largest = kind_of("gemma3"), supernet.space.largest()
    with generator_of(supernet, [largest]) as generator:
        pages = generator._loop.batch_processor.cache
        switch(supernet, pages, largest)
        with pytest.raises(CacheMismatch, match="give the subnets of every supernet a cache of their own"):
            switch(other, pages, other.space.largest(), allow_approximate=True)


def test_a_phase_of_an_incompatible_subnet_answers_as_that_subnet_from_the_beginning(
    supernet: Supernet,
) -> None:
    specs = [changed(supernet, heads=(1, 1)), changed(supernet, depth=(2, 0)), supernet.space.largest()]
    cells: Any = {"sequences": [2], "contexts": [8], "prompt_tokens": [4], "rounds": 1}
    measured = profile_steps(supernet, specs, **cells, accuracy=[40.0, 45.0, 50.0])
    with pytest.raises(CacheMismatch, match="allow_recompute=True"):
        Generator(supernet, specs, measured, token_ms=1e6)
    with Generator(supernet, specs, measured, token_ms=1e6, allow_recompute=True) as generator:
        running = []
        for i in range(5):
            prompt, first, second = [3, 5 + i, 7, 9], i % 3, (i + 1) % 3
            phases = [Phase(tokens=4, subnets=first), Phase(subnets=specs[second])]
            completion = generator.submit(prompt, max_new_tokens=9, phases=phases)
            running.append((prompt, (first,) * 4 + (second,) * 5, completion))
        plain = generator.submit([3, 10, 7, 9], max_new_tokens=5)
        for prompt, subnets, completion in running:
            answer = completion.result(60)
            assert (answer.subnets, answer.cache) == (subnets, "exact")
            assert list(answer.tokens) == from_scratch(supernet, specs, prompt, subnets)
        assert plain.result(60).subnets == (2,) * 5, "without phases: subnets of one cache"
        assert generator.stats().recomputed == 5
        several: Any = [(None, 0, 2), (None, 2, None, False)], [Phase(subnets=[0, 2])]
        words = r"phases\[1\]: its subnets cannot continue on the cache", r"phases\[0\]\.subnets: they cannot"
        for phases, match in zip(several, words, strict=True):
            with pytest.raises(InvalidRequest, match=match):
                generator.submit([3], max_new_tokens=4, phases=phases)


def test_a_sequence_that_was_pushed_out_goes_on_when_all_others_are_cancelled(
    supernet: Supernet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with generator_of(supernet, [supernet.space.largest()], cache_tokens=64) as generator:
        gate, steps = Gate(generator, monkeypatch), 1
        asked = [generator.submit([3] * 12, max_new_tokens=30, **LONG) for _ in range(3)]
        processor: Any = generator._loop.batch_processor
        gate.wait(steps)
        while not processor.scheduler.block_new_requests:
            gate.free.release()
            steps += 1
            gate.wait(steps)
        active = len(processor.scheduler.active_requests)
        assert active < 3
        for one in sorted(asked, key=lambda one: -len(one.tokens()))[:active]:
            one.cancel()
        gate.free.release(1000)
        ends = sorted(one.result(60).finish for one in asked)
        assert ends == ["cancelled"] * active + ["length"] * (3 - active)


def test_the_longest_request_fits_into_a_small_cache_of_several_kinds_of_attention() -> None:
    """The last layer of this Gemma 3 attends to everything."""
    types = [*TYPES[:4], "full_attention"]
    several = decoder("Gemma3TextConfig", num_hidden_layers=5, sliding_window=4, layer_types=types)
    specs = [several.space.largest()]
    with pytest.raises(PolicyError, match="cache_tokens: 1 tokens are too few"):
        generator_of(several, specs, cache_tokens=1)
    for cache_tokens in (40, 64):
        with generator_of(several, specs, cache_tokens=cache_tokens) as generator:
            longest = [3] * (generator.max_length - 5)
            running = [generator.submit(longest, max_new_tokens=5, **LONG) for _ in range(3)]
            assert [len(one.result(60).tokens) for one in running] == [5, 5, 5]
            assert generator.stats().failed == 0


def test_a_sequence_of_no_numbers_spoils_no_other_sequence_of_its_steps() -> None:
    """Token 49 has an embedding of NaN: whoever has read it is lost, and nobody else has to know."""
    supernet = decoder("LlamaConfig", tie_word_embeddings=False)
    supernet.network.get_input_embeddings().weight.data[49] = torch.nan
    specs = exact_subnets("llama", supernet)
    with generator_of(supernet, specs, max_sequences=4) as generator:
        lost = generator.submit([49, 3], max_new_tokens=12, **LONG)
        prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
        running = [generator.submit(prompt, max_new_tokens=8, **LONG) for prompt in prompts]
        for prompt, completion in zip(prompts, running, strict=True):
            answer = completion.result(60)
            assert list(answer.tokens) == from_scratch(supernet, specs, prompt, answer.subnets)
        assert len(lost.result(60).tokens) == 12
