"""AutoFormer: a vision transformer of elastic depth, embedding width, heads and feed-forward ratio.

Source: AutoFormer (Chen et al., ICCV 2021); microsoft/Cream, AutoFormer/model/supernet_transformer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import Family, Keys
from ofa_adapters.notation import choices, is_list, plain
from subnetact.errors import SpecError
from subnetact.operators import (
    Elastic,
    ElasticAttribute,
    LayerNormSlice,
    LayerSelect,
    ParameterSlice,
    WeightSlice,
)
from subnetact.space import Axis, AxisValues, Slot, SubnetSpace, UsedWhen

HEAD_FEATURES = 64
KEYS = ("layer_num", "embed_dim", "num_heads", "mlp_ratio")

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
    """The choices of an AutoFormer supernet, each ascending.

    Attributes:
        embed_dim: widths of the embedding.
        num_heads: numbers of attention heads per block.
        mlp_ratio: ratios of the feed-forward width to the embedding width, per block.
        depth: numbers of blocks.
    """

    embed_dim: tuple[int, ...]
    num_heads: tuple[int, ...]
    mlp_ratio: tuple[float, ...]
    depth: tuple[int, ...]

    @classmethod
    def of(
        cls, embed: int, heads: int, ratio: float, depth: int, given: Mapping[str, Sequence[Any]] | None
    ) -> SearchSpace:
        """Return the choices of a supernet: the given ones, else the published ones, else a regular grid.

        Args:
            embed: embedding width of the full network.
            heads: heads of the full network.
            ratio: feed-forward ratio of the full network.
            depth: blocks of the full network.
            given: choices for each of the four axes. If None, those of the published supernet of this size;
                if no supernet of this size was published, all widths that are multiples of 8, all ratios that
                are multiples of 0.5, and all numbers of heads and blocks.

        Returns:
            The choices.

        Raises:
            SpecError: the given choices do not have exactly the four axes.
        """
        if given is not None:
            names = ("embed_dim", "num_heads", "mlp_ratio", "depth")
            if set(given) != set(names):
                raise SpecError(
                    f"autoformer: search_space has the keys {', '.join(names)}, got {sorted(given)}"
                )
            return cls(*(choices(list(given[name])) for name in names))
        halves = tuple(i / 2 for i in range(1, int(ratio * 2) + 1)) or (ratio,)
        regular = cls(
            tuple(range(8, embed + 1, 8)) or (embed,),
            tuple(range(1, heads + 1)),
            halves if halves[-1] == ratio else (*halves, ratio),
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
class AutoFormerLayout:
    """What the choices of an AutoFormer supernet mean in sizes.

    Attributes:
        choices: the choices of every axis.
        embed_dim: embedding width of the full network.
        num_heads: heads of the full network.
        depth: blocks of the full network.
        change_qkv: whether a head always has 64 features. If false, the heads share all features.
        relative_position: whether there are relative position embeddings, whose tables have a fixed number of
            features per head.
    """

    choices: SearchSpace
    embed_dim: int
    num_heads: int
    depth: int
    change_qkv: bool
    relative_position: bool

    def heads(self) -> tuple[int, ...]:
        """Return the numbers of heads that the network can run, ascending."""
        if self.change_qkv:
            return self.choices.num_heads
        if self.relative_position:
            return (self.num_heads,)
        return tuple(h for h in self.choices.num_heads if self.embed_dim % h == 0)

    def sizes(self, values: AxisValues) -> dict[str, int]:
        """Return the size of every dimension for the values of the axes."""
        (depth,), (embed,) = values["depth"], values["embed"]
        sizes: dict[str, Any] = {"embed": embed}
        for i in range(self.depth):
            heads: Any = values["heads"][i]
            ratio: Any = values["mlp"][i]
            kept = i < depth
            attention = HEAD_FEATURES * heads if kept else 0
            sizes[f"block{i}.keep"] = kept
            sizes[f"block{i}.heads"] = heads if kept else 0
            sizes[f"block{i}.attention"] = attention
            sizes[f"block{i}.qkv"] = 3 * attention
            sizes[f"block{i}.mlp"] = int(embed * ratio) if kept else 0
        return sizes

    def space(self) -> SubnetSpace:
        """Return the search space, which reads and writes upstream's configurations."""
        depths = self.choices.depth
        slots: dict[str, list[Slot]] = {"heads": [], "mlp": []}
        for i in range(self.depth):
            keeping = tuple(d for d in depths if d > i)
            when = None if keeping == depths else UsedWhen("depth", 0, keeping)
            slots["heads"].append(Slot(f"block{i}", self.heads(), when))
            slots["mlp"].append(Slot(f"block{i}", self.choices.mlp_ratio, when))
        axes = [
            Axis("depth", (Slot("blocks", depths),)),
            Axis("embed", (Slot("stream", self.choices.embed_dim),)),
            *(Axis(name, tuple(found)) for name, found in slots.items()),
        ]
        return SubnetSpace("autoformer", axes, self.sizes, self.parse, self.format)

    def parse(self, config: Any) -> dict[str, Any]:
        """Return the values of the axes for a configuration.

        Args:
            config: upstream's dictionary, the tuple that upstream's evolution search writes, or the name of a
                released subnet, a key of `RELEASED`.

        Returns:
            The values of every axis.

        Raises:
            SpecError: the configuration has none of these forms.
        """
        if isinstance(config, str):
            if config not in RELEASED:
                raise SpecError(
                    f"autoformer: {config!r} is no released subnet; choose from {', '.join(RELEASED)}"
                )
            config = RELEASED[config]
        if is_list(config):
            config = self._from_tuple(plain(config))
        if not isinstance(config, Mapping) or set(config) != set(KEYS):
            got = sorted(map(str, config)) if isinstance(config, Mapping) else type(config).__name__
            raise SpecError(f"autoformer: a configuration has exactly the keys {', '.join(KEYS)}; got {got}")
        given = {key: plain(config[key]) for key in KEYS}
        depth = given["layer_num"]
        embed = given["embed_dim"] if is_list(given["embed_dim"]) else [given["embed_dim"]]
        if not embed or any(width != embed[0] for width in embed):
            known = ", ".join(map(str, self.choices.embed_dim))
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
        if depth not in self.choices.depth:
            return (
                self.heads()[0] if key == "num_heads" else self.choices.mlp_ratio[0]
            )  # the space refuses the depth
        if len(values) != depth:
            raise SpecError(f"autoformer: {key} has one value per block, {depth}, got {len(values)}")
        return [*values, *[None] * (self.depth - len(values))][: self.depth]

    def format(self, values: AxisValues) -> dict[str, Any]:
        """Return the values of the axes as an upstream configuration."""
        depth: Any = values["depth"][0]
        heads, ratios = (list(values[name][:depth]) for name in ("heads", "mlp"))
        embed = [values["embed"][0]] * depth
        return dict(zip(KEYS, (depth, embed, heads, ratios), strict=True))


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

    Args:
        side: number of patches per side of the image.
        reach: largest distance with an embedding of its own; longer distances share that embedding.
        features: number of features of one head.
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


