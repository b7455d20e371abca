"""AutoFormer: a vision transformer of elastic depth, embedding width, heads and feed-forward ratio.

Source: AutoFormer (Chen et al., ICCV 2021); microsoft/Cream, AutoFormer/model/supernet_transformer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import Built, Family
from ofa_adapters.layout import Layout, block_slot, choices, is_list, plain
from ofa_adapters.networks.vision_transformer import (
    HEAD_FEATURES,
    PARAMETERS,
    TransformerBlock,
    VisionTransformer,
    drop_path_rates,
    transformer_elastic,
)
from subnetact.errors import SpecError
from subnetact.operators import Elastic, ElasticAttribute, LayerSelect
from subnetact.space import Axis, AxisValues, Slot

EPS = 1e-5
"""The eps of every LayerNorm."""

RELEASED: Mapping[str, Mapping[str, Any]] = {
    "AutoFormer-T": {
        "layer_num": 13,
        "embed_dim": [192] * 13,
        "num_heads": [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4, 3, 3],
        "mlp_ratio": [3.5, 3.5, 3.0, 3.5, 3.0, 3.0, 4.0, 4.0, 3.5, 4.0, 3.5, 4.0, 3.5],
    },
    "AutoFormer-S": {
        "layer_num": 13,
        "embed_dim": [384] * 13,
        "num_heads": [6, 6, 5, 7, 5, 5, 5, 6, 6, 7, 7, 6, 7],
        "mlp_ratio": [3.0, 3.5, 3.0, 3.5, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 3.5, 4.0],
    },
    "AutoFormer-B": {
        "layer_num": 14,
        "embed_dim": [576] * 14,
        "num_heads": [9, 9, 9, 9, 9, 10, 9, 9, 10, 9, 10, 9, 9, 10],
        "mlp_ratio": [3.5, 3.5, 4.0, 3.5, 4.0, 3.5, 3.5, 3.0, 4.0, 4.0, 3.0, 4.0, 3.0, 3.5],
    },
}
"""Configurations of the subnets that were released with the paper; `space.parse` takes their names."""


@dataclass(frozen=True)
class SearchSpace:
    """The choices of an AutoFormer supernet, each ascending; heads and ratios are per block."""

    embed_dim: tuple[int, ...]
    num_heads: tuple[int, ...]
    mlp_ratio: tuple[float, ...]
    depth: tuple[int, ...]

    @classmethod
    def given(cls, lists: Mapping[str, Sequence[Any]]) -> SearchSpace:
        """Read upstream's search space."""
        names = ("embed_dim", "num_heads", "mlp_ratio", "depth")
        if set(lists) != set(names):
            raise SpecError(f"autoformer: search_space has the keys {', '.join(names)}, got {sorted(lists)}")
        return cls(*(choices(list(lists[name])) for name in names))

    @classmethod
    def of_size(cls, embed: int, heads: int, ratio: float, depth: int) -> SearchSpace:
        """Return the published choices of a full network of this size, else a regular grid."""
        halves = tuple(i / 2 for i in range(1, int(ratio * 2) + 1))
        regular = cls(
            tuple(range(8, embed + 1, 8)) or (embed,),
            tuple(range(1, heads + 1)),
            halves if ratio in halves else (*halves, ratio),
            tuple(range(1, depth + 1)),
        )
        return PUBLISHED.get((embed, heads, ratio, depth), regular)


PUBLISHED: Mapping[tuple[int, int, float, int], SearchSpace] = {
    # The released AutoFormer-T has blocks of ratio 3, which are missing in its published search space.
    (256, 4, 4.0, 14): SearchSpace((192, 216, 240), (3, 4), (3.0, 3.5, 4.0), (12, 13, 14)),
    (448, 7, 4.0, 14): SearchSpace((320, 384, 448), (5, 6, 7), (3.0, 3.5, 4.0), (12, 13, 14)),
    (640, 10, 4.0, 16): SearchSpace((528, 576, 624), (9, 10), (3.0, 3.5, 4.0), (14, 15, 16)),
}


