"""AutoFormer: a vision transformer of elastic depth, embedding width, heads and feed-forward ratio.

Source: AutoFormer (Chen et al., ICCV 2021); microsoft/Cream, AutoFormer/model/supernet_transformer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import Built, Family
from ofa_adapters.layout import Layout, block_axis, choices
from ofa_adapters.networks import vision_transformer
from ofa_adapters.networks.vision_transformer import HEAD_FEATURES, VisionTransformer, transformer_elastic
from subnetact.errors import SpecError
from subnetact.operators import Elastic, LayerSelect
from subnetact.space import Axis, AxisValues

EPS = 1e-5
"""The eps of every LayerNorm."""

CHOICES = ("embed_dim", "num_heads", "mlp_ratio", "depth")
"""The keys of a search space."""
PUBLISHED: Mapping[tuple[int, int, float, int], Sequence[Sequence[float]]] = {
    # The released AutoFormer-T has blocks of ratio 3, which are missing in its published search space.
    (256, 4, 4.0, 14): ((192, 216, 240), (3, 4), (3.0, 3.5, 4.0), (12, 13, 14)),
    (448, 7, 4.0, 14): ((320, 384, 448), (5, 6, 7), (3.0, 3.5, 4.0), (12, 13, 14)),
    (640, 10, 4.0, 16): ((528, 576, 624), (9, 10), (3.0, 3.5, 4.0), (14, 15, 16)),
}
"""The published search spaces, in the order of `CHOICES`, by the sizes of the full network."""


def regular_space(embed_dim: int, num_heads: int, mlp_ratio: float, depth: int) -> Sequence[Sequence[float]]:
    """Return a regular grid of choices up to the sizes of the full network, in the order of `CHOICES`."""
    ratios = [*(i / 2 for i in range(1, int(mlp_ratio * 2) + 1)), mlp_ratio]
    return range(8, embed_dim + 1, 8), range(1, num_heads + 1), ratios, range(1, depth + 1)


@dataclass(frozen=True)
class AutoFormerLayout(Layout):
    """The choices of a supernet, each ascending; heads and ratios are per block."""

    embed_dim: tuple[int, ...]
    num_heads: tuple[int, ...]
    mlp_ratio: tuple[float, ...]
    depth: tuple[int, ...]
    blocks: int
    positions: bool

    family = "autoformer"
    keys: ClassVar = {"layer_num": "depth", "embed_dim": "embed", "num_heads": "heads", "mlp_ratio": "mlp"}

    def axes(self) -> list[Axis]:
        depth = Axis.uniform("depth", ["blocks"], self.depth)
        places = [(0, i + 1) for i in range(self.blocks)]
        heads = block_axis("heads", self.num_heads, depth, places)
        mlp = block_axis("mlp", self.mlp_ratio, depth, places)
        return [depth, Axis.uniform("embed", ["stream"], self.embed_dim), heads, mlp]

    def sizes(self, values: AxisValues) -> dict[str, int]:
        (depth,), (embed,) = values["depth"], values["embed"]
        sizes = {"embed": embed}
        for i in range(self.blocks):
            kept = i < depth
            features = HEAD_FEATURES * values["heads"][i] if kept else 0
            sizes[f"block{i}.keep"] = int(kept)
            sizes[f"block{i}.attention"] = features
            sizes[f"block{i}.qkv"] = 3 * features
            sizes[f"block{i}.mlp"] = int(embed * values["mlp"][i]) if kept else 0
        return sizes

    def parse(self, config: Any) -> dict[str, Any]:
        given = self.entries(config)
        depth = given["layer_num"]
        embed = given["embed_dim"] if isinstance(given["embed_dim"], list) else [given["embed_dim"]]
        if not embed or any(width != embed[0] for width in embed):
            known = ", ".join(map(str, self.embed_dim))
            raise SpecError(f"autoformer: embed_dim is one of {known}, the same in every block, got {embed}")
        return {
            "depth": depth,
            "embed": embed[0],
            "heads": self._per_block("num_heads", given["num_heads"], depth),
            "mlp": self._per_block("mlp_ratio", given["mlp_ratio"], depth),
        }

    def _per_block(self, key: str, values: Any, depth: Any) -> Any:
        if not isinstance(values, list):
            return values
        if depth not in self.depth:
            return None  # The space refuses the depth first.
        if len(values) != depth:
            raise SpecError(f"autoformer: {key} has one value per block, {depth}, got {len(values)}")
        return [*values, *[None] * (self.blocks - len(values))]

    def format(self, values: AxisValues) -> dict[str, Any]:
        (depth,), (embed,) = values["depth"], values["embed"]
        heads, ratios = (list(values[name][:depth]) for name in ("heads", "mlp"))
        return {"layer_num": depth, "embed_dim": [embed] * depth, "num_heads": heads, "mlp_ratio": ratios}

    def elastic(self) -> dict[str, Elastic]:
        names = [f"block{i}" for i in range(self.blocks)]
        blocks = [(f"{b}.qkv", f"{b}.attention", f"{b}.mlp") for b in names]
        elastic = transformer_elastic("embed", blocks, self.positions)
        elastic["blocks"] = LayerSelect.on(**{str(i): f"{b}.keep" for i, b in enumerate(names)})
        return elastic


class InterleavedLinear(nn.Linear):
    """A linear layer whose weight, but not its bias, interleaves queries, keys and values: q0, k0, v0, q1."""

    # So the bias that a key gets depends on the number of outputs that a subnet keeps; upstream trained its
    # supernets in this way (AutoFormer/model/module/qkv_super.py).

    def product_weight(self) -> Tensor:
        """Return the weight of the ordinary linear layer that has the same outputs, on a flat third axis."""
        return self.weight.view(-1, 3, self.weight.shape[1]).transpose(0, 1).flatten(0, 1)

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


class RelativePosition(nn.Module):
    """Embeddings, for keys and values, of the vertical and horizontal distance of patches, up to `reach`."""

    # Upstream makes tables of shape (T, T, features). They are not needed: the embeddings of a pair depend on
    # the rows and columns (lines) of its patches alone. Queries get their scores with every line as further
    # features; keys and values get features that are 1 for their lines and 0 for all others.

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
        change_qkv: whether the number of query, key and value features follows the number of heads; must be
            true.
        abs_pos: whether there are absolute position embeddings.
        max_relative_position: largest distance with a relative position embedding of its own, in patches.
        search_space: lists of choices for `embed_dim`, `num_heads`, `mlp_ratio` and `depth`. If None, those
            of the published supernet of this size; if none was published, all widths that are multiples of 8,
            all ratios that are multiples of 0.5, and all numbers of heads and blocks.
    """
    arguments = dict(locals())
    if not pre_norm or scale or not change_qkv:
        raise SpecError("autoformer: only pre_norm=True, scale=False, change_qkv=True were ever published")
    full = embed_dim, num_heads, mlp_ratio, depth
    lists = PUBLISHED.get(full) or regular_space(*full)
    if search_space is not None:
        if set(search_space) != set(CHOICES):
            got = sorted(search_space)
            raise SpecError(f"autoformer: search_space has the keys {', '.join(CHOICES)}, got {got}")
        lists = [search_space[name] for name in CHOICES]
    embeds, heads, ratios, depths = map(choices, lists)
    layout = AutoFormerLayout(embeds, heads, ratios, depths, depth, abs_pos)
    position: Any = partial(RelativePosition, img_size // patch_size, max_relative_position, HEAD_FEATURES)
    settings = (position if relative_position else lambda: None), abs_pos, gp
    qkv, drops = partial(InterleavedLinear, bias=qkv_bias), (drop_rate, drop_rate, 0.0)
    return layout.built(VisionTransformer(arguments, qkv, mlp_ratio, EPS, *drops, *settings))


TABLE, HIDDEN = "blocks.0.position.key_vertical", r"blocks.\d+.fc1.weight"

FAMILY = Family(
    build,
    names=(
        ("patch_embed_super.proj", "patch_embed"),
        ("blocks.#.attn.qkv", "blocks.#.qkv"),
        ("blocks.#.attn.proj", "blocks.#.proj"),
        ("blocks.#.attn_layer_norm", "blocks.#.norm1"),
        ("blocks.#.ffn_layer_norm", "blocks.#.norm2"),
        *(
            (f"blocks.#.attn.rel_pos_embed_{of}.embeddings_table_{way}", f"blocks.#.position.{name}")
            for name in ("key_vertical", "key_horizontal", "value_vertical", "value_horizontal")
            for of, way in [[word[0] for word in name.split("_")]]
        ),
    ),
    source="microsoft/Cream, AutoFormer",
    licence="MIT",
    recognises=lambda keys: keys.have(r"^patch_embed_super\."),
    shown={
        **vision_transformer.SHOWN,
        "mlp_ratio": lambda shapes, _: shapes.size(HIDDEN) / shapes.size(HIDDEN, 1),
        "qkv_bias": lambda shapes, _: shapes.layers("blocks") > 0 and "blocks.0.qkv.bias" in shapes,
        "relative_position": lambda shapes, _: shapes.layers("blocks") > 0 and TABLE in shapes,
        "max_relative_position": lambda shapes, _: shapes.size(TABLE) // 2 - 1,
        "abs_pos": lambda shapes, _: shapes.layers("blocks") > 0 and "pos_embed" in shapes,
    },
    checkpoints=("supernet-tiny.pth", "supernet-small.pth", "supernet-base.pth"),
)
