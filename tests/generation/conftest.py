"""A tiny elastic Llama, a table of its steps, and policies that choose what a test wants."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from generation_tables import step_table

from subnetact.generation import StepTable
from subnetact.insertion.key_value_cache import switch
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

WIDTHS = (16, 32, 64)


@pytest.fixture(scope="session")
def llama() -> Supernet:
    """Return a Llama of three layers whose feed-forward widths are elastic."""
    transformers = pytest.importorskip("transformers")
    import subnetact

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        max_position_embeddings=128,
        initializer_range=0.4,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    choices = {"ffn": WIDTHS}
    supernet = subnetact.insert_(
        model, example=torch.arange(12).view(2, 6), axes=("depth", "ffn"), choices=choices
    )
    gc.collect()
    gc.freeze()  # transformers collects garbage at the end of every generator: not through all modules again
    return supernet


@pytest.fixture(scope="session")
def widths(llama: Supernet) -> list[SubnetSpec]:
    """Return subnets of all layers, from the narrowest to the widest."""
    return [llama.space.spec(depth=[1.0], ffn=[width] * 3) for width in WIDTHS]


@pytest.fixture
def table(widths: list[SubnetSpec]) -> StepTable:
    return step_table([spec.key for spec in widths])


@pytest.fixture(scope="session")
def alone(llama: Supernet, widths: list[SubnetSpec]) -> Callable[[list[int], tuple[int, ...]], list[int]]:
    """Return a function that generates the most likely tokens of one prompt, with a subnet per token."""
    from transformers import DynamicCache

    @torch.inference_mode()
    def generate(prompt: list[int], subnets: tuple[int, ...]) -> list[int]:
        cache, given, tokens = DynamicCache(config=llama.network.config), torch.tensor([prompt]), []
        for subnet in subnets:
            view = switch(llama, cache, widths[subnet], allow_approximate=True)
            logits = view(given, past_key_values=cache, use_cache=True).logits[0, -1]
            tokens.append(int(logits.argmax()))
            given = torch.tensor([[tokens[-1]]])
        return tokens

    return generate
