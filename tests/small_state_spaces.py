"""Small Mamba-2 networks of transformers with random weights, and their weights for fewer heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TEXT: dict[str, Any] = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
NEMOTRON: dict[str, Any] = {
    **TEXT,
    "hidden_size": 32,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "ssm_state_size": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 28,
    "num_experts_per_tok": 2,
    "chunk_size": 4,
}
MAMBA: dict[str, Any] = {
    **TEXT,
    "hidden_size": 32,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 2,
    "num_hidden_layers": 3,
    "chunk_size": 4,
    "expand": 2,
}
TOKENS = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))


def small_nemotron(**settings: Any) -> Any:
    """Return a NemotronHForCausalLM with layers of all four kinds."""
    import transformers

    config = transformers.NemotronHConfig(**{**NEMOTRON, **settings})
    return filled(transformers.NemotronHForCausalLM(config))


def small_mamba(**settings: Any) -> Any:
    import transformers

    return filled(transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**MAMBA, **settings})))


def filled(network: nn.Module) -> nn.Module:
    """Fill all parameters with random numbers, so that a mistake is seen in the output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3, generator=generator)
            else:
                nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
    return network.eval()


def first_heads(groups: int, heads: int, kept: int, width: int) -> list[int]:
    """Return the channels of the heads that are kept: the first ones of every group."""
    each = heads // groups
    places = [group * each + head for group in range(groups) for head in range(kept // groups)]
    return [head * width + i for head in places for i in range(width)]


def narrowed(full: Any, narrow: Any) -> Any:
    """Fill a network with fewer heads, channels or neurons with the weights of a full one, in place."""
    mixers = dict(full.named_modules())
    weights, own = full.state_dict(), narrow.state_dict()
    for name, tensor in own.items():
        path, _, end = name.rpartition(".")
        mixer = mixers.get(path if end in ("dt_bias", "A_log", "D") else path.rpartition(".")[0])
        taken = weights[name]
        if hasattr(mixer, "dt_bias"):
            small: Any = narrow.get_submodule(path if mixer is mixers[path] else path.rpartition(".")[0])
            rows = rows_of(name, mixer, small.num_heads)
            if rows is not None:
                axis = 1 if name.endswith("out_proj.weight") else 0
                taken = taken.index_select(axis, torch.tensor(rows))
        own[name] = taken[tuple(map(slice, tensor.shape))]
    narrow.load_state_dict(own)
    return narrow


def rows_of(name: str, mixer: Any, kept: int) -> list[int] | None:
    """Return which rows of a tensor of a mixer, or columns of `out_proj`, belong to the kept heads."""
    heads, groups, inner = mixer.num_heads, mixer.n_groups, mixer.intermediate_size
    channels = first_heads(groups, heads, kept, mixer.head_dim)
    shared = range(2 * groups * mixer.ssm_state_size)
    if ".in_proj." in name:
        start = 2 * inner + len(shared)
        dt = [start + head for head in first_heads(groups, heads, kept, 1)]
        return [*channels, *(inner + i for i in channels), *(2 * inner + i for i in shared), *dt]
    if ".conv1d." in name:
        return [*channels, *(inner + i for i in shared)]
    if name.rpartition(".")[2] in ("dt_bias", "A_log", "D"):
        return first_heads(groups, heads, kept, 1)
    return None if name.endswith("out_proj.bias") else channels


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens, use_cache=False).logits
    return found