@dataclass(frozen=True)
class AutoFormerLayout(Layout):
    """The choices of a supernet of `depth` blocks, whose attributes are those of `build`."""

    search: SearchSpace
    depth: int
    change_qkv: bool
    abs_pos: bool

    family = "autoformer"
    keys: ClassVar = {"layer_num": "depth", "embed_dim": "embed", "num_heads": "heads", "mlp_ratio": "mlp"}

    def axes(self) -> list[Axis]:
        def per_block(name: str, legal: Sequence[float]) -> Axis:
            depths = self.search.depth
            return Axis(name, tuple(block_slot(f"block{i}", legal, depths, i + 1) for i in range(self.depth)))

        return [
            Axis("depth", (Slot("blocks", self.search.depth),)),
            Axis("embed", (Slot("stream", self.search.embed_dim),)),
            per_block("heads", self.search.num_heads),
            per_block("mlp", self.search.mlp_ratio),
        ]

    def sizes(self, values: AxisValues) -> dict[str, int]:
        (depth,), (embed,) = values["depth"], values["embed"]
        sizes = {"embed": embed}
        for i in range(self.depth):
            kept = i < depth
            heads = values["heads"][i] if kept else 0
            sizes[f"block{i}.keep"] = int(kept)
            sizes[f"block{i}.heads"] = heads
            sizes[f"block{i}.attention"] = HEAD_FEATURES * heads
            sizes[f"block{i}.qkv"] = 3 * HEAD_FEATURES * heads
            sizes[f"block{i}.mlp"] = int(embed * values["mlp"][i]) if kept else 0
        return sizes

    def parse(self, config: Any) -> dict[str, Any]:
        """Read upstream's dictionary, its search's tuple, or a name in `RELEASED`."""
        if isinstance(config, str):
            if config not in RELEASED:
                raise SpecError(
                    f"autoformer: {config!r} is no released subnet; choose from {', '.join(RELEASED)}"
                )
            config = RELEASED[config]
        if is_list(config):
            config = self._from_tuple(plain(config))
        given = self.entries(config)
        depth = given["layer_num"]
        embed = given["embed_dim"] if is_list(given["embed_dim"]) else [given["embed_dim"]]
        if not embed or any(width != embed[0] for width in embed):
            known = ", ".join(map(str, self.search.embed_dim))
            raise SpecError(f"autoformer: embed_dim is one of {known}, the same in every block, got {embed}")
        return {
            "depth": depth,
            "embed": embed[0],
            "heads": self._per_block("num_heads", given["num_heads"], depth),
            "mlp": self._per_block("mlp_ratio", given["mlp_ratio"], depth),
        }

    def _from_tuple(self, values: Sequence[Any]) -> dict[str, Any]:
        depth = values[0] if values else None
        if not isinstance(depth, int) or len(values) != 2 + 2 * depth:
            raise SpecError(
                "autoformer: a tuple is (depth, an mlp_ratio per block, a num_heads per block, embed_dim), "
                f"got {len(values)} values"
            )
        ratios, heads = list(values[1 : 1 + depth]), list(values[1 + depth : -1])
        return {"layer_num": depth, "embed_dim": values[-1], "num_heads": heads, "mlp_ratio": ratios}

    def _per_block(self, key: str, values: Any, depth: Any) -> Any:
        if not is_list(values):
            return values
        if depth not in self.search.depth:
            return None  # The space refuses the depth first.
        if len(values) != depth:
            raise SpecError(f"autoformer: {key} has one value per block, {depth}, got {len(values)}")
        return [*values, *[None] * (self.depth - len(values))]

    def format(self, values: AxisValues) -> dict[str, Any]:
        (depth,), (embed,) = values["depth"], values["embed"]
        heads, ratios = (list(values[name][:depth]) for name in ("heads", "mlp"))
        return {"layer_num": depth, "embed_dim": [embed] * depth, "num_heads": heads, "mlp_ratio": ratios}

    def elastic(self) -> dict[str, Elastic]:
        names = [f"block{i}" for i in range(self.depth)]
        blocks = [(f"{b}.qkv", f"{b}.attention", f"{b}.mlp") for b in names]
        fixed = [(None, None, neurons) for _, _, neurons in blocks]
        elastic = transformer_elastic("embed", blocks if self.change_qkv else fixed)
        elastic["blocks"] = LayerSelect.on(**{str(i): f"{b}.keep" for i, b in enumerate(names)})
        elastic |= {f"blocks.{i}.split": ElasticAttribute.on(heads=f"{b}.heads") for i, b in enumerate(names)}
        if not self.abs_pos:
            del elastic["pos_embed"]
        return elastic


