"""Mixtures of experts: experts per token, pools and neurons of experts as axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_mixtures import restated, tiny_mixture
from torch import Tensor

from subnetact import describe, insert_, reorder_
from subnetact.errors import FileFormatError, InsertError
from subnetact.insertion.description import Description
from subnetact.insertion.hugging_face import as_pretrained
from subnetact.operators import ElasticAttribute
from subnetact.space import Axis, SubnetSpace
from subnetact.supernet.supernet import Supernet

AXES = ("ffn", "pool", "experts")
FAMILIES = {
    "mixtral": {"ffn": 3, "pool": 3, "experts": 3},  # the block keeps the number as well
    "qwen2_moe": {"ffn": 6, "pool": 3, "experts": 3},  # a shared expert
    "gpt_oss": {"ffn": 3, "pool": 3, "experts": 3},  # gates and values alternate, with biases
    "deepseek_v3": {"ffn": 5, "pool": 2, "experts": 2},  # groups of experts
    "minimax_m2": {"ffn": 3, "pool": 3, "experts": 3},  # a buffer beside the router
    "jetmoe": {"ffn": 3, "pool": 3, "experts": 3},  # attention has experts, too
    "llama4_text": {"ffn": 6, "pool": 3, "experts": 3},  # the router is a linear layer
    "gemma4_text": {"ffn": 6, "pool": 3, "experts": 3},  # only a configuration says the number
    "openai_privacy_filter": {"ffn": 3, "pool": 3, "experts": 3},  # the number has the name of another
}


def run(model: Any, x: Any) -> Tensor:
    with torch.no_grad():
        return next(t for t in model(**x).values() if isinstance(t, Tensor))


def subnet(supernet: Supernet, **changed: Any) -> Any:
    """Return the largest specification with other choices of an axis, in all slots or in some."""
    values = {axis.name: [slot.choices[-1] for slot in axis.slots] for axis in supernet.space.axes}
    for axis, choice in changed.items():
        places = choice if isinstance(choice, dict) else dict.fromkeys(range(len(values[axis])), choice)
        for place, chosen in places.items():
            values[axis][place] = chosen
    return supernet.space.spec(**values)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_number_of_experts_equals_the_model_configured_with_it(kind: str) -> None:
    model, x = tiny_mixture(kind)
    configured = {number: run(restated(model, 4, number), x) for number in range(1, 5)}
    supernet = insert_(model, example=x, axes=AXES)
    assert {axis.name: len(axis.slots) for axis in supernet.space.axes} == FAMILIES[kind]
    for number, expected in configured.items():
        found = run(supernet.subnet(subnet(supernet, experts=number)), x)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert not torch.allclose(configured[1], configured[4], atol=1e-3)


def test_a_pool_computes_what_the_model_does_if_the_router_avoids_the_other_experts() -> None:
    model, x = tiny_mixture("gpt_oss")
    supernet = insert_(model, example=x, axes=AXES, choices={"pool": [4, 8]})
    found = run(supernet.subnet(subnet(supernet, pool=4)), x)
    with torch.no_grad():
        for name, parameter in supernet.network.named_parameters():
            if name.endswith("router.bias"):
                parameter[4:] = -torch.inf
            elif "experts" in name:
                parameter[4:] = 100.0
    torch.testing.assert_close(found, run(supernet.subnet(subnet(supernet)), x), rtol=0, atol=5e-5)


def test_a_pool_of_a_router_of_groups_keeps_whole_groups() -> None:
    model, x = tiny_mixture("deepseek_v3", n_group=4, topk_group=2)
    smaller, _ = tiny_mixture("deepseek_v3", n_group=3, topk_group=2, n_routed_experts=6)
    weights = model.state_dict()
    smaller.load_state_dict(
        {n: weights[n][tuple(map(slice, t.shape))] for n, t in smaller.state_dict().items()}
    )
    expected, full = run(smaller, x), run(model, x)
    supernet = insert_(model, example=x, axes=("pool", "experts"), choices={"pool": [2, 3, 4]})
    spec = subnet(supernet, pool=3)
    assert torch.equal(run(supernet.subnet(spec), x), expected)
    assert supernet.space.format(spec) == {i: {"num_local_experts": 6, "n_group": 3} for i in (1, 2)}
    assert list(reorder_(supernet, example=x).reordered.values()) == [4, 4]
    torch.testing.assert_close(run(supernet.subnet(subnet(supernet)), x), full, rtol=0, atol=5e-5)
    description: Any = supernet.description
    with pytest.raises(InsertError, match="1 is not a choice; choose sizes from 2 to 4 groups of experts"):
        description.with_choices("pool", [1, 4])


def test_the_neurons_of_each_expert_are_sorted_by_importance_and_the_largest_stays() -> None:
    model, x = tiny_mixture("mixtral")
    expected = run(model, x)
    supernet = insert_(model, example=x, axes=AXES)
    report = reorder_(supernet, example=x)
    assert len(report.reordered) == 6
    assert not report.kept
    torch.testing.assert_close(run(supernet.subnet(subnet(supernet)), x), expected, rtol=0, atol=5e-5)
    experts = supernet.network.get_submodule("model.layers.0.mlp.experts")
    up, down = experts._parameters["gate_up_proj"], experts._parameters["down_proj"]
    assert up is not None
    assert down is not None
    scores = up.abs().sum(2).view(8, 2, -1).sum(1) + down.abs().sum(1)
    assert bool((scores.diff(dim=1) <= 1e-4).all())


def test_layers_are_named_as_transformers_does() -> None:
    model, x = tiny_mixture("qwen3_moe")
    space = describe(model, x, axes=AXES).space
    values = {axis.name: [slot.choices[-1] for slot in axis.slots] for axis in space.axes}
    values["experts"][0], values["pool"][1], values["ffn"][2] = 1, 0.5, 0.5
    spec = space.spec(**values)
    stated = {
        0: {"num_experts_per_tok": 1}, 1: {"num_local_experts": 4}, 2: {"moe_intermediate_size": 24}
    }  # fmt: skip
    assert space.format(spec) == stated
    assert space.parse(stated) == spec


def test_numbers_that_do_not_fit_are_refused_before_anything_runs() -> None:
    model, x = tiny_mixture("deepseek_v3")
    description = describe(model, x, axes=("experts",))
    assert [list(slot.sizes.values()) for slot in description.slots.values()] == [[1, 2, 3, 4]] * 2
    for wrong in (0, 5):
        with pytest.raises(InsertError, match=rf"{wrong} is not a choice; choose sizes from 1 to 4"):
            description.with_choices("experts", [wrong, 4])
    model, x = tiny_mixture("mixtral")
    description = describe(model, x, axes=("pool",))
    with pytest.raises(InsertError, match="3 is not a choice; choose sizes from 4 to 8"):
        description.with_choices("pool", [3, 8])
    smaller = description.to_json().replace('"0.5": 4', '"0.5": 3')
    with pytest.raises(FileFormatError, match="3 is no size; choose from 4 to 8"):
        Description.from_json(smaller)
    space = SubnetSpace("by hand", [Axis.uniform("k", ["all"], [1, 9])], lambda v: {"k": v["k"][0]})
    gate = {"model.layers.0.mlp.gate": ElasticAttribute.on(top_k="k")}
    with pytest.raises(InsertError, match="the largest subnet has 9 at k"):
        insert_(model, space, gate)


@pytest.mark.filterwarnings("ignore::subnetact.errors.UnprovedInputWarning")  # of the labels
@pytest.mark.parametrize("changed", [{"experts": 1}, {"pool": 0.5}, {"experts": {0: 1}, "ffn": 0.5}])
def test_the_balancing_loss_and_a_model_of_its_own_have_the_numbers_of_the_subnet(changed: Any) -> None:
    model, x = tiny_mixture("qwen3_moe")
    supernet = insert_(model, example=x, axes=AXES, choices={"pool": [0.5, 1.0], "ffn": [0.5, 1.0]})
    spec = subnet(supernet, **changed)
    x |= {"labels": x["input_ids"], "output_router_logits": True}
    alone: Any = as_pretrained(supernet.extract(spec), x)
    expected = alone(**x)
    found = supernet.subnet(spec)(**x), supernet.train()(**x, subnet=spec)
    for output in found:
        torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=5e-5)
        torch.testing.assert_close(output.aux_loss, expected.aux_loss)
    assert not hasattr(supernet.remove(), "_numbers_of_layers")


def test_a_number_that_nothing_reads_is_refused() -> None:
    model, x = tiny_mixture("phimoe")
    refused = describe(model, x, axes=AXES).refused
    assert "nothing reads the number" in refused["model.layers.0.mlp.experts"]


def test_neurons_that_torch_cannot_multiply_in_groups_are_refused_with_a_way_out() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()
    example = torch.arange(3, 9)[None]
    reasons = str(describe(model, example, axes=("heads", "ffn")))
    assert "multiple of 16 bytes" in reasons
    assert "set_experts_implementation('eager')" in reasons
    model.set_experts_implementation("eager")
    assert insert_(model, example=example, axes=("ffn",)).space.size() == 3
