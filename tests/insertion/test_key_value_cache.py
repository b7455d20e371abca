"""Which subnet may continue on the key-value cache of another one, and what happens if it may not."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from small_decoders import small_decoder
from torch import Tensor, nn

from subnetact import Axis, SubnetSpace, SubnetSpec, Supernet, describe, insert_
from subnetact.errors import CacheMismatch, CheckpointError, ForeignSpec, SpecError
from subnetact.insertion.key_value_cache import cache_relation, switch
from subnetact.operators import WeightSlice

transformers = pytest.importorskip("transformers")

SLIDING = {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
}
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma": ("GemmaConfig", {"num_key_value_heads": 1}),
    "gemma3": ("Gemma3TextConfig", SLIDING),
}
TOKENS = torch.randint(2, 50, (2, 11), generator=torch.Generator().manual_seed(0))


def supernet_of(kind: str, **settings: Any) -> Supernet:
    config, extra = KINDS[kind]
    model = small_decoder(config, **{"num_hidden_layers": 5, **extra, **settings})
    choices = {"depth": (0, 1), "ffn": (0.5, 1.0), "heads": (0.5, 1.0)}
    found = describe(
        model, {"input_ids": TOKENS}, axes=tuple(choices), choices=choices, each_block=True, proof=False
    )
    return insert_(model, found.space, found.elastic)


@pytest.fixture(scope="module")
def llama() -> Supernet:
    return supernet_of("llama")


def subnet(supernet: Supernet, **changes: tuple[int, float]) -> SubnetSpec:
    """Return the largest subnet with other choices: axis=(slot, choice)."""
    values = {axis.name: [slot.choices[-1] for slot in axis.slots] for axis in supernet.space.axes}
    for axis, (slot, choice) in changes.items():
        values[axis][slot] = choice
    return supernet.space.spec(**values)


def cache_of(network: nn.Module, tokens: Tensor = TOKENS) -> Any:
    return network(tokens, use_cache=True).past_key_values


def entries(cache: Any) -> list[Tensor]:
    return [t for layer in cache.layers for t in (layer.keys, layer.values)]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_relation_of_two_subnets_is_that_of_their_caches(kind: str) -> None:
    supernet = supernet_of(kind)
    space = supernet.space
    rng = random.Random(0)
    last = {axis.name: len(axis.slots) - 1 for axis in space.axes}
    pairs = [(space.sample(rng), space.sample(rng)) for _ in range(12)]
    for _ in range(12):  # Neighbours, which differ in one slot; random pairs are hardly ever exact.
        a = space.sample(rng)
        axis = rng.choice([axis for axis in space.axes if axis.name != "depth"])
        slot = rng.choice([rng.randrange(len(axis.slots)), last[axis.name]])
        values = {name: list(v) for name, v in a.values}
        values[axis.name][slot] = rng.choice(axis.slots[slot].choices)
        pairs.append((a, space.spec(**values)))
    seen = set()
    for a, b in pairs:
        relation = cache_relation(supernet, a, b)
        assert relation == cache_relation(supernet, b, a)
        seen.add(relation)
        left, right = (entries(cache_of(supernet.subnet(spec))) for spec in (a, b))
        shapes = [[t.shape for t in found] for found in (left, right)]
        if relation == "incompatible":
            assert shapes[0] != shapes[1], (str(a), str(b))
        else:
            assert shapes[0] == shapes[1]
            equal = all(torch.equal(x, y) for x, y in zip(left, right, strict=True))
            only_queries = kind == "gemma" and cache_relation(supernet, a, b) == "approximate"
            assert equal == (relation == "exact") or only_queries, (str(a), str(b))
    assert seen == {"exact", "approximate", "incompatible"}


class MlpFirst(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    """A layer whose keys and values depend on its own feed-forward network."""

    def forward(self, hidden_states: Tensor, past_key_values: Any = None, **given: Any) -> Tensor:
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        given["past_key_values"] = past_key_values
        return hidden_states + self.self_attn(self.input_layernorm(hidden_states), **given)[0]


class Unrunnable(transformers.LlamaForCausalLM):
    """A model that does not run on its own dummy inputs."""

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"input_ids": torch.full((1, 1), 10**6)}


@pytest.mark.parametrize("kind", ["another order", "no run"])
def test_what_is_not_seen_to_run_after_a_write_counts(kind: str) -> None:
    """The caches of subnets that differ in nothing but the last feed-forward network are then others."""
    model = small_decoder("LlamaConfig", num_hidden_layers=2)
    found = describe(model, {"input_ids": TOKENS}, axes=("ffn",), each_block=True, proof=False)
    if kind == "no run":
        model.__class__ = Unrunnable
    else:
        for layer in model.model.layers:
            layer.__class__ = MlpFirst
    supernet = insert_(model, found.space, found.elastic)
    large = supernet.space.largest()
    slot = len(supernet.space.axes[0].slots) - 1
    narrow = subnet(supernet, ffn=(slot, supernet.space.axes[0].slots[slot].choices[0]))
    assert cache_relation(supernet, large, narrow) == "approximate"
    if kind == "another order":
        left, right = (entries(cache_of(supernet.subnet(spec))) for spec in (large, narrow))
        assert not all(map(torch.equal, left, right))


def test_the_cache_of_another_precision_holds_other_numbers() -> None:
    supernet = supernet_of("llama")
    plain = supernet.space
    supernet.enable_precision("int8")
    space, large = supernet.space, supernet.space.at_precision(supernet.space.largest(), "float32")
    quantised = space.at_precision(large, "int8")
    relation = partial(cache_relation, supernet)
    assert relation(large, quantised) == relation(quantised, large) == "approximate"
    assert relation(quantised, quantised) == "exact"
    assert relation(large, plain.largest()) == "exact"
    cache = cache_of(supernet.subnet(large))
    with pytest.raises(CacheMismatch, match="allow_approximate=True"):
        switch(supernet, cache, quantised)


def test_networks_without_caches_have_no_relation() -> None:
    space = SubnetSpace("s", [Axis.uniform("w", ["1"], [2, 4])], lambda v: {"w": v["w"][0]})
    supernet = insert_(nn.Sequential(nn.Linear(3, 4)).eval(), space, {"0": WeightSlice.on(out="w")})
    small = supernet.space.smallest()
    for call in (lambda: cache_relation(supernet, small, small), lambda: switch(supernet, None, small)):
        with pytest.raises(SpecError, match="s: it is not known what a key-value cache depends on here"):
            call()


def test_specifications_of_other_spaces_are_refused(llama: Supernet) -> None:
    other = supernet_of("llama", num_hidden_layers=4)
    with pytest.raises(ForeignSpec):
        cache_relation(llama, llama.space.largest(), other.space.largest())
    cache = cache_of(other.subnet(other.space.largest()))
    with pytest.raises(CacheMismatch, match=r"another supernet \(LlamaForCausalLM-\w+; this one is of Llama"):
        switch(llama, cache, llama.space.largest())


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_switching_every_token_between_exact_subnets_changes_no_token(kind: str) -> None:
    """Every token is the one that its subnet gives if it runs from the beginning."""
    supernet = supernet_of(kind)
    end = {axis.name: len(axis.slots) - 1 for axis in supernet.space.axes}
    specs = [supernet.space.largest(), subnet(supernet, ffn=(end["ffn"], 0.5))]
    assert cache_relation(supernet, *specs) == "exact"
    output = supernet.subnet(specs[0])(TOKENS, use_cache=True)
    tokens, cache = TOKENS, output.past_key_values
    for step in range(8):
        tokens = torch.cat([tokens, output.logits[:, -1:].argmax(-1)], dim=1)
        view = switch(supernet, cache, specs[step % 2])
        output = view(tokens[:, -1:], past_key_values=cache)
        alone = supernet.subnet(specs[step % 2])(tokens, use_cache=False).logits[:, -1:]
        torch.testing.assert_close(output.logits, alone, rtol=5e-5, atol=5e-5)
        assert output.logits.argmax(-1).tolist() == alone.argmax(-1).tolist()
    others = supernet.subnet(specs[1 - step % 2])(tokens, use_cache=False).logits[:, -1:]
    assert (output.logits - others).abs().max() > 1e-3


@torch.no_grad()
def test_an_approximate_cache_has_to_be_accepted(llama: Supernet) -> None:
    large, small = llama.space.largest(), subnet(llama, ffn=(0, 0.5))
    cache = cache_of(llama.subnet(large))
    before = copy.deepcopy(entries(cache))
    for refused in (
        lambda: switch(llama, cache, small),
        lambda: llama.subnet(small)(TOKENS[:, :1], past_key_values=cache),
    ):
        with pytest.raises(
            CacheMismatch, match=r"whose keys and values are others .* allow_approximate=True"
        ):
            refused()
    assert all(map(torch.equal, entries(cache), before))
    view = switch(llama, cache, small, allow_approximate=True)
    for _ in range(2):
        assert view(TOKENS[:, :1], past_key_values=cache).logits.isfinite().all()
    for spec in (large, subnet(llama, ffn=(1, 0.5))):  # Now the cache is nobody's own.
        with pytest.raises(CacheMismatch, match="whose keys and values are others"):
            switch(llama, cache, spec)
    cache.crop(-2)
    with pytest.raises(CacheMismatch):  # Who wrote which position is not noted.
        switch(llama, cache, large)
    cache.crop(-11)
    switch(llama, cache, large)


@pytest.mark.parametrize("change", [{"depth": (1, 0)}, {"heads": (2, 0.5)}])
@torch.no_grad()
def test_an_incompatible_cache_is_never_used(llama: Supernet, change: dict[str, tuple[int, float]]) -> None:
    large, small = llama.space.largest(), subnet(llama, **change)
    for filled, next_one in ((large, small), (small, large)):
        cache = cache_of(llama.subnet(filled))
        with pytest.raises(CacheMismatch, match=r"model\.layers\.2: the key-value cache was"):
            switch(llama, cache, next_one, allow_approximate=True)
        llama.subnet(filled)(TOKENS[:, :1], past_key_values=cache)
        cache.reset()
        fresh = llama.subnet(next_one)(TOKENS, past_key_values=cache).logits
        expected = llama.subnet(next_one)(TOKENS, use_cache=False).logits
        torch.testing.assert_close(fresh, expected, rtol=5e-5, atol=5e-5)


@torch.no_grad()
def test_caches_of_unknown_origin_have_to_be_accepted(llama: Supernet) -> None:
    plain = transformers.AutoModelForCausalLM.from_config(llama.network.config).eval()
    cache, large = cache_of(plain), llama.space.largest()
    with pytest.raises(CacheMismatch, match="filled by a network that is no subnet of a supernet"):
        llama.subnet(large)(TOKENS[:, :1], past_key_values=cache)
    switch(llama, cache, large, allow_approximate=True)(TOKENS[:, :1], past_key_values=cache)
    with pytest.raises(CacheMismatch):
        switch(llama, cache, subnet(llama, ffn=(0, 0.5)))


@torch.no_grad()
def test_generation_copies_and_extracted_subnets_carry_the_note(llama: Supernet) -> None:
    large, small = llama.space.largest(), subnet(llama, ffn=(0, 0.5))
    view = llama.subnet(large)
    made = view.generate(TOKENS, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    cache = copy.deepcopy(made.past_key_values)
    with pytest.raises(CacheMismatch):
        switch(llama, cache, small)
    with pytest.raises(CacheMismatch):
        llama.extract(small)(TOKENS[:, :1], past_key_values=cache)
    own = llama.extract(large)(TOKENS[:, :1], past_key_values=cache).logits
    torch.testing.assert_close(
        own, view(TOKENS[:, :1], past_key_values=made.past_key_values).logits, rtol=5e-5, atol=5e-5
    )
    static = transformers.StaticCache(config=llama.network.config, max_cache_len=32)
    view(TOKENS, past_key_values=static)
    with pytest.raises(CacheMismatch):
        switch(llama, static, small)
    gc.collect()


@torch.no_grad()
def test_a_cache_belongs_to_the_weights_that_wrote_it() -> None:
    supernet, other = supernet_of("llama"), supernet_of("llama")
    large, token = supernet.space.largest(), TOKENS[:, :1]
    foreign = cache_of(supernet.subnet(large))
    for call in (
        lambda: other.subnet(large)(token, past_key_values=foreign),
        lambda: switch(other, foreign, large),
    ):
        with pytest.raises(CacheMismatch, match="of another supernet"):
            call()
    view, cache = supernet.subnet(large), cache_of(supernet.subnet(large))
    before = copy.deepcopy(cache)
    with pytest.raises(CheckpointError):
        supernet.load_state_dict({})
    view(token, past_key_values=cache)  # What failed to load changed nothing.
    supernet.load_state_dict(supernet.state_dict())
    view(token, past_key_values=cache)  # It keeps the former weights, with which it has begun.
    for change in (lambda: None, lambda: supernet.network.lm_head.weight.mul_(2), supernet.refresh):
        change()
        for kept in (cache, before):
            with pytest.raises(CacheMismatch, match="the weights have changed since"):
                supernet.subnet(large)(token, past_key_values=kept)
        before = cache_of(supernet.subnet(large))
        cache = copy.deepcopy(before)
        supernet.subnet(large)(token, past_key_values=copy.deepcopy(before))
    before.reset()
    again = supernet.subnet(large)
    again(TOKENS, past_key_values=before)
    expected = again(torch.cat([TOKENS, token], 1), use_cache=False).logits[:, -1]
    found = again(token, past_key_values=before).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    own: Any = supernet.extract(large)
    cache = cache_of(own)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(own)))
    supernet.subnet(large)(token, past_key_values=copy.deepcopy(cache))
    own.lm_head.weight.mul_(2)
    with pytest.raises(CacheMismatch, match="weights have changed"):
        own(token, past_key_values=copy.deepcopy(cache))
    copied(token, past_key_values=cache)
