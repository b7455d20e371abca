"""Small language models of transformers with random weights, for the tests of layers, caches and pages.

The weights are larger than those that transformers draws, so that a mistake is seen in the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def small_decoder(config: str, **settings: Any) -> nn.Module:
    """Return a model of the class of a configuration, "LlamaConfig" for example, in evaluation mode."""
    import transformers

    given = getattr(transformers, config)(**{**SIZES, **settings})
    return randomize_(transformers.AutoModelForCausalLM.from_config(given).eval())


def randomize_(network: nn.Module) -> nn.Module:
    """Fill the matrices of a network with random numbers, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    return network
