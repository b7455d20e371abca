"""HydraViT: a vision transformer whose subnets keep the first heads, and 64 features per head everywhere.

A subnet of h heads has p = 64 * h features: in the embedding, in the queries, keys and values, and a quarter
of its neurons. The full network is a DeiT-base. `attn.qkv` holds queries, keys and values one after another,
so a subnet uses the rows {0..p}, {D..D+p} and {2D..2D+p} of that layer.

Source: HydraViT (Haberer et al., NeurIPS 2024); ds-kiel/HydraViT, timm/models/hydravit.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import Family, Keys
from ofa_adapters.networks.autoformer import ClassToken, PositionEmbedding, survive
from ofa_adapters.notation import choices, upstream_config
from subnetact.errors import SpecError
from subnetact.operators import Elastic, LayerNormSlice, ParameterSlice, Segments, WeightSlice
from subnetact.space import Axis, AxisValues, Slot, SubnetSpace

HEAD_FEATURES = 64
MLP_RATIO = 4
FEWEST_HEADS = 3
EPS = 1e-6
"""The eps of every LayerNorm."""


@dataclass(frozen=True)
class HydraViTLayout:
    """What the number of heads means in sizes.

    Attributes:
        heads: the numbers of heads to choose from, ascending.
    """

    heads: tuple[int, ...]

    def sizes(self, values: AxisValues) -> dict[str, int]:
        """Return the size of every dimension for the values of the axes."""
        heads: Any = values["heads"][0]
        return {"features": HEAD_FEATURES * heads, "neurons": MLP_RATIO * HEAD_FEATURES * heads}

    def space(self) -> SubnetSpace:
        """Return the search space, which reads and writes `{"heads": 6}`."""
        heads = Axis("heads", (Slot("all blocks", self.heads),))
        return SubnetSpace("hydravit", [heads], self.sizes, _parse, _format)


def _parse(config: Any) -> dict[str, Any]:
    if isinstance(config, int) and not isinstance(config, bool):
        config = {"heads": config}
    return upstream_config("hydravit", config, ("heads",))


def _format(values: AxisValues) -> dict[str, Any]:
    return {"heads": values["heads"][0]}


class LayerScale(nn.Module):
    """Multiplies every feature of a branch with a learned number."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to (N, T, width)."""
        return x * self.gamma


