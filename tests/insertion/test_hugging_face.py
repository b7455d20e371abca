"""Extracted subnets of Hugging Face models are saved and loaded as models of their own, if one exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_decoders import small_decoder
from torch import nn

import subnetact
import subnetact.insertion
from subnetact.errors import InsertError

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
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
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
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
    assert subnet.config.intermediate_size == SIZES["intermediate_size"]


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
            r"intermediate_size is one number .* differ here, 0\.4, 1",
        ),
        (
            ("BertForSequenceClassification", "BertConfig"),
            {"heads": 0.5},
            r"with .*heads=2, .*query\.weight: .* shape torch\.Size\(\[12, 24\]\) .* model is .*\[24, 24\]",
        ),
    ],
)
def test_subnets_that_no_configuration_describes_are_refused(
    names: tuple[str, str], choices: Any, message: str
) -> None:
    supernet = supernet_of(*names, **(BART if "Bart" in names[0] else {}))
    with pytest.raises(InsertError, match=message):
        subnetact.insertion.as_pretrained(extracted(supernet, **choices), TOKENS)


def test_other_models_have_no_configuration() -> None:
    with pytest.raises(InsertError, match="Linear is no Hugging Face model"):
        subnetact.insertion.as_pretrained(nn.Linear(2, 2), torch.zeros(1, 2))


def test_tied_weights_stay_tied_in_an_extracted_subnet() -> None:
    supernet = supernet_of(*LLAMA, **PAIRS, tie_word_embeddings=True)
    subnet = extracted(supernet, ffn=0.5)
    assert subnet.lm_head.weight is subnet.model.embed_tokens.weight
    assert subnet.lm_head.weight is not supernet.network.lm_head.weight


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("axes", [("ffn",), ("stream", "ffn")])
def test_a_model_with_gradient_checkpointing_is_elastic(axes: tuple[str, ...]) -> None:
    """Its embedding lets outputs require gradients, by a hook that stays when checkpointing is disabled."""
    tokens, gradients = torch.arange(1, 9)[None], []
    for checkpointing in (False, True):
        model = small_decoder("LlamaConfig", num_hidden_layers=2, hidden_size=32, intermediate_size=80)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        supernet = subnetact.insert_(model, example=tokens, axes=axes).train()
        for spec in (supernet.space.largest(), supernet.space.smallest()):
            supernet(tokens, subnet=spec, use_cache=False).logits.square().mean().backward()
        gradients.append([p.grad for p in supernet.parameters()])
        assert len(supernet.subnet(spec).get_input_embeddings()._forward_hooks) == checkpointing
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)
    with pytest.raises(AttributeError, match=r"supernet\.network\.gradient_checkpointing_enable"):
        supernet.gradient_checkpointing_enable()
