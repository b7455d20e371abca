"""Gemma 3n: views equal what transformers builds from the sliced configuration; published slices."""

from __future__ import annotations

import copy
import csv
import io
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ofa_adapters
import subnetact
import subnetact.insertion
from ofa_adapters.networks.gemma3n import DIMS, SKIPPED
from subnetact.errors import (
    CacheMismatch,
    CheckpointError,
    IllegalChoice,
    InsertError,
    MissingExtra,
    SpecError,
)
from subnetact.insertion.key_value_cache import cache_relation, switch
from subnetact.operators import LayerSelect
from subnetact.space import Axis, SubnetSpace

transformers = pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "vocab_size": 60,
    "vocab_size_per_layer_input": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 10,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": [("full" if i % 3 == 2 else "sliding") + "_attention" for i in range(9)]
    + ["full_attention"],
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 4,
    "altup_num_inputs": 3,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.9] * 3 + [0.0] * 7,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}  # Layer 4 stores the keys and values of sliding attention, and layer 5 those of full attention.
TOKENS = torch.randint(2, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def randomised(network: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in network.named_parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator) + float("norm" in name))
    return network


def supernet_of(**changes: Any) -> subnetact.Supernet:
    supernet = ofa_adapters.load("gemma3n", config={**TINY, **changes}, widths=[8, 12, 24])
    randomised(supernet.network)
    return supernet


@pytest.fixture(scope="module")
def supernet() -> subnetact.Supernet:
    return supernet_of()


def sliced(network: Any, row: dict[str, list[int]], config: dict[str, Any]) -> nn.Module:
    """Return the model that transformers builds from the sliced configuration, sliced by hand."""
    skipped, count = row[SKIPPED], config["num_hidden_layers"]
    kept = [i for i in range(count) if i not in skipped]
    first = count - config["num_kv_shared_layers"]
    small = transformers.Gemma3nTextConfig(
        **{
            **config,
            "num_hidden_layers": len(kept),
            "intermediate_size": row[DIMS],
            "layer_types": [config["layer_types"][i] for i in kept],
            "activation_sparsity_pattern": [config["activation_sparsity_pattern"][i] for i in kept],
            "num_kv_shared_layers": sum(i >= first for i in kept),
        }
    )
    model = transformers.Gemma3nForCausalLM(small).eval()
    own, state = network.state_dict(), {}
    width = config["hidden_size_per_layer_input"]
    columns = torch.cat([torch.arange(i * width, (i + 1) * width) for i in kept])
    for name, wanted in model.state_dict().items():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(kept[int(parts[2])])
        tensor = own[".".join(parts)]
        if "embed_tokens_per_layer" in name:
            tensor = tensor[:, columns]
        elif "per_layer_model_projection" in name:
            tensor = tensor[columns]
        state[name] = tensor[tuple(slice(0, n) for n in wanted.shape)]
    model.load_state_dict(state)
    return model


def plain(network: Any) -> Any:
    """Return the full network as transformers builds it, with the weights of the supernet."""
    model = transformers.Gemma3nForCausalLM(copy.deepcopy(network.config)).eval()
    model.load_state_dict(network.state_dict())
    return model


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    return model(tokens, use_cache=False).logits  # type: ignore[no-any-return]


TOLERANCE = 5e-5
"""The most that two kernels may round differently, as a share of the largest logit."""


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected number."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


def test_random_subnets_equal_the_model_of_the_sliced_configuration(supernet: subnetact.Supernet) -> None:
    """A slice in the middle of a tensor and a copy of it are multiplied by kernels that round differently."""
    space, rng = supernet.space, random.Random(0)
    full = plain(supernet.network)
    assert torch.equal(logits(supernet.subnet(space.largest())), logits(full))
    for spec in (space.smallest(), *(space.sample(rng) for _ in range(7))):
        row = space.format(spec)
        model = sliced(full, row, TINY)
        expected = logits(model)
        assert distance(logits(supernet.subnet(spec)), expected) < TOLERANCE, str(spec)
        assert distance(logits(supernet.extract(spec)), expected) < TOLERANCE
        with torch.no_grad():  # One wrong row in one layer is far outside of the tolerance.
            up = model.model.layers[-1].mlp.up_proj.weight
            up[0] = up[1]
        assert distance(logits(model), expected) > 100 * TOLERANCE, str(spec)
        assert space.parse(row) == space.parse(json.loads(json.dumps(row))) == spec
        assert space.parse({DIMS: str(row[DIMS]), SKIPPED: str(row[SKIPPED])}) == spec
    again, options = pickle.loads(pickle.dumps(supernet)), {"max_new_tokens": 8, "do_sample": False}
    alone = sliced(full, row, TINY).generate(TOKENS, **options)
    assert again.subnet(spec).generate(TOKENS, **options).tolist() == alone.tolist()


