"""Nemotron Elastic: budgets equal transformers' class with the sliced weights, and Megatron's rules."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_state_spaces import NEMOTRON, TOKENS, first_heads, logits, narrowed, small_nemotron
from torch import Tensor, nn

import ofa_adapters
import subnetact
from subnetact.errors import CheckpointError, SpecError
from subnetact.supernet.supernet import Supernet

transformers = pytest.importorskip("transformers")

BUDGETS: dict[str, dict[str, Any]] = {
    "half": {
        "hidden_size": 16,
        "mamba_num_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "moe_shared_expert_intermediate_size": 14,
    },
    "more": {"hidden_size": 24, "mamba_num_heads": 6, "moe_intermediate_size": 16},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return small_nemotron()


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nemotron")
    model.save_pretrained(path)  # the experts one by one, and `backbone` in place of `model`
    (path / "budgets.json").write_text(json.dumps(BUDGETS))
    return path


@pytest.fixture(scope="module")
def supernet(directory: Path) -> Supernet:
    return ofa_adapters.load("nemotron_elastic", directory)


def upstream(model: Any, budget: dict[str, Any]) -> Any:
    """Return transformers' class with the sizes of a budget, and the sliced weights."""
    pairs = budget.get("num_key_value_heads", 2)
    return narrowed(model, small_nemotron(**budget, num_attention_heads=2 * pairs))


def masked(model: Any, budget: dict[str, Any]) -> nn.Module:
    """Return the full network with the masks of Megatron's hooks, and their rules for norms."""
    network: Any = copy.deepcopy(model)
    full = {name: NEMOTRON[name] for name in BUDGETS["half"]} | budget
    p, ph = full["hidden_size"] / NEMOTRON["hidden_size"], full["mamba_num_heads"] / 8

    def mask(*kept: Any) -> Any:
        """Return a hook that keeps some entries of the last axis of an output."""

        def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            keep = torch.zeros(output.shape[-1])
            keep[[i for part in kept for i in part]] = 1
            return output * keep

        return hook

    def norm_rule(norm: Any, share: float) -> None:
        norm.variance_epsilon *= share
        norm.register_forward_hook(lambda _, __, output: output * share**0.5)

    channels = range(full["hidden_size"])
    network.model.embeddings.register_forward_hook(mask(channels))
    norm_rule(network.model.norm_f, p)
    for layer in network.model.layers:
        norm_rule(layer.norm, p)
        mixer, kind = layer.mixer, layer.block_type
        if kind == "linear_attention":
            inner = mixer.intermediate_size
            heads = first_heads(2, 8, full["mamba_num_heads"], 1)
            kept = first_heads(2, 8, full["mamba_num_heads"], mixer.head_dim)
            shared, rest = range(inner, mixer.conv_dim), inner + mixer.conv_dim
            rows = [*kept, *(inner + i for i in kept), *(inner + i for i in shared)]
            mixer.in_proj.register_forward_hook(mask(rows, [rest + head for head in heads]))
            dropped = [i for i in range(inner) if i not in kept]
            with torch.no_grad():  # transformers does not call the convolution, whose output is masked
                mixer.conv1d.weight[dropped] = 0
                mixer.conv1d.bias[dropped] = 0
            norm_rule(mixer.norm, ph)
            mixer.out_proj.register_forward_hook(mask(channels))
        elif kind == "full_attention":
            queries = full["num_key_value_heads"] * 16
            keep = (torch.arange(32) < queries).float()
            mixer.o_proj.register_forward_pre_hook(lambda _, args, keep=keep: (args[0] * keep,))
            mixer.o_proj.register_forward_hook(mask(channels))
        elif kind == "mlp":
            mixer.up_proj.register_forward_hook(mask(range(full["intermediate_size"])))
            mixer.down_proj.register_forward_hook(mask(channels))
        else:
            with torch.no_grad():
                mixer.experts.up_proj[:, full["moe_intermediate_size"] :] = 0
            size = full["moe_shared_expert_intermediate_size"]
            mixer.shared_experts.up_proj.register_forward_hook(mask(range(size)))
            mixer.register_forward_hook(mask(channels))
    return network


