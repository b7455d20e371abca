"""Small models of torchvision, timm and transformers that can be made elastic and saved in folders."""

from __future__ import annotations

from typing import Any

import torch
from small_decoders import randomize_, small_decoder

__all__ = ["IMAGES", "TOKENS", "small_model"]

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(3, 15).view(2, 6)


def small_model(library: str) -> tuple[torch.nn.Module, Any, dict[str, Any]]:
    """Return a small model, an input for it, and options of `describe`.

    Args:
        library: "torchvision", "timm", or of transformers "encoder", "decoder" or "mixture" (of experts).
    """
    import timm
    import torchvision
    import transformers

    torch.manual_seed(0)
    if library == "torchvision":
        return torchvision.models.shufflenet_v2_x0_5(num_classes=5).eval(), IMAGES, {}
    if library == "timm":
        options = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 5}
        return timm.create_model("vit_tiny_patch16_224", **options).eval(), IMAGES, {}
    if library == "decoder":
        return small_decoder("LlamaConfig", tie_word_embeddings=True), TOKENS, {"axes": ("depth", "ffn")}
    if library == "mixture":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        return small_decoder("Qwen3MoeConfig", num_hidden_layers=2, **experts), TOKENS, {}
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    return randomize_(transformers.BertForSequenceClassification(config).eval()), TOKENS, {}