@torch.no_grad()
def test_switching_every_token_in_the_tail_equals_running_alone(supernet: subnetact.Supernet) -> None:
    """Layer 5 is the last that writes a cache: what differs from its feed-forward network on is exact."""
    space, rng = supernet.space, random.Random(0)
    head = space.format(space.sample(7))
    base = space.parse(head)
    specs = []
    for _ in range(12):
        keep, ffn = list(base["keep"]), list(base["ffn"])
        for i in range(6, 10):
            keep[i] = rng.choice([0, 1])
        for i in range(5, 10):
            ffn[i] = rng.choice([8, 12, 24])
        specs.append(space.spec(keep=keep, ffn=[w or 24 for w in ffn]))
    assert {cache_relation(supernet, a, b) for a in specs for b in specs} == {"exact"}
    other = space.spec(keep=list(base["keep"]), ffn=[8 if w in (None, 12, 24) else 24 for w in base["ffn"]])
    assert cache_relation(supernet, base, other) == "approximate"
    output = supernet.subnet(specs[0])(TOKENS, use_cache=True)
    tokens, cache = TOKENS, output.past_key_values
    for spec in specs[1:]:
        tokens = torch.cat([tokens, output.logits[:, -1:].argmax(-1)], dim=1)
        output = switch(supernet, cache, spec)(tokens[:, -1:], past_key_values=cache)
        alone = logits(supernet.subnet(spec), tokens)[:, -1:]
        torch.testing.assert_close(output.logits, alone, rtol=5e-5, atol=5e-5)
        assert output.logits.argmax(-1).tolist() == alone.argmax(-1).tolist()
    with pytest.raises(CacheMismatch):
        switch(supernet, cache, other)
    view = supernet.subnet(other)
    cache.reset()
    view(tokens, past_key_values=cache)
    found = view(TOKENS[:, :1], past_key_values=cache).logits
    expected = logits(view, torch.cat([tokens, TOKENS[:, :1]], dim=1))[:, -1:]
    torch.testing.assert_close(found, expected, rtol=5e-5, atol=5e-5)


def test_layers_that_store_keys_and_values_cannot_be_skipped(supernet: subnetact.Supernet) -> None:
    space = supernet.space
    for layer in (4, 5):
        with pytest.raises(IllegalChoice, match=rf"layer {layer}, whose keys and values later layers read"):
            space.parse({DIMS: [24] * 9, SKIPPED: [layer]})
        keep = [int(i != layer) for i in range(10)]
        with pytest.raises(
            IllegalChoice, match=rf"keep\[{layer}\] \(layer {layer}, whose keys and values later"
        ):
            space.spec(keep=keep, ffn=24)
    axes = [Axis.uniform("keep", ["5"], [0, 1])]
    own = SubnetSpace("own", axes, lambda values: {"keep": values["keep"][0]})
    skipping = subnetact.insert_(
        plain(supernet.network), own, {"model.layers": LayerSelect.on(**{"5": "keep"})}
    )
    with pytest.raises(InsertError, match="keep=0 does not run"):
        skipping.check({"input_ids": TOKENS})


def test_a_description_keeps_layers_that_store_keys_and_values(supernet: subnetact.Supernet) -> None:
    network = plain(supernet.network)
    found = subnetact.describe(network, {"input_ids": TOKENS}, axes=("depth",), each_block=True, proof=False)
    assert {"model.layers.4.depth", "model.layers.5.depth"} <= set(found.refused)
    assert len(found.stages) == 7  # All but the first, and the two that store keys and values.


def test_a_subnet_is_saved_as_a_model_of_its_own(supernet: subnetact.Supernet, tmp_path: Path) -> None:
    spec = supernet.space.parse({DIMS: [8, 24, 12, 24, 8, 12, 24], SKIPPED: [2, 7, 8]})
    supernet.save_pretrained(tmp_path / "small", only=spec, example={"input_ids": TOKENS})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    assert loaded.config.intermediate_size == [8, 24, 12, 24, 8, 12, 24]
    assert (loaded.config.num_hidden_layers, loaded.config.num_kv_shared_layers) == (7, 2)
    assert distance(logits(loaded), logits(supernet.subnet(spec))) < TOLERANCE


def test_checkpoints_of_the_text_and_of_the_whole_model(supernet: subnetact.Supernet, tmp_path: Path) -> None:
    full = plain(supernet.network)
    full.save_pretrained(tmp_path / "text", max_shard_size="20KB")
    assert (tmp_path / "text" / "model.safetensors.index.json").exists()
    loaded = ofa_adapters.load("gemma3n", tmp_path / "text", widths=[8, 12, 24])
    assert torch.equal(logits(loaded.subnet(loaded.space.largest())), logits(full))
    assert loaded.space.id == supernet.space.id
    whole = {n.replace("model.", "model.language_model.", 1): t for n, t in full.state_dict().items()}
    del whole["lm_head.weight"]
    whole["model.vision_tower.x"] = whole["model.audio_tower.x"] = torch.zeros(1)
    whole["model.language_model.layers.9.self_attn.k_proj.weight"] = torch.zeros(8, 16)
    assert ofa_adapters.identify(whole) == "gemma3n"
    again = ofa_adapters.load("gemma3n", whole, config=TINY, dtype="bfloat16")
    assert again.network.model.norm.weight.dtype == torch.bfloat16
    (tmp_path / "text" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"config.json is of 'llama', not of gemma3n_text"):
        ofa_adapters.load("gemma3n", tmp_path / "text")
    index = tmp_path / "text" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"names not only \.safetensors files beside it"):
        ofa_adapters.checkpoint.read(tmp_path / "text")