@pytest.mark.parametrize("name", ["full", *BUDGETS])
def test_budget_equals_its_class_and_the_masked_network(name: str, supernet: Supernet, model: Any) -> None:
    budget = BUDGETS.get(name, {})
    spec = supernet.space.parse(name)
    assert supernet.space.parse(budget or supernet.space.format(spec)) == spec
    expected, by_masks = logits(upstream(model, budget)), logits(masked(model, budget))
    torch.testing.assert_close(by_masks, expected, rtol=1e-5, atol=1e-5)
    for found in (supernet.subnet(spec), supernet.extract(spec)):
        torch.testing.assert_close(logits(found), expected, rtol=1e-5, atol=1e-5)


def test_only_heads_per_group_are_copied(supernet: Supernet) -> None:
    def places(network: nn.Module) -> dict[str, int]:
        return {n: t.untyped_storage().data_ptr() for n, t in network.state_dict(keep_vars=True).items()}

    own = set(places(supernet.network).values())
    for name in ("full", *BUDGETS):
        view = places(supernet.subnet(supernet.space.parse(name)))
        copied = {key for key, place in view.items() if place not in own}
        mixers = {key for key in view if ".layers.0.mixer." in key or ".layers.4.mixer." in key}
        assert not copied if name == "full" else copied == mixers


def test_layers_may_differ(supernet: Supernet, model: Any) -> None:
    loaded = ofa_adapters.load(
        "nemotron_elastic",
        dict(model.state_dict()),
        config=NEMOTRON,
        budgets={"a": {"mamba_num_heads": [4, 8]}},
    )
    spec = loaded.space.parse("a")
    assert loaded.space.format(spec)["mamba_num_heads"] == [4, 8]
    first, second = (loaded.subnet(spec).get_submodule(f"model.layers.{i}.mixer") for i in (0, 4))
    assert (first.num_heads, second.num_heads) == (4, 8)
    loaded.check(TOKENS)


def test_directory_is_what_transformers_loads(directory: Path, supernet: Supernet) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory)
    torch.testing.assert_close(logits(supernet.subnet(supernet.space.parse("full"))), logits(loaded.eval()))


def test_budgets_are_the_named_subnets_of_a_bundle(supernet: Supernet, model: Any, tmp_path: Path) -> None:
    supernet.save_pretrained(tmp_path / "bundle")
    document = json.loads((tmp_path / "bundle" / "elastic.json").read_text())
    assert set(document["subnets"]) == {"full", *BUDGETS}
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bundle").eval()
    torch.testing.assert_close(logits(alone), logits(model), rtol=5e-5, atol=5e-5)
    for name, budget in {"full": {}, **BUDGETS}.items():
        found = logits(subnetact.from_pretrained(tmp_path / "bundle", subnet=name))
        torch.testing.assert_close(found, logits(upstream(model, budget)), rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"mamba_num_heads": 3}, "in steps of 2, because every group of the norm"),
        ({"hidden_size": 33}, "hidden_size is 1 to 32"),
        ({"mamba_num_heads": [4]}, "1 numbers for 2 layers"),
        ({"n_routed_experts": 2}, "n_routed_experts is 4 here"),
        ({"num_key_value_heads": 1, "num_attention_heads": 4}, "num_attention_heads is 2 here"),
        ({"width": 3}, "no size 'width'"),
        ({"hidden_size": True}, "got True"),
        (None, "give a mapping of sizes"),
    ],
)
def test_budgets_that_do_not_fit_are_refused(budget: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ofa_adapters.load("nemotron_elastic", config=NEMOTRON, budgets={"small": budget})


def test_checkpoints_of_another_layout_are_refused(
    directory: Path, supernet: Supernet, model: Any, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match="choose from full, half, more"):
        supernet.space.parse("third")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="'llama', not nemotron_h"):
        ofa_adapters.load("nemotron_elastic", tmp_path)
    weights = dict(model.state_dict())
    key = "model.layers.0.mixer.in_proj.weight"
    with pytest.raises(CheckpointError, match="of another shape"):
        ofa_adapters.load("nemotron_elastic", {**weights, key: weights[key][:-1]}, config=NEMOTRON)
    experts = {f"model.layers.3.mixer.experts.{i}.up_proj.weight": torch.zeros(24, 32) for i in (0, 2)}
    with pytest.raises(CheckpointError, match="experts are missing"):
        ofa_adapters.load("nemotron_elastic", {**weights, **experts}, config=NEMOTRON)
