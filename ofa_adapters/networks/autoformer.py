"""AutoFormer (ICCV'21; microsoft/Cream, AutoFormer/model/supernet_transformer.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import Family, Keys
from ofa_adapters.networks.autoformer_space import Layout, SearchSpace
from subnetact.operators import (
    Elastic,
    ElasticAttribute,
    LayerNormSlice,
    LayerSelect,
    ParameterSlice,
    WeightSlice,
)
from subnetact.space import SubnetSpace


class InterleavedLinear(nn.Linear):
    """Query, key and value rows in turn (q0, k0, v0, q1 ...); the bias is not interleaved.

    So the bias element of a key or value row depends on how many rows a subnet keeps, as upstream
    trained it (AutoFormer/model/module/qkv_super.py).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, T, in_features) to (N, T, out_features): all queries, all keys, all values."""
        rows = F.linear(input, self.weight)
        y = rows.view(rows.shape[0], rows.shape[1], -1, 3).transpose(-1, -2).flatten(-2)
        return y if self.bias is None else y + self.bias  # type: ignore[redundant-expr]


class SplitHeads(nn.Module):
    """Splits queries, keys and values into heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, 3 * features) to (3, N, heads, T, features / heads)."""
        return x.view(x.shape[0], x.shape[1], 3, self.heads, -1).permute(2, 0, 3, 1, 4)


class RelativePosition(nn.Module):
    """Embeddings of the vertical and horizontal distance of two patches, for keys and for values.

    Args:
        side: patches per side of the image.
        reach: distances beyond it count as it.
        features: of a head.
    """

    def __init__(self, side: int, reach: int, features: int) -> None:
        super().__init__()
        for name in ("key_vertical", "key_horizontal", "value_vertical", "value_horizontal"):
            self.register_parameter(name, nn.Parameter(torch.randn(2 * reach + 2, features) * 0.02))
        patch = torch.arange(side * side)
        for name, place in (("vertical", patch // side), ("horizontal", patch % side)):
            distance = (place[None, :] - place[:, None]).clamp(-reach, reach) + reach + 1
            index = F.pad(distance, (1, 0, 1, 0)).int()  # the class token's row and column: entry 0
            self.register_buffer(name, index, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return the embeddings for keys and for values, each (T, T, features)."""
        key = F.embedding(self.vertical, self.key_vertical)  # type: ignore[arg-type]
        value = F.embedding(self.vertical, self.value_vertical)  # type: ignore[arg-type]
        key = key + F.embedding(self.horizontal, self.key_horizontal)  # type: ignore[arg-type]
        value = value + F.embedding(self.horizontal, self.value_horizontal)  # type: ignore[arg-type]
        return key, value


