"""Networks as people write them by hand: a GPT with the attention of nanoGPT, and one that fits more."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, WORDS, LENGTH = 32, 4, 50, 32


class NanoAttention(nn.Module):
    """Self-attention that shapes tensors by the width of its input and by stated numbers, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = HEADS, WIDTH
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, channels) to the same shape."""
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return found


class OwnSizeAttention(NanoAttention):
    """The same, whose shapes follow from the sizes of the tensors themselves."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, channels) to the same shape."""
        b, t, _ = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and with a residual."""

    def __init__(self, attention: type[NanoAttention]) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, channels) to the same shape."""
        x = x + self.attn(self.ln_1(x))
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class GPT(nn.Module):
    """A small language model with tied embeddings."""

    def __init__(self, attention: type[NanoAttention]) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block(attention) for _ in range(4))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, (N, tokens), to logits, (N, tokens, words)."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


NETWORKS = {"nanogpt": NanoAttention, "nanogpt_own_sizes": OwnSizeAttention}