class HydraViTBlock(nn.Module):
    """One pre-norm transformer block. The number of heads follows from the number of query features.

    Args:
        arguments: upstream's constructor arguments by name, as `build` documents them.
        drop_path: the stochastic depth rate of the block.
    """

    def __init__(self, arguments: Mapping[str, Any], drop_path: float) -> None:
        super().__init__()
        width, initial = arguments["embed_dim"], arguments["init_values"]
        self.norm1 = nn.LayerNorm(width, EPS)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ls1 = LayerScale(width, initial) if initial else nn.Identity()
        self.norm2 = nn.LayerNorm(width, EPS)
        self.fc1 = nn.Linear(width, MLP_RATIO * width)
        self.fc2 = nn.Linear(MLP_RATIO * width, width)
        self.ls2 = LayerScale(width, initial) if initial else nn.Identity()
        self.drop, self.attn_drop = float(arguments["proj_drop_rate"]), float(arguments["attn_drop_rate"])
        self.drop_path = drop_path
        self.head_features = HEAD_FEATURES

    def attend(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to (N, T, width) by attention, without the residual connection."""
        split = self.qkv(x).view(x.shape[0], x.shape[1], 3, -1, self.head_features).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind(0)
        dropped = self.attn_drop if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped).transpose(1, 2).flatten(2)
        return F.dropout(self.proj(attended), self.drop, self.training)

    def feed(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to (N, T, width) by the feed-forward network, without the residual connection."""
        hidden = F.dropout(F.gelu(self.fc1(x)), self.drop, self.training)
        return F.dropout(self.fc2(hidden), self.drop, self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to (N, T, width)."""
        x = x + survive(self.ls1(self.attend(self.norm1(x))), self.drop_path, self.training)
        return x + survive(self.ls2(self.feed(self.norm2(x))), self.drop_path, self.training)


class HydraViT(nn.Module):
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
        self.pos_embed = PositionEmbedding(1 + patches, width)
        rates = [arguments["drop_path_rate"] * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.Sequential(*(HydraViTBlock(arguments, rate) for rate in rates))
        self.norm = nn.LayerNorm(width, EPS)
        self.head = nn.Linear(width, arguments["num_classes"])
        self.drop, self.pos_drop = float(arguments["drop_rate"]), float(arguments["pos_drop_rate"])

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images (N, in_chans, img_size, img_size) to the features of all tokens (N, T, width)."""
        x = self.pos_embed(self.cls_token(self.patch_embed(x).flatten(2).transpose(1, 2)))
        return self.norm(self.blocks(F.dropout(x, self.pos_drop, self.training)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_chans, img_size, img_size) to logits (N, num_classes)."""
        token = self.forward_features(x)[:, 0]
        return self.head(F.dropout(token, self.drop, self.training))  # type: ignore[no-any-return]


def build(
    img_size: int = 224,
    patch_size: int = 16,
    in_chans: int = 3,
    num_classes: int = 1000,
    embed_dim: int = 768,
    depth: int = 12,
    num_heads: int = 12,
    init_values: float | None = None,
    drop_rate: float = 0.0,
    pos_drop_rate: float = 0.0,
    proj_drop_rate: float = 0.0,
    attn_drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    heads: Sequence[int] | None = None,
) -> tuple[nn.Module, SubnetSpace, dict[str, Elastic]]:
    """Build the full network, its search space and its elastic description.

    The arguments are those of upstream's `HydraViT`, and `heads` of its training script. If a checkpoint is
    loaded, sizes that are not given are read from its tensors.

    Args:
        img_size: height and width of the input in pixels.
        patch_size: height and width of a patch in pixels.
        in_chans: channels of the input.
        num_classes: number of classes.
        embed_dim: width of the full network, 64 times `num_heads`.
        depth: number of blocks.
        num_heads: number of heads per block of the full network.
        init_values: the initial value of the learned scales of the branches. If None, there are no scales.
        drop_rate: dropout rate before the classifier.
        pos_drop_rate: dropout rate after the position embedding.
        proj_drop_rate: dropout rate after the projections of a block.
        attn_drop_rate: dropout rate of the attention weights.
        drop_path_rate: stochastic depth rate of the last block.
        heads: the trained numbers of heads. If None, all from 3 to `num_heads`.

    Returns:
        The plain network at full size, its search space, and its elastic description.

    Raises:
        SpecError: sizes do not fit together, or a number of heads is not between 1 and `num_heads`.
    """
    arguments = {k: v for k, v in locals().items() if k != "heads"}
    if embed_dim != HEAD_FEATURES * num_heads or img_size % patch_size:
        raise SpecError(
            f"hydravit: a head has {HEAD_FEATURES} features, so embed_dim must be {HEAD_FEATURES} * "
            f"num_heads, got {embed_dim} and {num_heads}; img_size {img_size} must be a multiple of "
            f"patch_size {patch_size}"
        )
    trained = choices(range(min(FEWEST_HEADS, num_heads), num_heads + 1) if heads is None else heads)
    if any(type(h) is not int or not 1 <= h <= num_heads for h in trained):
        raise SpecError(f"hydravit: heads are whole numbers from 1 to {num_heads}, got {trained}")
    elastic = _elastic(embed_dim, depth, scaled=bool(init_values))
    return HydraViT(arguments), HydraViTLayout(trained).space(), elastic


def _elastic(width: int, depth: int, scaled: bool) -> dict[str, Elastic]:
    features, neurons = "features", "neurons"
    elastic = {
        "patch_embed": WeightSlice.on(out=features),
        "cls_token": ParameterSlice.on(features=features),
        "pos_embed": ParameterSlice.on(features=features),
        "norm": LayerNormSlice.on(features=features),
        "head": WeightSlice.on(in_=features),
    }
    for i in range(depth):
        block = f"blocks.{i}"
        elastic[f"{block}.norm1"] = elastic[f"{block}.norm2"] = LayerNormSlice.on(features=features)
        elastic[f"{block}.qkv"] = WeightSlice.on(in_=features, out=Segments(*[(features, width)] * 3))
        elastic[f"{block}.proj"] = WeightSlice.on(in_=features, out=features)
        elastic[f"{block}.fc1"] = WeightSlice.on(in_=features, out=neurons)
        elastic[f"{block}.fc2"] = WeightSlice.on(in_=neurons, out=features)
        if scaled:
            elastic[f"{block}.ls1"] = elastic[f"{block}.ls2"] = ParameterSlice.on(features=features)
    return elastic


_PARAMETERS = {"cls_token": "cls_token.token", "pos_embed": "pos_embed.embedding"}


def rename(key: str) -> str:
    """Return the plain network's name for a name in upstream's state_dict, which is that of timm's ViT."""
    key = key.replace("patch_embed.proj.", "patch_embed.").replace(".attn.", ".").replace(".mlp.", ".")
    return _PARAMETERS.get(key, key)


def infer(tensors: Mapping[str, Tensor], given: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the constructor arguments with sizes from the tensors.

    Args:
        tensors: the tensors under upstream's names.
        given: the constructor arguments that were given, which take precedence.

    Returns:
        The completed constructor arguments.
    """
    own = {rename(key.removeprefix("module.")): tensor for key, tensor in tensors.items()}
    found: dict[str, Any] = {}
    patches, positions, head = (
        own.get(k) for k in ("patch_embed.weight", "pos_embed.embedding", "head.weight")
    )
    if patches is not None and patches.dim() == 4:
        width, channels, size, _ = patches.shape
        found.update(embed_dim=width, in_chans=channels, patch_size=size, num_heads=width // HEAD_FEATURES)
        if positions is not None and positions.dim() == 3 and positions.shape[1] > 1:
            found["img_size"] = math.isqrt(positions.shape[1] - 1) * size
    if head is not None:
        found["num_classes"] = head.shape[0]
    blocks = [int(match[1]) for key in own if (match := re.match(r"blocks\.(\d+)\.", key))]
    if blocks:
        found["depth"] = max(blocks) + 1
    if "blocks.0.ls1.gamma" in own:
        found["init_values"] = 1e-5
    return {**found, **given}


def recognises(keys: Keys) -> bool:
    """Return whether the names in a state_dict are those of timm's vision transformer with a class token."""
    return (
        keys.some(r"^blocks\.\d+\.attn\.qkv\.") and keys.some(r"^patch_embed\.proj\.") and "cls_token" in keys
    )


FAMILY = Family(
    build,
    rename,
    source="ds-kiel/HydraViT",
    licence="MIT",
    recognises=recognises,
    ordinary="a vision transformer of timm",
    checkpoints=("the files of doi.org/10.5281/zenodo.14300201",),
    infer=infer,
    image_sizes=(224,),
)