class Block(nn.Module):
    """Pre-norm attention and feed-forward network."""

    def __init__(self, arguments: Mapping[str, Any], drop_path: float) -> None:
        super().__init__()
        width, hidden = arguments["embed_dim"], int(arguments["embed_dim"] * arguments["mlp_ratio"])
        linear = InterleavedLinear if arguments["change_qkv"] else nn.Linear
        self.attn_norm = nn.LayerNorm(width)
        self.qkv = linear(width, 3 * width, arguments["qkv_bias"])
        self.split = SplitHeads(arguments["num_heads"])
        self.position = None
        if arguments["relative_position"]:
            side = arguments["img_size"] // arguments["patch_size"]
            features = width // arguments["num_heads"]
            self.position = RelativePosition(side, arguments["max_relative_position"], features)
        self.proj = nn.Linear(width, width)
        self.ffn_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.head_scale = bool(arguments["change_qkv"])
        self.drop, self.attn_drop = float(arguments["drop_rate"]), float(arguments["attn_drop_rate"])
        self.drop_path = drop_path

    def attend(self, x: Tensor) -> Tensor:
        """Attention over x of shape (N, T, embed)."""
        q, k, v = self.split(self.qkv(x)).unbind(0)
        # Without change_qkv upstream scales by the sampled width over the heads, not by a head's width.
        scale = (q.shape[-1] if self.head_scale else x.shape[-1] // q.shape[1]) ** -0.5
        scores = q @ k.transpose(-1, -2)
        if self.position is None:
            weights = F.dropout((scores * scale).softmax(-1), self.attn_drop, self.training)
            y = weights @ v
        else:
            keys, values = self.position(x)
            scores = (scores + torch.einsum("nhqd,qkd->nhqk", q, keys)) * scale
            weights = F.dropout(scores.softmax(-1), self.attn_drop, self.training)
            y = weights @ v + torch.einsum("nhqk,qkd->nhqd", weights, values)
        return F.dropout(self.proj(y.transpose(1, 2).flatten(2)), self.drop, self.training)

    def feed(self, x: Tensor) -> Tensor:
        """Feed-forward network over x of shape (N, T, embed)."""
        hidden = F.dropout(F.gelu(self.fc1(x)), self.drop, self.training)
        return F.dropout(self.fc2(hidden), self.drop, self.training)

    def _survive(self, branch: Tensor) -> Tensor:
        if not self.training or not self.drop_path:
            return branch
        keep = 1 - self.drop_path
        return branch * (torch.rand(len(branch), 1, 1, device=branch.device) < keep) / keep

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, embed) to (N, T, embed)."""
        x = x + self._survive(self.attend(self.attn_norm(x)))
        return x + self._survive(self.feed(self.ffn_norm(x)))


class ClassToken(nn.Module):
    """Puts the class token before the patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, patches, embed) to (N, 1 + patches, embed)."""
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)


class PositionEmbedding(nn.Module):
    """Adds a learned embedding to every position."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(1, positions, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, embed) to (N, T, embed)."""
        return x + self.embedding


