"""Attentions that normalise over all heads, compress or keep a state: subnets equal their smaller classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from small_state_spaces import TOKENS, filled, logits
from torch import Tensor, nn

from subnetact import describe, insert_
from subnetact.errors import InsertError
from subnetact.generation import profile_steps
from subnetact.insertion.hugging_face import as_pretrained

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::subnetact.errors.UnprovedInputWarning")  # of generate

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "max_position_embeddings": 64,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0, 1]}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 4,
    "linear_value_head_dim": 6, **HYBRID,
}  # fmt: skip
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
DELTA_HEADS = {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
LATENT_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
QKV = ((8, 0.5), (8, 0.5), (24, 0.5))

FAMILIES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Sequence[tuple[int, float]]]]] = {
    # the configuration; what it states for half of everything; segments of rows, and how much of each is kept
    "Olmo2": ({}, HEADS, {}),
    "BitNet": ({}, {"intermediate_size": 24}, {}),  # its norm over all neurons
    "MiniMaxM2": ({"num_local_experts": 4, "num_experts_per_tok": 2}, HEADS, {}),
    "MiniMax": ({"num_local_experts": 4, "num_experts_per_tok": 2, **HYBRID}, HEADS, {}),
    "DeepseekV3": (LATENT, LATENT_HEADS, {}),
    "KimiLinear": (
        {**LATENT, "linear_num_heads": 4, "linear_head_dim": 6, **HYBRID},
        {**LATENT_HEADS, "linear_num_heads": 2},
        {"conv1d.weight": ((24, 0.5),) * 3},
    ),
    "Qwen3Next": ({**EXPERTS, **DELTA}, {**HEADS, **DELTA_HEADS}, {"conv1d.weight": QKV}),
    "Qwen3_5Text": (DELTA, {**HEADS, **DELTA_HEADS}, {"conv1d.weight": QKV, "in_proj_qkv.weight": QKV}),
    "Jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "num_experts": 1},
        {**HEADS, "mamba_expand": 1},
        {"in_proj.weight": ((64, 0.5), (64, 0.5))},
    ),
    "FalconH1": (
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 5, "mamba_chunk_size": 4,
         "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9]},
        {**HEADS, "mamba_d_ssm": 16, "mamba_n_heads": 2},
        {"in_proj.weight": ((32, 0.5), (32, 0.5), (10, 1), (4, 0.5)), "conv1d.weight": ((32, 0.5), (10, 1)),
         "conv1d.bias": ((32, 0.5), (10, 1))},
    ),
}  # fmt: skip


def small(family: str, fields: Mapping[str, Any]) -> Any:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields})
    if "head_dim" not in config.to_dict():
        config.head_dim = SIZES["head_dim"]
    model: Any = filled(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    return model


def kept(tensor: Tensor, shape: torch.Size, segments: Sequence[tuple[int, float]]) -> Tensor:
    """Return the first entries of every axis, and of every segment of rows."""
    parts = tensor.split([rows for rows, _ in segments]) if segments else ()
    first = [part[: round(rows * share)] for part, (rows, share) in zip(parts, segments, strict=True)]
    return (torch.cat(first) if first else tensor)[tuple(map(slice, shape))]


@pytest.mark.parametrize("family", FAMILIES)
def test_half_of_the_heads_equal_the_class_with_half_of_them(family: str) -> None:
    fields, smaller, segments = FAMILIES[family]
    model, narrow = small(family, fields), small(family, {**fields, **smaller})
    weights = model.state_dict()
    rows = {name: s for name in weights for end, s in segments.items() if name.endswith(end)}
    narrow.load_state_dict(
        {n: kept(weights[n], t.shape, rows.get(n, ())) for n, t in narrow.state_dict().items()}
    )
    full, expected = logits(model), logits(narrow)
    axes = ("ffn",) if "intermediate_size" in smaller else ("heads", "width")
    supernet = insert_(model, example=TOKENS, axes=axes, choices=(0.5, 1.0))
    spec = supernet.space.smallest()
    view = supernet.subnet(spec)
    torch.testing.assert_close(logits(supernet.subnet(supernet.space.largest())), full, rtol=0, atol=5e-5)
    torch.testing.assert_close(logits(view), expected, rtol=0, atol=5e-5)
    answers = [
        view.generate(TOKENS, max_new_tokens=4, do_sample=False, use_cache=cached) for cached in (True, False)
    ]
    assert torch.equal(*answers)
    alone: Any = as_pretrained(supernet.extract(spec), {"input_ids": TOKENS, "use_cache": False})
    assert {field: getattr(alone.config, field) for field in smaller} == smaller
    torch.testing.assert_close(logits(alone), expected, rtol=0, atol=5e-5)


def test_pages_of_continuous_batching_hold_no_latents() -> None:
    supernet = insert_(small("DeepseekV3", LATENT), example=TOKENS, axes=("heads",))
    with pytest.raises(InsertError, match=r"no cache for latent attention, .*; use view\.generate"):
        profile_steps(supernet, [supernet.space.largest()])


def test_layers_with_a_state_are_not_named_after_the_heads_of_attention() -> None:
    space = describe(small("Qwen3Next", {**EXPERTS, **DELTA}), TOKENS, axes=("heads",)).space
    assert space.format(space.smallest()) == {"heads": [0.5, 0.5]}


def test_heads_of_a_state_that_stay_whole_say_which_layer_half_of_them_does_not_fit() -> None:
    class Stating(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.view(*input.shape[:-1], 24))

    model = small("Qwen3Next", {**EXPERTS, **DELTA})
    model.model.layers[0].linear_attn.out_proj.__class__ = Stating
    refused = describe(model, TOKENS, axes=("heads",)).refused
    assert "out_proj (Stating)" in refused["model.layers.0.linear_attn.heads"]
