"""Extracted subnets of Hugging Face models are saved and loaded as models of their own, if one exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import subnetact
import subnetact.insertion
from subnetact.errors import InsertError

transformers = pytest.importorskip("transformers")

SIZES = {
    **{"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 40},
    **{"vocab_size": 32, "max_position_embeddings": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
PAIRS = {"num_key_value_heads": 2}
TOKENS = {"input_ids": torch.arange(3, 15).reshape(2, 6)}


def supernet_of(name: str, config: str, **settings: Any) -> subnetact.Supernet:
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**{**SIZES, **settings})).eval()
    return subnetact.insert_(model, example=TOKENS)


def extracted(supernet: subnetact.Supernet, **choices: Any) -> nn.Module:
    space = supernet.space
    return supernet.extract(space.spec(**{axis.name: choices.get(axis.name, 1.0) for axis in space.axes}))


LLAMA = ("LlamaForCausalLM", "LlamaConfig")
BART = {
    **{"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
}
QWEN2 = ("Qwen2ForCausalLM", "Qwen2Config")


@pytest.mark.parametrize(
    ("names", "settings", "choices", "fields"),
    [
        (LLAMA, PAIRS, {"depth": 0.5, "ffn": 0.5, "heads": 0.5},
         {"num_hidden_layers": 2, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
          "head_dim": 6}),
        (QWEN2, {**PAIRS, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
         {"depth": 0.5, "heads": 0.5},
         {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}),
        (("BertForSequenceClassification", "BertConfig"), {}, {"depth": 0.5, "ffn": 0.5},
         {"num_hidden_layers": 2, "intermediate_size": 16, "num_attention_heads": 4}),
    ],
)  # fmt: skip
def test_a_uniform_subnet_is_a_model_of_its_own(
    tmp_path: Path, names: tuple[str, str], settings: dict[str, Any], choices: Any, fields: dict[str, int]
) -> None:
    supernet = supernet_of(*names, **settings)
    subnet = extracted(supernet, **choices)
    small = subnetact.insertion.as_pretrained(subnet, TOKENS)
    assert {field: getattr(small.config, field) for field in fields} == fields
    small.save_pretrained(tmp_path)
    loaded = type(small).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**TOKENS).logits, subnet(**TOKENS).logits, rtol=0, atol=1e-6)
    assert subnet.config.intermediate_size == small.config.intermediate_size


@pytest.mark.parametrize(("depth", "counts"), [([1.0, 0.5], (4, 2)), ([0.5, 1.0], (2, 4))])
def test_layers_that_a_decoder_skips_are_its_own(depth: list[float], counts: tuple[int, int]) -> None:
    layers = {"encoder_layers": 4, "decoder_layers": 4}
    supernet = supernet_of("BartForConditionalGeneration", "BartConfig", **{**BART, **layers})
    subnet = extracted(supernet, depth=depth)
    small = subnetact.insertion.as_pretrained(subnet, TOKENS)
    assert (small.config.encoder_layers, small.config.decoder_layers) == counts
    with torch.no_grad():
        torch.testing.assert_close(small(**TOKENS).logits, subnet(**TOKENS).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "choices", "message"),
    [
        (
            ("GPT2LMHeadModel", "GPT2Config"),
            {"heads": [0.5, 1.0, 1.0, 1.0]},
            r"c_attn\.weight: .* shape torch\.Size\(\[24, 36\]\) .* model is .*\[24, 72\]\); save its state",
        ),
        (
            ("BartForConditionalGeneration", "BartConfig"),
            {"ffn": [0.5] + [1.0] * 5},
            r"encoder_ffn_dim is one number .* differ here, 0\.4, 1",
        ),
        (
            ("BertForSequenceClassification", "BertConfig"),
            {"heads": 0.5},
            r"with .*heads=4, .*query\.weight: .* shape torch\.Size\(\[12, 24\]\) .* model is .*\[24, 24\]",
        ),
    ],
)
def test_subnets_that_no_configuration_describes(names: tuple[str, str], choices: Any, message: str) -> None:
    supernet = supernet_of(*names, **(BART if "Bart" in names[0] else {}))
    with pytest.raises(InsertError, match=message):
        subnetact.insertion.as_pretrained(extracted(supernet, **choices), TOKENS)
    with pytest.raises(InsertError, match="Linear is no Hugging Face model"):
        subnetact.insertion.as_pretrained(nn.Linear(2, 2), torch.zeros(1, 2))


MIXED = {**PAIRS, "hidden_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ALIKE: dict[str, tuple[tuple[str, str], dict[str, Any], dict[str, int]]] = {
    "experts as neurons": (
        ("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
        {**MIXED, "moe_intermediate_size": 8},
        {"num_experts": 4, "moe_intermediate_size": 8},
    ),
    "everything 16": (
        ("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
        {**MIXED, "num_experts": 16, "intermediate_size": 16, "mlp_only_layers": [0], "head_dim": 4},
        {"num_experts": 8, "moe_intermediate_size": 16, "intermediate_size": 16, "hidden_size": 16},
    ),
    "experts as intermediate": (
        ("MixtralForCausalLM", "MixtralConfig"),
        {**PAIRS, "intermediate_size": 16, "num_local_experts": 16, "num_experts_per_tok": 2},
        {"num_local_experts": 8, "intermediate_size": 16},
    ),
    "neurons as channels": (
        LLAMA,
        {**PAIRS, "intermediate_size": 24},
        {"intermediate_size": 12, "hidden_size": 24, "num_attention_heads": 4},
    ),
}


@pytest.mark.parametrize("case", ALIKE)
def test_fields_of_one_value_are_told_apart_by_what_they_decide(tmp_path: Path, case: str) -> None:
    names, settings, fields = ALIKE[case]
    supernet = supernet_of(*names, **settings)
    smaller = "pool" if "experts" in case or "everything" in case else "ffn"
    choice = {smaller: 0}
    spec = supernet.space.spec(
        **{a.name: [s.choices[choice.get(a.name, -1)] for s in a.slots] for a in supernet.space.axes}
    )
    supernet.save_pretrained(tmp_path / "only", only=spec, example=TOKENS)
    loaded = getattr(transformers, names[0]).from_pretrained(tmp_path / "only").eval()
    assert {field: getattr(loaded.config, field) for field in fields} == fields
    with torch.no_grad():
        expected = supernet.subnet(spec)(**TOKENS).logits
        torch.testing.assert_close(loaded(**TOKENS).logits, expected, rtol=0, atol=1e-6)


def left_by_gguf(model: Any) -> None:
    from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
    from transformers.utils.quantization_config import GgufConfig

    model.config.quantization_config = GgufConfig("weights.gguf", dequantize=True)
    model.hf_quantizer = GgufHfQuantizer(model.config.quantization_config)


def left_by_bitsandbytes(model: Any) -> None:
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.mark.parametrize("leave", [left_by_gguf, left_by_bitsandbytes])
def test_what_a_quantiser_left_does_not_keep_numbers_from_being_saved(tmp_path: Path, leave: Any) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **PAIRS})).eval()
    leave(model)
    supernet = subnetact.insert_(model, example=TOKENS, axes=("ffn",))
    spec = supernet.space.smallest()
    supernet.save_pretrained(tmp_path / "bundle", subnets={"small": spec})
    supernet.save_pretrained(tmp_path / "only", only=spec, example=TOKENS)
    subnetact.insertion.as_pretrained(supernet.extract(spec), TOKENS).save_pretrained(tmp_path / "alone")
    opened = [
        subnetact.from_pretrained(tmp_path / "bundle", subnet="small"),
        *(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("only", "alone")),
    ]
    with torch.no_grad():
        expected = supernet.subnet(spec)(**TOKENS).logits
        for other in opened:
            torch.testing.assert_close(other(**TOKENS).logits, expected, rtol=0, atol=1e-6)


def test_quantised_weights_are_refused() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **PAIRS})).eval()
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(InsertError, match=r"layers\.1\.mlp\.up_proj is quantised; dequantise it first"):
        subnetact.describe(model, TOKENS)
