"""Tiny models of every family of transformers that routes tokens to experts, for `coverage.py` and tests."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
"""Fields of configurations."""

SIZES: dict[str, Any] = {
    **{"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(EXPERTS_PER_TOKEN, 4),
    **{"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "n_shared_experts": 1},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_shared_experts": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "use_cache": False},
}
"""Field of a configuration -> its size. A configuration is given those that it has."""

SPECIAL: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "dbrx": {
        **{"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 4},
    },
    "deepseek_v4": {"num_hash_layers": 0},  # the shape of their table follows the number
    "doge": {"is_moe": True, "num_experts": 16},
    "gemma4_text": {
        **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 4, "moe_intermediate_size": 48},
        **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 50, "global_head_dim": 8},
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "glm4v_moe_text": {
        "head_dim": 16,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 1e4},
            **{"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        },
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [48, 48],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "glm5_next_text": {
        **{"qk_rope_head_dim": 0, "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 8},
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 48,
        "zero_expert_num": 4,
    },
    "mistral4": {"head_dim": 16},
    "granitemoehybrid": {
        **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "shared_intermediate_size": 48},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"], "num_dense_layers": 1},
    "phimoe": {"num_experts_per_tok": 2},
    "step3p5": {"mlp_layer_types": ["dense", "sparse", "sparse"], "sliding_window": 16},
    "zaya": {"num_experts_per_tok": 1},
}
"""Model type -> fields beyond those."""

_HEADS = ("num_attention_heads", "num_key_value_heads")
_OTHER_INPUTS = {"text_config", "vision_config", "audio_config", "thinker_config"}
_ROUTED = re.compile(r"self\.(top_k|num_experts_per_tok)\b|config\.(top_k_experts|moe_top_?k)\b")


def families() -> dict[str, str]:
    """Return the folders of transformers whose models route by a number of experts, with a model type."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    types = importlib.import_module("transformers.models.auto.configuration_auto")
    causal, base = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_MAPPING_NAMES
    folder = Path(inspect.getfile(auto)).parents[1]
    found: dict[str, str] = {}
    for source in sorted(folder.glob("*/modeling_*.py")):
        text = source.read_text(encoding="utf-8")
        family = source.parent.name
        own = [t for t in types.CONFIG_MAPPING_NAMES if types.model_type_to_module_name(t) == family]
        order = [t for mapping in (causal, base) for t in sorted(own, key=len, reverse=True) if t in mapping]
        order.sort(key=lambda t: (not t.endswith("_text"), t != family))
        if "xpert" in text and _ROUTED.search(text):
            alone = [t for t in order if not _OTHER_INPUTS & set(types.CONFIG_MAPPING[t].sub_configs)]
            alone += [t for t in own if _text_model(types.CONFIG_MAPPING[t])]
            found[family] = next(iter(alone), "")
    return found


def _text_model(configuration: Any) -> Any:
    """Return the model for text alone of a configuration that only a model for more inputs contains."""
    source = importlib.import_module(configuration.__module__.replace(".configuration_", ".modeling_"))
    classes = [c for n, c in vars(source).items() if inspect.isclass(c) and n.endswith("TextModel")]
    return next((c for c in classes if getattr(c, "config_class", None) is configuration), None)


def tiny_mixture(kind: str, **fields: Any) -> tuple[nn.Module, Any]:
    """Return a model of a type with random weights, of the class for causal language models if it has one.

    Its configuration has the given `fields` beyond the usual ones.
    """
    transformers = importlib.import_module("transformers")
    types = importlib.import_module("transformers.models.auto.configuration_auto")
    configuration: Any = types.CONFIG_MAPPING[kind]
    known = {*configuration.__annotations__, *inspect.signature(configuration.__init__).parameters}
    usual = configuration()
    known |= set(vars(usual))
    sizes = {**{n: v for n, v in SIZES.items() if n in known}, **SPECIAL.get(kind, {})}
    if "num_key_value_heads" in sizes and len({vars(usual).get(name) for name in _HEADS}) == 1:
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    if "n_group" in sizes and getattr(usual, "n_group", 0) == 1:
        sizes["n_group"] = 1
    config = configuration(**{**sizes, **fields})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        auto = transformers.AutoModel
    make = auto.from_config if type(config) in auto._model_mapping else _text_model(configuration)
    model: nn.Module = make(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)
    return model, {"input_ids": torch.randint(3, 50, (2, 9))}


def restated(model: nn.Module, full: int, size: int) -> nn.Module:
    """Return the model with its weights, made by its class from a configuration with another number."""
    config: Any = copy.deepcopy(model.config)
    for field in EXPERTS_PER_TOKEN:
        for part in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
            if getattr(part, field, None) == full:
                setattr(part, field, size)
    kind: Any = type(model)
    made: nn.Module = kind(config).eval()
    made.load_state_dict(model.state_dict())
    return made
