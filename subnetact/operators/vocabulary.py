"""What models call their numbers: for each meaning, the names of attributes of modules and of configurations.

Of the names that fit, the first counts. `CONFIGURED_HEADS` are the two fields of configurations to which
models map others. `ALL_HEADS` is the width of all heads together, `WIDTHS` that of what flows between layers;
some attentions use the latter for the former. `LATENT` is in the names of layers that make what all heads
share, from which others make queries, keys and values. `EXPERT_WIDTHS` are names of modules with weights of
experts, for the neurons of one. The numbers of `ROUTED` are those of routers and of what is beside them; some
routers choose groups of experts first. `SIZES` are the fields of configurations that may differ in a subnet.
`FEATURES` are the numbers that models of timm state of what reaches their heads, `DEPTHS` those of layers.
`PER_LAYER` are fields with one value per layer, under their common names, and `CACHES` the arguments of
layers that take a key-value cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead")
CONFIGURED_HEADS = ("num_attention_heads", "num_key_value_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
QUERIES_PER_KEY = ("num_key_value_groups", "n_rep", "num_kv_groups")
ALL_HEADS = ("all_head_size", "inner_dim", "attn_dim", "split_size", "attention_dim")
LATENT = re.compile(r"_a_[^.]*$")
WIDTHS = ("hidden_size", "embed_dim", "dim", "d_model", "model_dim", "hidden_dim", "input_size")
NEURONS = (
    "intermediate_size", "hidden_features", "inner_dim", "ffn_dim", "n_inner", "hidden_dim",
    "intermediate_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim",
)  # fmt: skip
EXPERT_WIDTHS = (
    "moe_intermediate_size", "intermediate_size", "intermediate_dim", "expert_dim", "ffn_hidden_size"
)  # fmt: skip
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "top_k"
)  # fmt: skip
EXPERTS = (
    "num_local_experts", "num_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts",
    "total_experts",
)  # fmt: skip
EXPERT_GROUPS = ("num_group", "n_group")
ROUTED = {name: names for names in (EXPERTS_PER_TOKEN, EXPERTS, EXPERT_GROUPS) for name in names}
SIZES = (
    *CONFIGURED_HEADS, *NEURONS, *EXPERT_WIDTHS, *ROUTED, "linear_num_key_heads", "linear_num_value_heads",
    "linear_num_heads", "mamba_num_heads", "mamba_n_heads", "mamba_d_ssm", "mamba_expand", "expand",
    "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
)  # fmt: skip

DEPTHS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
PER_LAYER = ("layer_types", "mlp_layer_types", "activation_sparsity_pattern", *NEURONS)
CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
FEATURES = ("num_features", "head_hidden_size", "embed_dim", "in_features", "hidden_size", "feature_dim")


def number_of(holder: Any, name: str) -> int:
    """Return the whole number that a configuration or a module states under a name; if it states none, 0."""
    try:
        value = getattr(holder, name, None)
    except RuntimeError:  # It differs between layers.
        return 0
    return value if type(value) is int else 0


def own_numbers(module: Any, names: Iterable[str], value: int | None = None) -> dict[str, int]:
    """Return the whole numbers that a module itself has under some names, or those of a certain value."""
    numbers = {name: vars(module).get(name) for name in names}
    return {name: n for name, n in numbers.items() if type(n) is int and value in (None, n)}
