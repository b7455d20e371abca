"""The pre-norm vision transformer that AutoFormer and HydraViT share; all heads have 64 features."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import Shapes
from subnetact.errors import SpecError
from subnetact.operators import Elastic, ElasticAttribute, LayerNormSlice, Segments, WeightSlice

HEAD_FEATURES = 64


def survive(branch: Tensor, rate: float, training: bool) -> Tensor:
    """Return a residual branch (N, T, width); in training, with a probability of `rate`, samples are zero."""
    if not training or not rate:
        return branch
    return branch * F.dropout(branch.new_ones((len(branch), 1, 1)), rate)


class TransformerBlock(nn.Module):
    """A pre-norm block of `ratio` neurons per feature; `position` extends queries, keys and values."""

    def __init__(
        self, qkv: nn.Linear, ratio: float, eps: float, drops: tuple[float, float, float], position: Any
    ) -> None:
        super().__init__()
        width, hidden = qkv.in_features, int(qkv.in_features * ratio)
        self.norm1 = nn.LayerNorm(width, eps)
        self.qkv = qkv
        self.position = position
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.drop, self.attn_drop, self.drop_path = map(float, drops)
        self.head_features = HEAD_FEATURES  # TorchScript reads attributes, but no globals.

    def mix(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to the concatenated results of all heads, (N, T, features)."""
        split = self.qkv(x).view(x.shape[0], x.shape[1], 3, -1, self.head_features).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind(0)
        if self.position is not None:
            q, k, v = self.position.extend(q, k, v)
        dropped = self.attn_drop if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, scale=self.head_features**-0.5)
        if self.position is not None:
            y = self.position.collect(y)
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to (N, T, width)."""
        branch = F.dropout(self.proj(self.mix(self.norm1(x))), self.drop, self.training)
        x = x + survive(branch, self.drop_path, self.training)
        branch = F.dropout(F.gelu(self.fc1(self.norm2(x))), self.drop, self.training)
        branch = F.dropout(self.fc2(branch), self.drop, self.training)
        return x + survive(branch, self.drop_path, self.training)


class VisionTransformer(nn.Module):
    """The full network; the classifier reads the mean over the patches if `mean`, or else the class token."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        qkv: Callable[..., nn.Linear],
        ratio: float,
        eps: float,
        drop: float,
        pos_drop: float,
        head_drop: float = 0.0,
        position: Callable[[], nn.Module | None] = lambda: None,
        positions: bool = True,
        mean: bool = False,
    ) -> None:
        super().__init__()
        names = "embed_dim", "num_heads", "img_size", "patch_size"
        width, heads, side, size = (arguments[name] for name in names)
        if width != HEAD_FEATURES * heads or side % size:
            raise SpecError(
                f"a head has {HEAD_FEATURES} features, so embed_dim must be {HEAD_FEATURES} * num_heads, got "
                f"{width} and {heads}; img_size {side} must be a multiple of patch_size {size}"
            )
        paths = np.linspace(0, arguments["drop_path_rate"], arguments["depth"])
        drops = [(drop, arguments["attn_drop_rate"], path) for path in paths.tolist()]
        blocks = [TransformerBlock(qkv(width, 3 * width), ratio, eps, own, position()) for own in drops]
        patches = (side // size) ** 2
        self.patch_embed = nn.Conv2d(arguments["in_chans"], width, size, size)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + patches, width) * 0.02) if positions else None
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, eps)
        self.head = nn.Linear(width, arguments["num_classes"])
        self.pos_drop, self.head_drop = float(pos_drop), float(head_drop)
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_chans, img_size, img_size) to logits (N, num_classes)."""
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1)
        if self.pos_embed is not None:
            x = x + self.pos_embed
        x = self.norm(self.blocks(F.dropout(x, self.pos_drop, self.training)))
        pooled = x[:, 1:].mean(1) if self.mean else x[:, 0]
        return self.head(F.dropout(pooled, self.head_drop, self.training))  # type: ignore[no-any-return]


PATCHES = "patch_embed.weight"
SHOWN: dict[str, Callable[[Shapes, Mapping[str, Any]], Any]] = {
    "embed_dim": lambda shapes, _: shapes.size(PATCHES),
    "in_chans": lambda shapes, _: shapes.size(PATCHES, 1),
    "patch_size": lambda shapes, _: shapes.size(PATCHES, 3),
    "img_size": lambda shapes, _: math.isqrt(shapes.size("pos_embed", 1) - 1) * shapes.size(PATCHES, 3),
    "num_classes": lambda shapes, _: shapes.size("head.weight"),
    "depth": lambda shapes, _: shapes.layers("blocks"),
    "num_heads": lambda shapes, _: shapes.size(r"blocks.\d+.qkv.weight") // (3 * HEAD_FEATURES),
}
"""The arguments that the tensors of a vision transformer show, for `Family.shown`."""


def transformer_elastic(
    width: str, blocks: Sequence[tuple[str | Segments, str, str]], positions: bool = True
) -> dict[str, Elastic]:
    """Return the entries; a block has dimensions of queries to values, of its heads, and of its neurons."""
    elastic = {
        "": ElasticAttribute.on(cls_token=width, pos_embed=width if positions else None),
        "patch_embed": WeightSlice.on(out=width),
        "norm": LayerNormSlice.on(features=width),
        "head": WeightSlice.on(in_=width),
    }
    for i, (qkv, attention, neurons) in enumerate(blocks):
        block = f"blocks.{i}"
        elastic[f"{block}.norm1"] = elastic[f"{block}.norm2"] = LayerNormSlice.on(features=width)
        elastic[f"{block}.qkv"] = WeightSlice.on(in_=width, out=qkv)
        elastic[f"{block}.proj"] = WeightSlice.on(in_=attention, out=width)
        elastic[f"{block}.fc1"] = WeightSlice.on(in_=width, out=neurons)
        elastic[f"{block}.fc2"] = WeightSlice.on(in_=neurons, out=width)
    return elastic