def survive(branch: Tensor, rate: float, training: bool) -> Tensor:
    """Return a residual branch (N, T, width); in training, with a probability of `rate`, samples are zero."""
    if not training or not rate:
        return branch
    keep = 1 - rate
    return branch * (torch.rand(len(branch), 1, 1, device=branch.device) < keep) / keep


class AutoFormerBlock(nn.Module):
    """One pre-norm transformer block: attention and feed-forward network, each with a residual connection."""

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
        """Map (N, T, embed) to (N, T, embed) by attention, without the residual connection."""
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
        return F.dropout(self.proj(y.transpose(1, 2).flatten(2)), self.drop, self.training)

    def feed(self, x: Tensor) -> Tensor:
        """Map (N, T, embed) to (N, T, embed) by the feed-forward network, without the residual connection."""
        hidden = F.dropout(F.gelu(self.fc1(x)), self.drop, self.training)
        return F.dropout(self.fc2(hidden), self.drop, self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, embed) to (N, T, embed)."""
        x = x + survive(self.attend(self.attn_norm(x)), self.drop_path, self.training)
        return x + survive(self.feed(self.ffn_norm(x)), self.drop_path, self.training)


class ClassToken(nn.Module):
    """Adds the learned class token before the patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, patches, embed) to (N, 1 + patches, embed)."""
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)


class PositionEmbedding(nn.Module):
    """Adds a learned position embedding."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(1, positions, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, embed) to (N, T, embed)."""
        return x + self.embedding


