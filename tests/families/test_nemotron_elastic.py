"""Nemotron Elastic: budgets equal transformers' class with the sliced weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_state_spaces import NEMOTRON, TOKENS, logits, narrowed, small_nemotron
from torch import nn

import ofa_adapters
import subnetact
from subnetact.engine.stats import weight_bytes
from subnetact.errors import CheckpointError, SpecError
from subnetact.supernet.supernet import Supernet

transformers = pytest.importorskip("transformers")

BUDGETS: dict[str, dict[str, Any]] = {
    "half": {
        "hidden_size": 16,
        "mamba_num_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        "n_routed_experts": 3,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 12,
        "moe_shared_expert_intermediate_size": 14,
    },
    "more": {"hidden_size": 24, "mamba_num_heads": 6, "n_routed_experts": 4, "moe_intermediate_size": 16},
}


@pytest.fixture(scope="module")
def model() -> Any:
    network = small_nemotron(n_routed_experts=6)
    bias = network.model.layers[3].mixer.gate.e_score_correction_bias
    bias.copy_(torch.linspace(0.3, 0.0, 6))  # Without it, the choice of experts follows from the scores.
    return network


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
    sizes = {"n_routed_experts": 6, **budget, "num_attention_heads": 2 * pairs}
    return narrowed(model, small_nemotron(**sizes))


@pytest.mark.parametrize("name", ["full", *BUDGETS])
def test_a_budget_equals_its_class_with_the_sliced_weights(name: str, supernet: Supernet, model: Any) -> None:
    budget = BUDGETS.get(name, {})
    spec = supernet.space.parse(name)
    assert supernet.space.parse(budget or supernet.space.format(spec)) == spec
    expected = logits(upstream(model, budget))
    for found in (supernet.subnet(spec), supernet.extract(spec)):
        torch.testing.assert_close(logits(found), expected, rtol=1e-5, atol=1e-5)


def test_three_budgets_take_the_memory_of_one(model: Any) -> None:
    config = {**NEMOTRON, "hidden_size": 256, "mamba_head_dim": 64, "vocab_size": 1000}
    loaded = ofa_adapters.load("nemotron_elastic", config=config, budgets=BUDGETS)
    one = weight_bytes(loaded.network)
    views = nn.ModuleList(loaded.subnet(loaded.space.parse(name)) for name in ("full", *BUDGETS))
    assert one <= weight_bytes(views) <= 1.006 * one  # biases, norms and kernels of convolutions
    expected = [logits(view) for view in views]
    loaded.packs = True
    views = nn.ModuleList(loaded.subnet(loaded.space.parse(name)) for name in ("full", *BUDGETS))
    assert weight_bytes(views) > 1.05 * one
    for view, found in zip(views, expected, strict=True):
        torch.testing.assert_close(logits(view), found, rtol=1e-5, atol=1e-5)


def test_layers_may_differ(supernet: Supernet, model: Any) -> None:
    loaded = ofa_adapters.load(
        "nemotron_elastic",
        dict(model.state_dict()),
        config={**NEMOTRON, "n_routed_experts": 6},
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


def test_groups_of_experts_stay_whole() -> None:
    config = {**NEMOTRON, "n_routed_experts": 6, "n_group": 2, "topk_group": 1}
    loaded = ofa_adapters.load("nemotron_elastic", config=config, budgets={"a": {"n_routed_experts": 6}})
    assert "num_experts_per_tok" in loaded.space.format(loaded.space.largest())
    with pytest.raises(SpecError, match="n_routed_experts is 6 here, and no axis of this network"):
        ofa_adapters.load("nemotron_elastic", config=config, budgets={"a": {"n_routed_experts": 4}})


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
        ({"n_routed_experts": 1}, "n_routed_experts is 2 to 4; got 1"),
        ({"num_key_value_heads": 1, "num_attention_heads": 4}, "num_attention_heads is 2 here"),
        ({"width": 3}, "no size 'width'"),
        ({"hidden_size": True}, "got True"),
        (None, "give a mapping of sizes"),
    ],
)
def test_budgets_that_do_not_fit_are_refused(budget: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ofa_adapters.load("nemotron_elastic", config=NEMOTRON, budgets={"small": budget})


def test_checkpoints_of_another_layout(
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