PUBLISHED = """
Main model                      3.98 62.30% 0-34
Config for official E2B Model   1.91 50.90%
Config for E1.96B (layer-level) 1.96 53.40% 4
Config for E2.69B (layer-level) 2.69 57.70% 4 9 14 19-24
Config for E2.49B (block-level) 2.49 54.50% 20-24
Config for E3.79B (block-level) 3.74 62.00% 5-34
"""
"""Rows of google/gemma3n-slicing-configs: parameters in billions, MMLU, and the layers of full width.

The two slices with less than 2 billion parameters have 30 layers, without 20 to 24; the others have 35."""


def published(unit: int) -> str:
    """Return the published file for a model whose feed-forward networks have up to 8 units."""
    rows = ["name,# Layers,# Effective Params (B),MMLU PT accuracy,FFN Hidden Dims,Layers Skipped"]
    for line in PUBLISHED.strip().splitlines():
        name, params, accuracy, *ranges = line[:31].strip(), line[32:36], *line[37:].split()
        wide = {i for r in ranges for i in range(int(r.split("-")[0]), int(r.split("-")[-1]) + 1)}
        skipped = list(range(20, 25)) if float(params) < 2 else []
        dims = ", ".join(f"{unit:_} * {8 if i in wide else 4}" for i in range(35) if i not in skipped)
        rows.append(f'{name},{35 - len(skipped)},{params},{accuracy},"[{dims}]","{skipped or ""}"')
    return "\n".join(rows)


def test_the_published_rows_are_the_named_subnets_of_a_bundle(tmp_path: Path) -> None:
    """A row equals transformers' model of its sliced configuration; the full model has tiny layers here."""
    count, unit = 35, 2
    kinds = ["full_attention" if i % 5 == 4 else "sliding_attention" for i in range(count)]
    sizes = {"num_hidden_layers": count, "intermediate_size": 8 * unit, "num_kv_shared_layers": 15}
    sparse = [0.9] * 10 + [0.0] * 25
    config = {**TINY, **sizes, "layer_types": kinds, "activation_sparsity_pattern": sparse}
    supernet = ofa_adapters.load("gemma3n", config=config)
    randomised(supernet.network)
    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(published(unit)))}
    quality = {name: {"mmlu": float(row["MMLU PT accuracy"].rstrip("%"))} for name, row in rows.items()}
    supernet.save_pretrained(tmp_path / "bundle", subnets=rows, quality=quality, source="the published file")
    saved: Any = subnetact.from_pretrained(tmp_path / "bundle")
    assert len({*saved.card.subnets.values()}) == len(rows) == 6
    assert saved.card.subnets["Main model"] == saved.space.largest()
    name = "Config for E1.96B (layer-level)"
    stated = supernet.space.format(saved.card.subnets[name])
    assert (str(len(stated[DIMS])), stated[SKIPPED]) == (rows[name]["# Layers"], [20, 21, 22, 23, 24])
    expected = logits(sliced(plain(supernet.network), stated, config))
    assert distance(logits(saved.subnet(saved.card.subnets[name])), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({DIMS: [24] * 9}, SpecError, "FFN Hidden Dims has 9 numbers"),
        ({DIMS: [24] * 9, SKIPPED: [10]}, SpecError, "each of the layers 0 to 9 that are not skipped"),
        ({DIMS: [24] * 8, SKIPPED: [1, 1]}, SpecError, "every layer once"),
        ({DIMS: [25] * 10}, IllegalChoice, "25 is not a choice"),
        ({DIMS: "[24, __import__('os')]"}, SpecError, "expected a list of whole numbers"),
        ({DIMS: [24.0] * 10}, SpecError, "expected a list of whole numbers"),
        ({DIMS: None}, SpecError, "has 0 numbers"),
        ([1], SpecError, "expected a mapping of axes"),
    ],
)
def test_rows_that_are_no_subnet(
    supernet: subnetact.Supernet, row: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        supernet.space.parse(row)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {**TINY, "layer_types": ["sliding_attention"]}}, "no configuration of Gemma 3n"),
        ({"config": {**TINY, "intermediate_size": [24]}}, "no configuration of Gemma 3n"),
        ({"config": TINY, "widths": [25]}, "widths of layer 0 are whole numbers from 1 to 24"),
        ({"config": TINY, "widths": [[8]]}, "or one list per layer"),
        ({"config": TINY, "widths": 8}, "widths are a list of numbers"),
        ({"config": TINY, "dtype": "int8"}, "dtype: 'int8' is no floating-point dtype of torch"),
    ],
)
def test_constructor_arguments_that_fit_no_gemma_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ofa_adapters.load("gemma3n", **arguments)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'subnetact\[hf\]'"):
        ofa_adapters.load("gemma3n", config=TINY)
    assert ofa_adapters.language_models() == ("gemma3n", "nemotron_elastic")