class VisionTransformer(nn.Module):
    """The full network: patch embedding, class token, transformer blocks, and a linear classifier.

    Args:
        arguments: upstream's constructor arguments by name, as `build` documents them.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        width, depth, size = arguments["embed_dim"], arguments["depth"], arguments["patch_size"]
        patches = (arguments["img_size"] // size) ** 2
        self.patch_embed = nn.Conv2d(arguments["in_chans"], width, size, size)
        self.cls_token = ClassToken(width)
        self.pos_embed = PositionEmbedding(1 + patches, width) if arguments["abs_pos"] else None
        rates = [arguments["drop_path_rate"] * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.Sequential(*(AutoFormerBlock(arguments, rate) for rate in rates))
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
    """Build the full network, its search space and its elastic description.

    The arguments are those of upstream's `Vision_TransformerSuper`; the defaults are AutoFormer-T's.

    Args:
        img_size: height and width of the input in pixels.
        patch_size: height and width of a patch in pixels.
        in_chans: channels of the input.
        num_classes: number of classes.
        embed_dim: embedding width of the full network.
        depth: number of blocks of the full network.
        num_heads: number of heads per block of the full network.
        mlp_ratio: ratio of the feed-forward width to the embedding width in the full network.
        qkv_bias: whether queries, keys and values have a bias.
        drop_rate: dropout rate.
        attn_drop_rate: dropout rate of the attention weights.
        drop_path_rate: stochastic depth rate of the last block.
        pre_norm: whether norms come before attention and feed-forward network; must be true.
        scale: whether upstream's scaling is on; must be false.
        gp: whether the classifier reads the mean over the patches. If false, it reads the class token.
        relative_position: whether there are relative position embeddings.
        change_qkv: whether the number of query, key and value features follows the number of heads.
        abs_pos: whether there are absolute position embeddings.
        max_relative_position: largest distance with a relative position embedding of its own, in patches.
        search_space: lists of choices for `embed_dim`, `num_heads`, `mlp_ratio` and `depth`. If None, those
            that `SearchSpace.of` documents.

    Returns:
        The plain network at full size, its search space, and its elastic description.

    Raises:
        SpecError: the variant was never published (`pre_norm=False`, `scale=True`), or sizes do not fit
            together.
    """
    arguments = {k: v for k, v in locals().items() if k != "search_space"}
    if not pre_norm or scale:
        raise SpecError("autoformer: only pre_norm=True and scale=False were ever published")
    if img_size % patch_size or embed_dim % num_heads:
        raise SpecError(
            f"autoformer: img_size {img_size} must be a multiple of patch_size {patch_size}, and "
            f"embed_dim {embed_dim} of num_heads {num_heads}"
        )
    if change_qkv and relative_position and embed_dim // num_heads != 64:
        raise SpecError(
            f"autoformer: with change_qkv a head has 64 features, so embed_dim must be 64 * num_heads, "
            f"got {embed_dim} and {num_heads}"
        )
    searched = SearchSpace.of(embed_dim, num_heads, mlp_ratio, depth, search_space)
    layout = AutoFormerLayout(searched, embed_dim, num_heads, depth, change_qkv, relative_position)
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
    """Return the plain network's name for a name in upstream's state_dict."""
    for theirs, ours in _NAMES.items():
        key = key.replace(theirs, ours)
    return _PARAMETERS.get(key, key)


def recognises(keys: Keys) -> bool:
    """Return whether the names in a state_dict are those of an AutoFormer supernet."""
    return keys.some(r"^patch_embed_super\.")


FAMILY = Family(
    build,
    rename,
    source="microsoft/Cream, AutoFormer",
    licence="MIT",
    recognises=recognises,
    checkpoints=("supernet-tiny.pth", "supernet-small.pth", "supernet-base.pth"),
)
