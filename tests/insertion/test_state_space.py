"""Heads of Mamba-2 mixers: subnets equal their classes, made with fewer heads and the sliced weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_state_spaces import TOKENS, logits, narrowed, small_mamba, small_nemotron

from subnetact.errors import CacheMismatch, InsertError
from subnetact.generation import profile_steps
from subnetact.insertion.hugging_face import as_pretrained
from subnetact.insertion.insert import describe, insert_
from subnetact.insertion.key_value_cache import cache_relation, switch
from subnetact.operators import LayerNormSlice, Segments
from subnetact.space import Axis, SubnetSpace

transformers = pytest.importorskip("transformers")

EXAMPLE = {"input_ids": TOKENS, "use_cache": False}


def one(supernet: Any, axis: str) -> Any:
    """Return the subnet that is the smallest in one axis only."""
    return supernet.space.spec(
        **{
            a.name: [slot.choices[0 if a.name == axis else -1] for slot in a.slots]
            for a in supernet.space.axes
        }
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_nemotron_equals_its_class_with_fewer_heads(groups: int) -> None:
    model = small_nemotron(n_groups=groups)
    full = logits(model)
    narrow = narrowed(model, small_nemotron(n_groups=groups, mamba_num_heads=4))
    small = {"mamba_num_heads": 4, "hidden_size": 16, "intermediate_size": 24}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "moe_shared_expert_intermediate_size": 14}
    small |= {"moe_intermediate_size": 12}
    smallest = narrowed(model, small_nemotron(n_groups=groups, **small))
    supernet = insert_(model, example=EXAMPLE, axes=("stream", "ffn", "heads"), choices=(0.5, 1.0))
    torch.testing.assert_close(logits(supernet.subnet(supernet.space.largest())), full)
    slots = next(axis.slots for axis in supernet.space.axes if axis.name == "heads")
    heads = [1.0 if ".2." in slot.name else 0.5 for slot in slots]  # layer 2 is the attention
    spec = supernet.space.spec(stream=1.0, ffn=1.0, heads=heads)
    for chosen, other in ((spec, narrow), (supernet.space.smallest(), smallest)):
        for found in (supernet.subnet(chosen), supernet.extract(chosen)):
            torch.testing.assert_close(logits(found), logits(other), rtol=0, atol=5e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba_equals_its_class_with_fewer_heads(groups: int) -> None:
    model = small_mamba(n_groups=groups)
    other = narrowed(model, small_mamba(n_groups=groups, num_heads=4, expand=1))
    supernet = insert_(model, example=EXAMPLE, axes=("heads",), choices=(0.5, 1.0))
    torch.testing.assert_close(
        logits(supernet.subnet(supernet.space.smallest())), logits(other), rtol=0, atol=5e-5
    )


@pytest.mark.parametrize("name", ["nemotron", "mamba"])
def test_a_phase_answers_as_its_subnet_from_the_beginning(name: str) -> None:
    axes, cache_name = ("heads", "experts", "pool"), "past_key_values"
    if name == "mamba":
        axes, cache_name = ("heads",), "cache_params"
    model = small_nemotron() if name == "nemotron" else small_mamba()
    supernet = insert_(model, example=EXAMPLE, axes=axes, choices=(0.5, 1.0))
    answering = supernet.space.largest()

    def answered(view: Any, tokens: Any, **given: Any) -> Any:
        given |= {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 4, "do_sample": False}
        return view.generate(tokens, return_dict_in_generate=True, **given)

    for axis in axes:
        thinking = one(supernet, axis)
        relation = cache_relation(supernet, thinking, answering)
        assert relation == ("incompatible" if axis == "heads" else "approximate")
        thought = answered(supernet.subnet(thinking), TOKENS)
        tokens, cache = thought.sequences, thought.past_key_values
        with pytest.raises(CacheMismatch):
            answered(supernet.subnet(answering), tokens, **{cache_name: cache})
        if relation == "approximate":
            used = copy.deepcopy(cache)
            view = switch(supernet, used, answering, allow_approximate=True)
            assert answered(view, tokens, **{cache_name: used}).sequences.shape == (2, 15)
        with torch.no_grad():
            cache = supernet.subnet(answering)(tokens[:, :-1], use_cache=True)[cache_name]
        found = answered(supernet.subnet(answering), tokens, **{cache_name: cache}).sequences
        assert torch.equal(found, answered(supernet.subnet(answering), tokens).sequences)
    with pytest.raises(InsertError, match="no cache for linear_attention"):
        profile_steps(supernet, [answering])


def test_a_configuration_states_fewer_heads_of_both_kinds() -> None:
    supernet = insert_(small_nemotron(), example=EXAMPLE, axes=("heads",), choices=(0.5, 1.0))
    spec = supernet.space.smallest()
    alone: Any = as_pretrained(supernet.extract(spec), EXAMPLE)
    assert (alone.config.mamba_num_heads, alone.config.num_attention_heads) == (4, 2)
    torch.testing.assert_close(logits(alone), logits(supernet.subnet(spec)), rtol=0, atol=5e-5)


def test_sizes_that_break_groups_are_refused() -> None:
    description = describe(small_nemotron(), EXAMPLE, axes=("heads",), proof=False)
    with pytest.raises(InsertError, match="sizes from 1 to 4"):
        description.with_choices("model.layers.0.mixer.heads", [5])
    single = describe(small_nemotron(mamba_num_heads=2), EXAMPLE, axes=("ffn", "heads"), proof=False)
    assert "one head only" in single.refused["model.layers.0.mixer.heads"]
    space = SubnetSpace(
        "norm", [Axis.uniform("width", ["all"], (16, 32))], lambda v: {"width": v["width"][0]}
    )
    for features in ("width", Segments(("width", 24), (None, 8))):
        with pytest.raises(InsertError, match="groups of 16"):
            insert_(
                small_nemotron(), space, {"model.layers.0.mixer.norm": LayerNormSlice.on(features=features)}
            )


def test_skipped_state_space_leaves_the_cache_right() -> None:
    supernet = insert_(small_nemotron(), example=TOKENS, axes=("depth",), choices=(0.5, 1.0))
    view = supernet.subnet(supernet.space.smallest())
    with torch.no_grad():
        cache = view(TOKENS[:, :-1], use_cache=True).past_key_values
        found = view(TOKENS[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(found[:, -1], logits(view)[:, -1], rtol=1e-4, atol=5e-5)