class VisionTransformer(nn.Module):
    """The full network; arguments are upstream's."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        width, depth, size = arguments["embed_dim"], arguments["depth"], arguments["patch_size"]
        patches = (arguments["img_size"] // size) ** 2
        self.patch_embed = nn.Conv2d(arguments["in_chans"], width, size, size)
        self.cls_token = ClassToken(width)
        self.pos_embed = PositionEmbedding(1 + patches, width) if arguments["abs_pos"] else None
        rates = [arguments["drop_path_rate"] * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.Sequential(*(Block(arguments, rate) for rate in rates))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, arguments["num_classes"])
        self.gp = bool(arguments["gp"])
        self.drop = float(arguments["drop_rate"])

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images (N, in_chans, img_size, img_size) to pooled features (N, embed)."""
        x = self.cls_token(self.patch_embed(x).flatten(2).transpose(1, 2))
        if self.pos_embed is not None:
            x = self.pos_embed(x)
        x = self.norm(self.blocks(F.dropout(x, self.drop, self.training)))
        return x[:, 1:].mean(1) if self.gp else x[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_chans, img_size, img_size) to logits (N, num_classes)."""
        return self.head(self.forward_features(x))  # type: ignore[no-any-return]


def build(
    img_size: int = 224,
    patch_size: int = 16,
    in_chans: int = 3,
    num_classes: int = 1000,
    embed_dim: int = 256,
    depth: int = 14,
    num_heads: int = 4,
    mlp_ratio: float = 4.0,
    qkv_bias: bool = True,
    drop_rate: float = 0.0,
    attn_drop_rate: float = 0.0,
    drop_path_rate: float = 0.1,
    pre_norm: bool = True,
    scale: bool = False,
    gp: bool = True,
    relative_position: bool = True,
    change_qkv: bool = True,
    abs_pos: bool = True,
    max_relative_position: int = 14,
    search_space: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[nn.Module, SubnetSpace, dict[str, Elastic]]:
    """Return the plain network at full size, its space, and what in it is elastic.

    Arguments are `Vision_TransformerSuper`'s own; the defaults are AutoFormer-T's. `search_space`
    lists the choices of embed_dim, num_heads, mlp_ratio and depth; default: the published ones for
    the published sizes, else every multiple of 8 (embed_dim), of a half (mlp_ratio) and of one.

    Raises:
        ValueError: a variant that was never published (post-norm, scaled), or sizes that do not fit.
    """
    arguments = {k: v for k, v in locals().items() if k != "search_space"}
    if not pre_norm or scale:
        raise ValueError("autoformer: only pre_norm=True and scale=False were ever published")
    if img_size % patch_size or embed_dim % num_heads:
        raise ValueError(
            f"autoformer: img_size {img_size} must be a multiple of patch_size {patch_size}, and "
            f"embed_dim {embed_dim} of num_heads {num_heads}"
        )
    if change_qkv and relative_position and embed_dim // num_heads != 64:
        raise ValueError(
            f"autoformer: with change_qkv a head has 64 features, so embed_dim must be 64 * num_heads, "
            f"got {embed_dim} and {num_heads}"
        )
    choices = SearchSpace.of(embed_dim, num_heads, mlp_ratio, depth, search_space)
    layout = Layout(choices, embed_dim, num_heads, depth, change_qkv, relative_position)
    return VisionTransformer(arguments), layout.space(), _elastic(depth, change_qkv, abs_pos)


def _elastic(depth: int, change_qkv: bool, abs_pos: bool) -> dict[str, Elastic]:
    embed = "embed"
    elastic = {
        "patch_embed": WeightSlice.on(out=embed),
        "cls_token": ParameterSlice.on(features=embed),
        "blocks": LayerSelect.on(**{str(i): f"block{i}.keep" for i in range(depth)}),
        "norm": LayerNormSlice.on(features=embed),
        "head": WeightSlice.on(in_=embed),
    }
    if abs_pos:
        elastic["pos_embed"] = ParameterSlice.on(features=embed)
    for i in range(depth):
        path, block = f"blocks.{i}", f"block{i}"
        elastic[f"{path}.attn_norm"] = elastic[f"{path}.ffn_norm"] = LayerNormSlice.on(features=embed)
        qkv = {"in_": embed, "out": f"{block}.qkv"} if change_qkv else {"in_": embed}
        proj = {"in_": f"{block}.attention", "out": embed} if change_qkv else {"out": embed}
        elastic[f"{path}.qkv"] = WeightSlice.on(**qkv)
        elastic[f"{path}.split"] = ElasticAttribute.on(heads=f"{block}.heads")
        elastic[f"{path}.proj"] = WeightSlice.on(**proj)
        elastic[f"{path}.fc1"] = WeightSlice.on(in_=embed, out=f"{block}.mlp")
        elastic[f"{path}.fc2"] = WeightSlice.on(in_=f"{block}.mlp", out=embed)
    return elastic


_NAMES = {
    "patch_embed_super.proj.": "patch_embed.",
    ".attn.rel_pos_embed_k.embeddings_table_v": ".position.key_vertical",
    ".attn.rel_pos_embed_k.embeddings_table_h": ".position.key_horizontal",
    ".attn.rel_pos_embed_v.embeddings_table_v": ".position.value_vertical",
    ".attn.rel_pos_embed_v.embeddings_table_h": ".position.value_horizontal",
    ".attn.qkv.": ".qkv.",
    ".attn.proj.": ".proj.",
    ".attn_layer_norm.": ".attn_norm.",
    ".ffn_layer_norm.": ".ffn_norm.",
}
_PARAMETERS = {"cls_token": "cls_token.token", "pos_embed": "pos_embed.embedding"}


def rename(key: str) -> str:
    """Map an upstream name to the plain network's."""
    for theirs, ours in _NAMES.items():
        key = key.replace(theirs, ours)
    return _PARAMETERS.get(key, key)


def looks(keys: Keys) -> bool:
    """Tell whether the names are of an AutoFormer supernet."""
    return keys.some(r"^patch_embed_super\.")


FAMILY = Family(
    build,
    rename,
    source="microsoft/Cream, AutoFormer",
    licence="MIT",
    looks=looks,
    checkpoints=("supernet-tiny.pth", "supernet-small.pth", "supernet-base.pth"),
)
