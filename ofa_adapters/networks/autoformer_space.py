"""AutoFormer's search space, its notation, and the subnets its authors released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ofa_adapters.notation import choices, is_list, plain
from subnetact.errors import SpecError
from subnetact.space import (
    Axis,
    AxisValues,
    Slot,
    SubnetSpace,
    UsedWhen,
)

__all__ = ["RELEASED", "Layout", "SearchSpace"]

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
"""Configurations of the subnets released with the paper, which `parse` takes by name."""


@dataclass(frozen=True)
class SearchSpace:
    """The choices of a supernet, each from the smallest to the largest."""

    embed_dim: tuple[int, ...]
    num_heads: tuple[int, ...]
    mlp_ratio: tuple[float, ...]
    depth: tuple[int, ...]

    @classmethod
    def of(
        cls, embed: int, heads: int, ratio: float, depth: int, given: Mapping[str, Sequence[Any]] | None
    ) -> SearchSpace:
        """Return the given choices, the published ones of a published size, or a regular grid.

        Raises:
            ValueError: the given choices are not of the four axes.
        """
        if given is not None:
            names = ("embed_dim", "num_heads", "mlp_ratio", "depth")
            if set(given) != set(names):
                raise ValueError(
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
    # The released AutoFormer-T has ratios of 3, which its published search space leaves out.
    (256, 4, 4.0, 14): SearchSpace((192, 216, 240), (3, 4), (3.0, 3.5, 4.0), (12, 13, 14)),
    (448, 7, 4.0, 14): SearchSpace((320, 384, 448), (5, 6, 7), (3.0, 3.5, 4.0), (12, 13, 14)),
    (640, 10, 4.0, 16): SearchSpace((528, 576, 624), (9, 10), (3.0, 3.5, 4.0), (14, 15, 16)),
}


@dataclass(frozen=True)
class Layout:
    """What sizes a choice means.

    Attributes:
        choices: of every axis.
        embed_dim, num_heads, depth: of the supernet.
        change_qkv: whether a head always has 64 features; else all features are split into the heads.
        relative_position: its tables fix the features of a head.
    """

    choices: SearchSpace
    embed_dim: int
    num_heads: int
    depth: int
    change_qkv: bool
    relative_position: bool

    def heads(self) -> tuple[int, ...]:
        """Return the head counts the network can run."""
        if self.change_qkv:
            return self.choices.num_heads
        if self.relative_position:
            return (self.num_heads,)
        return tuple(h for h in self.choices.num_heads if self.embed_dim % h == 0)

    def sizes(self, values: AxisValues) -> dict[str, int]:
        """Resolve axis values to dimensions."""
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
        """Return the space, in upstream's notation or as the tuple of its evolution search."""
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
        """Read upstream's configuration, its evolution search's tuple, or a released subnet's name."""
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
            return self.heads()[0] if key == "num_heads" else self.choices.mlp_ratio[0]  # depth is refused
        if len(values) != depth:
            raise SpecError(f"autoformer: {key} has one value per block, {depth}, got {len(values)}")
        return [*values, *[None] * (self.depth - len(values))][: self.depth]

    def format(self, values: AxisValues) -> dict[str, Any]:
        """Write upstream's configuration."""
        depth: Any = values["depth"][0]
        heads, ratios = (list(values[name][:depth]) for name in ("heads", "mlp"))
        embed = [values["embed"][0]] * depth
        return dict(zip(KEYS, (depth, embed, heads, ratios), strict=True))
