"""Subnets of language models go to and from `per_layer_config`, and equal the model that it describes."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subnetact
import subnetact.insertion
from subnetact.errors import IllegalChoice, InsertError, SpecError

transformers = pytest.importorskip("transformers")

SIZES = {
    **{"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4},
    **{"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
}
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "smollm": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {"num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {"sliding_window": 4}),
    "gemma3": ("Gemma3", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}),
}
TOKENS = {"input_ids": torch.randint(2, 50, (2, 9), generator=torch.Generator().manual_seed(0))}
CHOICES = {"depth": (0, 1), "ffn": (16, 24, 40), "heads": (1, 2, 3)}


def config_of(kind: str, **changes: Any) -> Any:
    name, extra = KINDS[kind]
    cls = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    return cls(**{**SIZES, **extra, **changes})


def model_of(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind)).eval()
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model


def supernet_of(model: nn.Module) -> subnetact.Supernet:
    choices = dict(CHOICES)
    if model.config.num_key_value_heads == 1:
        choices["heads"] = (2, 4, 6)
    return subnetact.insert_(model, example=TOKENS, axes=tuple(choices), choices=choices, each_block=True)


@pytest.fixture(scope="module")
def llama() -> subnetact.Supernet:
    return supernet_of(model_of("llama"))


def reference(original: nn.Module, kind: str, layers: Mapping[int, Mapping[str, Any]]) -> nn.Module:
    """Return the model that transformers' own classes build for a sliced configuration, sliced by hand."""
    kept = [i for i in range(4) if "skip" not in layers.get(i, {})]
    changes: dict[str, Any] = {"num_hidden_layers": len(kept)}
    types = getattr(original.config, "layer_types", None)
    if types:
        changes["layer_types"] = [types[i] for i in kept]
    config = config_of(kind, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    state = dict(original.state_dict())
    for new, old in enumerate(kept):
        own = copy.deepcopy(config)
        own.head_dim = SIZES["head_dim"]
        for field, value in layers.get(old, {}).items():
            setattr(own, field, value)
        model.model.layers[new] = type(model.model.layers[new])(own, new).eval()
        for name in [n for n in original.state_dict() if n.startswith(f"model.layers.{old}.")]:
            state[name.replace(f".{old}.", f".{new}.", 1)] = original.state_dict()[name]
    wanted = model.state_dict()
    prefix = {n: tuple(slice(0, length) for length in t.shape) for n, t in wanted.items()}
    model.load_state_dict({name: state[name][prefix[name]] for name in wanted})
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**TOKENS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_random_subnets_equal_the_model_of_the_sliced_configuration(kind: str) -> None:
    model = model_of(kind)
    original = copy.deepcopy(model)
    supernet = supernet_of(model)
    space = supernet.space
    torch.testing.assert_close(logits(supernet.subnet(space.largest())), logits(original), rtol=0, atol=0)
    rng = random.Random(0)
    skipping = 0
    for spec in (space.smallest(), *(space.sample(rng) for _ in range(11))):
        layers = space.format(spec)
        skipping += any("skip" in fields for fields in layers.values())
        expected = logits(reference(original, kind, layers))
        torch.testing.assert_close(logits(supernet.subnet(spec)), expected, rtol=5e-5, atol=5e-5)
        assert space.parse(layers) == spec
        assert space.parse(json.loads(json.dumps(layers))) == spec
        config = copy.deepcopy(original.config)
        config.per_layer_config = layers
        assert space.parse(config) == spec
        config.allow_global_per_layer_attribute_access = True  # Some check the global number of heads.
        assert space.parse(type(config).from_dict(config.to_dict())) == spec
    assert skipping > 3


@pytest.mark.parametrize("kind", ["smollm", "qwen2", "gemma3"])
def test_a_subnet_of_different_layers_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    original = copy.deepcopy(model)
    supernet = supernet_of(model)
    space = supernet.space
    spec = space.parse(
        {
            0: {"intermediate_size": 24},
            1: {"skip": ["mlp", "attention"]},
            2: {"num_attention_heads": 2, "num_key_value_heads": 1},
            3: {"intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
        }
    )
    built_of = config_of(kind)
    built_of.per_layer_config = space.format(spec)
    family = subnetact.insertion.heterogeneous(type(original))
    built = family(built_of).eval()
    built.load_state_dict(supernet.extract(spec).state_dict())
    small = subnetact.insertion.as_pretrained(supernet.extract(spec), TOKENS)
    expected = logits(reference(original, kind, space.format(spec)))
    for model in (small, built):
        torch.testing.assert_close(logits(model), expected, rtol=5e-5, atol=5e-5)
    assert subnetact.insertion.heterogeneous(family) is family
    built_of.per_layer_config = {1: {"skip": ["mlp"]}}
    with pytest.raises(InsertError, match=r"layer 1 skips \['mlp'\]"):
        family(built_of)
    small.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["num_hidden_layers"] == 3
    assert written["per_layer_config"] == {
        "0": {"intermediate_size": 24},
        "1": {"num_attention_heads": 2, "num_key_value_heads": 1},
        "2": {"intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
    }
    assert written["architectures"] == [type(original).__name__]
    loaded = family.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(loaded), logits(small), rtol=0, atol=1e-6)
    made = loaded.generate(**TOKENS, max_new_tokens=5, do_sample=False)
    alone = supernet.subnet(spec).generate(**TOKENS, max_new_tokens=5, do_sample=False)
    assert made.tolist() == alone.tolist()
    static = loaded.generate(**TOKENS, max_new_tokens=5, do_sample=False, cache_implementation="static")
    assert static.tolist() == alone.tolist()


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({4: {}}, SpecError, "4 is no layer; choose 0 to 3"),
        ({"x": {}}, SpecError, "'x' is no layer"),
        ({True: {}}, SpecError, "True is no layer"),
        ({1: 3}, SpecError, "layer 1: expected a mapping of fields, got 3"),
        ({1: {"hidden_size": 8}}, SpecError, "'hidden_size' is not elastic; choose from intermediate_s"),
        ({1: {"intermediate_size": 17}}, IllegalChoice, "layer 1: intermediate_size=17 is not a choice"),
        ({1: {"num_key_value_heads": 1}}, IllegalChoice, "attention_heads=6, num_key_value_heads=1 is"),
        ({1: {"skip": ["mlp"]}}, IllegalChoice, r"skip=\['mlp'\] is not a choice; a layer is kept"),
        ({1: {"skip": "mlp"}}, IllegalChoice, "skip='mlp' is not a choice"),
        ({1: {"skip": 2}}, IllegalChoice, "skip=2 is not a choice"),
        ({0: {"skip": ["attention", "mlp"]}}, IllegalChoice, "layer 0 is in every subnet"),
        ("depth", SpecError, "expected a mapping of axes"),
        (None, SpecError, "expected a mapping of axes"),
        ({"depth": 1}, SpecError, "missing axis 'ffn'"),
    ],
)
def test_what_is_no_subnet(
    llama: subnetact.Supernet, config: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llama.space.parse(config)


def test_global_numbers_of_a_configuration_count(llama: subnetact.Supernet) -> None:
    space = llama.space
    config = config_of("llama", intermediate_size=24, per_layer_config={2: {"intermediate_size": 40}})
    spec = space.parse(config)
    assert space.format(spec) == {i: {"intermediate_size": 24} for i in (0, 1, 3)}
    with pytest.raises(SpecError, match="the configuration has 3 layers, the model 4"):
        space.parse(config_of("llama", num_hidden_layers=3))
    with pytest.raises(IllegalChoice, match="layer 0: intermediate_size=20"):
        space.parse(config_of("llama", intermediate_size=20))
    axes = {axis.name: list(space.smallest()[axis.name]) for axis in space.axes}
    assert space.parse(axes) == space.smallest()
    assert space.parse({}) == space.largest()


def test_stages_of_several_layers_and_fixed_sizes() -> None:
    description = subnetact.describe(
        model_of("llama"), TOKENS, axes=("depth", "ffn"), choices={"depth": (1, 2, 3), "ffn": (16, 40)},
        fixed="model.layers.0.mlp.*", proof=False,
    )  # fmt: skip
    space = subnetact.insertion.Description.from_json(description.to_json()).space
    assert pickle.loads(pickle.dumps(space)).format(space.smallest()) == space.format(space.smallest())
    (stage,) = description.stages.values()
    order = [int(block.rpartition(".")[2]) for block in stage.blocks]
    for kept in (1, 2, 3):
        spec = space.spec(depth=kept, ffn=[40, 16, 40])
        layers = space.format(spec)
        assert sorted(i for i, f in layers.items() if "skip" in f) == sorted(order[kept:])
        assert space.parse(layers) == spec
    skipped = {i: {"skip": ["attention", "mlp"]} for i in (1, 2, 3)}
    with pytest.raises(
        IllegalChoice, match=r"layer 1, 2, 3: skipping \[1, 2, 3\] is not a choice; choose skipping"
    ):
        space.parse(skipped)
    with pytest.raises(IllegalChoice, match="layer 0: intermediate_size is 40 in every subnet, got 16"):
        space.parse({0: {"intermediate_size": 16}})
    with pytest.raises(SpecError, match="'num_attention_heads' is not elastic"):
        space.parse({1: {"num_attention_heads": 2}})
