"""HydraViT: a vision transformer whose subnets keep the first heads, and 64 features per head everywhere.

A subnet of h heads has p = 64 * h features: in the embedding, in the queries, keys and values, and a quarter
of its neurons. The full network is a DeiT-base. `attn.qkv` holds queries, keys and values one after another,
so a subnet uses the rows {0..p}, {D..D+p} and {2D..2D+p} of that layer.

Source: HydraViT (Haberer et al., NeurIPS 2024); ds-kiel/HydraViT, timm/models/hydravit.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ofa_adapters.family import Built, Family
from ofa_adapters.layout import Layout, choices
from ofa_adapters.networks import vision_transformer
from ofa_adapters.networks.vision_transformer import HEAD_FEATURES, VisionTransformer, transformer_elastic
from subnetact.errors import SpecError
from subnetact.operators import Elastic, Segments
from subnetact.space import Axis, AxisValues

MLP_RATIO = 4
FEWEST_HEADS = 3
EPS = 1e-6
"""The eps of every LayerNorm."""


@dataclass(frozen=True)
class HydraViTLayout(Layout):
    """The numbers of heads to choose from, ascending, in a network of `depth` blocks and `width` features."""

    heads: tuple[int, ...]
    width: int
    depth: int

    family = "hydravit"
    keys: ClassVar = {"heads": "heads"}
    single = ("heads",)

    def axes(self) -> list[Axis]:
        return [Axis.uniform("heads", ["all blocks"], self.heads)]

    def sizes(self, values: AxisValues) -> dict[str, int]:
        features = HEAD_FEATURES * values["heads"][0]
        return {"features": features, "neurons": MLP_RATIO * features}

    def elastic(self) -> dict[str, Elastic]:
        qkv = Segments(*[("features", self.width)] * 3)
        return transformer_elastic("features", [(qkv, "features", "neurons")] * self.depth)


def build(
    img_size: int = 224,
    patch_size: int = 16,
    in_chans: int = 3,
    num_classes: int = 1000,
    embed_dim: int = 768,
    depth: int = 12,
    num_heads: int = 12,
    drop_rate: float = 0.0,
    pos_drop_rate: float = 0.0,
    proj_drop_rate: float = 0.0,
    attn_drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    heads: Sequence[int] | None = None,
) -> Built:
    """Build the family with the arguments of upstream's `HydraViT`, and `heads` of its training script.

    If a checkpoint is loaded, sizes that are not given are read from its tensors.

    Args:
        pos_drop_rate: dropout rate after the position embedding.
        proj_drop_rate: dropout rate after the projections of a block.
        heads: the trained numbers of heads. If None, all from 3 to `num_heads`.
    """
    arguments = dict(locals())
    trained = choices(range(min(FEWEST_HEADS, num_heads), num_heads + 1) if heads is None else heads)
    if any(type(h) is not int or not 1 <= h <= num_heads for h in trained):
        raise SpecError(f"hydravit: heads are whole numbers from 1 to {num_heads}, got {trained}")
    drops = proj_drop_rate, pos_drop_rate, drop_rate
    network = VisionTransformer(arguments, nn.Linear, MLP_RATIO, EPS, *drops)
    return HydraViTLayout(trained, embed_dim, depth).built(network)


FAMILY = Family(
    build,
    names=(
        ("patch_embed.proj", "patch_embed"),
        *((f"blocks.#.attn.{part}", f"blocks.#.{part}") for part in ("qkv", "proj")),
        *((f"blocks.#.mlp.{part}", f"blocks.#.{part}") for part in ("fc1", "fc2")),
    ),
    source="ds-kiel/HydraViT",
    licence="MIT",
    recognises=lambda keys: keys.have(r"^blocks\.\d+\.attn\.qkv\.", r"^patch_embed\.proj\.", r"^cls_token$"),
    ordinary="a vision transformer of timm",
    checkpoints=("the files of doi.org/10.5281/zenodo.14300201",),
    shown=vision_transformer.SHOWN,
)
