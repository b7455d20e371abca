"""The embedded language model: a small elastic Llama, trained on docstrings of the standard library."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from subnetact.errors import FileFormatError, extra_needed
from subnetact.files.tensors import read_tensors
from subnetact.insertion.description import Description
from subnetact.insertion.insert import describe, insert_
from subnetact.spec import SubnetSpec
from subnetact.supernet.supernet import Supernet

if TYPE_CHECKING:
    from tokenizers import Tokenizer


VOCABULARY = 1024
CONTEXT = 512  # tokens that the model was trained to look back
LAYERS = 4
FFN = (56, 112, 224, 448, 896)  # widths of the feed-forward network of every layer
KEPT, IMPORTANT_LAYERS = (2, 3, 4), (3, 1, 2)
"""Numbers of layers that a subnet keeps; those that it can skip, the ones that are kept longest first."""
DATA = files("subnetact") / "data"
WEIGHTS, TOKENIZER, FACTS = "text_supernet.safetensors", "text_tokenizer.json", "text_supernet.json"
HEAD = "lm_head.weight"  # the same tensor as the embedding; files do not hold it
END, END_TOKEN = "<|end|>", 0  # begins and ends every text
NEEDED = "the embedded model needs transformers: pip install 'subnetact[hf]'"


def new_text_supernet() -> Supernet:
    """Return the elastic language model with random weights, or raise MissingExtra without transformers.

    The width of every feed-forward network is a choice, and so is the number of layers.
    """
    with extra_needed(NEEDED):
        from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=192,
        intermediate_size=FFN[-1],
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    model.train(False)
    x = torch.arange(16).view(2, 8)
    found = describe(model, x, axes=("depth", "ffn"), choices={"ffn": FFN}, proof=False)
    (stage,) = found.stages.values()
    stack = stage.blocks[0].rpartition(".")[0]
    blocks = tuple(f"{stack}.{i}" for i in IMPORTANT_LAYERS)
    sizes: dict[float, int] = {kept: kept - 1 for kept in KEPT}
    stages = [replace(stage, blocks=blocks, sizes=sizes)]
    description = Description("text", found.groups.values(), stages, found.refused)
    supernet = insert_(model, description, example=x)
    supernet.origin = {"name": "text", "constructor": {}}
    return supernet


def load_text_supernet(weights: Path | None = None) -> Supernet:
    """Return the trained language model, of the package or of `examples/train_text_supernet.py`.

    Raises:
        MissingExtra: transformers is not installed (`pip install 'subnetact[hf]'`).
        FileFormatError: the file does not exist or is damaged, or it holds other tensors than the model.
    """
    with nullcontext(weights) if weights else as_file(DATA / WEIGHTS) as path:
        state = read_tensors(path)
    supernet = new_text_supernet()
    shapes = {name: tensor.shape for name, tensor in supernet.state_dict().items() if name != HEAD}
    fits = {name: tensor.shape for name, tensor in state.items()} == shapes
    if not fits or not all(t.is_floating_point() and t.isfinite().all() for t in state.values()):
        raise FileFormatError(
            f"{path}: not the weights of this model; write them with examples/train_text_supernet.py"
        )
    state = {name: tensor.float() for name, tensor in state.items()}
    supernet.load_state_dict({**state, HEAD: state["model.embed_tokens.weight"]})
    return supernet


def text_facts() -> dict[str, Any]:
    """Return how the model of the package was trained, and per subnet what it reaches (`held_out`).

    That is its `loss` in nats per token, and the percentage of next tokens that are right (`right_percent`).
    """
    return dict(json.loads((DATA / FACTS).read_text(encoding="utf-8")))


def switchable_subnets(supernet: Supernet) -> list[SubnetSpec]:
    """Return the subnets of all layers, the narrowest first; each can continue on the others' caches."""
    return [supernet.space.spec(depth=[KEPT[-1]], ffn=[width] * LAYERS) for width in FFN]


@lru_cache(maxsize=1)
def text_tokenizer() -> Tokenizer:
    """Return the byte-pair tokenizer of the language model; MissingExtra if tokenizers is not installed."""
    with extra_needed(NEEDED):
        from tokenizers import Tokenizer
    return Tokenizer.from_str((DATA / TOKENIZER).read_text(encoding="utf-8"))