class InterleavedLinear(nn.Linear):
    """A linear layer whose weight interleaves the queries, keys and values: q0, k0, v0, q1, k1, v1, ...

    The bias is not interleaved, so the bias element that a key or value gets depends on the number of outputs
    that a subnet keeps. Upstream trained its supernets in this way (AutoFormer/model/module/qkv_super.py).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, T, in_features) to (N, T, 3, out_features / 3): queries, keys, values on the third axis."""
        # One product per kind with every third row of the weight, which is read in place.
        weight = self.weight.view(-1, 3, self.weight.shape[1]).permute(1, 2, 0)
        rows = input.reshape(1, -1, input.shape[-1]).expand(3, -1, -1)
        if self.bias is None:
            y = torch.bmm(rows, weight)
        else:
            y = torch.baddbmm(self.bias.view(3, 1, -1), rows, weight)
        return y.view(3, input.shape[0], input.shape[1], -1).permute(1, 2, 0, 3)


class SplitHeads(nn.Module):
    """Splits queries, keys and values into attention heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, 3 * features), or (N, T, 3, features), to (3, N, heads, T, features / heads)."""
        return x.view(x.shape[0], x.shape[1], 3, self.heads, -1).permute(2, 0, 3, 1, 4)


class RelativePosition(nn.Module):
    """Embeddings of the vertical and horizontal distance between two patches, for keys and for values.

    For a query at token i, the embedding of its distance to token j is added to the key of token j, and
    another one to the value of token j. Upstream looks up both for every pair of tokens, in two tables of
    shape (T, T, features). No such table is made here. Patches lie on lines, which are the rows and
    columns of the image, and the embeddings of a pair depend only on the lines of its patches. So each
    query has one score per line, which is added to the scores of all keys on that line; and the attention
    weights are summed per line before they are multiplied with the embeddings for values. Both happen
    inside the attention: the queries get their scores as further features; the keys and values get
    further features, which are 1 for their lines and 0 for all others.

    The image has `side` patches per side; distances beyond `reach` share an embedding.
    """

    def __init__(self, side: int, reach: int, features: int) -> None:
        super().__init__()
        for name in ("key_vertical", "key_horizontal", "value_vertical", "value_horizontal"):
            self.register_parameter(name, nn.Parameter(torch.randn(2 * reach + 2, features) * 0.02))
        line = torch.arange(side)
        distance = (line[None, :] - line[:, None]).clamp(-reach, reach) + reach + 1
        distance = F.pad(distance, (1, 0, 1, 0))  # The class token is line 0; its distances are entry 0.
        patch = torch.arange(side * side)
        row, column = (F.pad(place + 1, (1, 0)) for place in (patch // side, patch % side))
        # The entries of the tables, vertical before horizontal, for token i and each line: (T, lines).
        entries = torch.cat([distance[row], distance[column] + 2 * reach + 2], 1)
        lines = torch.cat([F.one_hot(row, side + 1), F.one_hot(column, side + 1)], 1)
        self.register_buffer("entries", entries, persistent=False)
        self.register_buffer("lines", lines.to(torch.get_default_dtype()), persistent=False)

    def extend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append the features of the lines to queries, keys and values (N, heads, T, features)."""
        entries, lines = self._expanded(q)
        table = torch.cat([self.key_vertical, self.key_horizontal])  # type: ignore[list-item]
        scores = (q @ table.transpose(0, 1)).gather(-1, entries)
        lines = lines.to(q.dtype)
        return torch.cat([q, scores], -1), torch.cat([k, lines], -1), torch.cat([v, lines], -1)

    def collect(self, y: Tensor) -> Tensor:
        """Map the result of the attention (N, heads, T, features + lines) to (N, heads, T, features)."""
        table = torch.cat([self.value_vertical, self.value_horizontal])  # type: ignore[list-item]
        entries, _ = self._expanded(y)
        features, sums = y[..., : table.shape[1]], y[..., table.shape[1] :]
        by_entry = torch.zeros_like(sums[..., :1]).expand(-1, -1, -1, table.shape[0])
        by_entry = by_entry.scatter_add(-1, entries, sums)
        return features + by_entry @ table

    def _expanded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = (x.shape[0], x.shape[1], -1, -1)
        return self.entries.expand(shape), self.lines.expand(shape)  # type: ignore[operator]


class AutoFormerBlock(TransformerBlock):
    """A block whose attention may have relative positions, from upstream's constructor arguments."""

    def __init__(self, arguments: Mapping[str, Any], drop_path: float) -> None:
        width, heads = arguments["embed_dim"], arguments["num_heads"]
        linear = InterleavedLinear if arguments["change_qkv"] else nn.Linear
        super().__init__(
            linear(width, 3 * width, arguments["qkv_bias"]),
            int(width * arguments["mlp_ratio"]),
            EPS,
            arguments["drop_rate"],
            arguments["attn_drop_rate"],
            drop_path,
        )
        self.split = SplitHeads(heads)
        self.position = None
        if arguments["relative_position"]:
            side = arguments["img_size"] // arguments["patch_size"]
            self.position = RelativePosition(side, arguments["max_relative_position"], width // heads)
        self.head_scale = bool(arguments["change_qkv"])

    def mix(self, x: Tensor) -> Tensor:
        """Map (N, T, embed) to the concatenated results of all heads, (N, T, features)."""
        q, k, v = self.split(self.qkv(x)).unbind(0)
        # Without change_qkv upstream divides by the square root of the subnet's embedding width per head,
        # not of the number of features that a head really has.
        scale = (q.shape[-1] if self.head_scale else x.shape[-1] // q.shape[1]) ** -0.5
        if self.position is not None:
            q, k, v = self.position.extend(q, k, v)
        dropped = self.attn_drop if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, scale=scale)
        if self.position is not None:
            y = self.position.collect(y)
        return y.transpose(1, 2).flatten(2)


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
) -> Built:
    """Build the family with the arguments of upstream's `Vision_TransformerSuper`, by default AutoFormer-T's.

    Args:
        mlp_ratio: ratio of the feed-forward width to the embedding width in the full network.
        qkv_bias: whether queries, keys and values have a bias.
        pre_norm: whether norms come before attention and feed-forward network; must be true.
        scale: whether upstream's scaling is on; must be false.
        gp: whether the classifier reads the mean over the patches. If false, it reads the class token.
        relative_position: whether there are relative position embeddings.
        change_qkv: whether the number of query, key and value features follows the number of heads.
        abs_pos: whether there are absolute position embeddings.
        max_relative_position: largest distance with a relative position embedding of its own, in patches.
        search_space: lists of choices for `embed_dim`, `num_heads`, `mlp_ratio` and `depth`. If None, those
            of the published supernet of this size; if none was published, all widths that are multiples of 8,
            all ratios that are multiples of 0.5, and all numbers of heads and blocks.
    """
    arguments = {k: v for k, v in locals().items() if k != "search_space"}
    if not pre_norm or scale:
        raise SpecError("autoformer: only pre_norm=True and scale=False were ever published")
    if img_size % patch_size or embed_dim % num_heads:
        raise SpecError(
            f"autoformer: img_size {img_size} must be a multiple of patch_size {patch_size}, and "
            f"embed_dim {embed_dim} of num_heads {num_heads}"
        )
    if change_qkv and relative_position and embed_dim // num_heads != HEAD_FEATURES:
        raise SpecError(
            f"autoformer: with change_qkv a head has {HEAD_FEATURES} features, so embed_dim must be "
            f"{HEAD_FEATURES} * num_heads, got {embed_dim} and {num_heads}"
        )
    if search_space is None:
        search = SearchSpace.of_size(embed_dim, num_heads, mlp_ratio, depth)
    else:
        search = SearchSpace.given(search_space)
    if not change_qkv:
        # Heads share all features; the tables of relative positions have a fixed number of features per head.
        dividing = tuple(heads for heads in search.num_heads if embed_dim % heads == 0)
        search = replace(search, num_heads=(num_heads,) if relative_position else dividing)
    layout = AutoFormerLayout(search, depth, change_qkv, abs_pos)
    blocks = [AutoFormerBlock(arguments, rate) for rate in drop_path_rates(drop_path_rate, depth)]
    network = VisionTransformer(blocks, arguments, EPS, drop_rate, positions=abs_pos, mean=gp)
    return layout.built(network)


_NAMES = {
    "patch_embed_super.proj.": "patch_embed.",
    ".attn.rel_pos_embed_k.embeddings_table_v": ".position.key_vertical",
    ".attn.rel_pos_embed_k.embeddings_table_h": ".position.key_horizontal",
    ".attn.rel_pos_embed_v.embeddings_table_v": ".position.value_vertical",
    ".attn.rel_pos_embed_v.embeddings_table_h": ".position.value_horizontal",
    ".attn.qkv.": ".qkv.",
    ".attn.proj.": ".proj.",
    ".attn_layer_norm.": ".norm1.",
    ".ffn_layer_norm.": ".norm2.",
}


def rename(key: str) -> str:
    """Return the plain network's name for a name in upstream's state_dict."""
    for theirs, ours in _NAMES.items():
        key = key.replace(theirs, ours)
    return PARAMETERS.get(key, key)


FAMILY = Family(
    build,
    rename,
    source="microsoft/Cream, AutoFormer",
    licence="MIT",
    recognises=lambda keys: keys.some(r"^patch_embed_super\."),
    checkpoints=("supernet-tiny.pth", "supernet-small.pth", "supernet-base.pth"),
)
