"""AttentiveNAS' search space: choices per stage, and what sizes they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ofa_adapters.notation import choices, plain
from subnetact.errors import SpecError
from subnetact.space import (
    Axis,
    AxisValues,
    Slot,
    SubnetSpace,
    make_divisible,
)

__all__ = ["DEFAULT", "Block", "Layout", "Stage"]

KEYS = {
    "resolution": "resolution",
    "width": "width",
    "depth": "depth",
    "kernel_size": "kernel",
    "expand_ratio": "expand",
}


def _stage(c: list[int], d: list[int], t: list[int], s: int, se: bool) -> dict[str, Any]:
    return {"c": c, "d": d, "k": [3, 5], "t": t, "s": s, "act_func": "swish", "se": se}


DEFAULT: Mapping[str, Any] = {
    "use_v3_head": True,
    "resolutions": [192, 224, 256, 288],
    "first_conv": {"c": [16, 24], "s": 2, "act_func": "swish"},
    "mb1": _stage([16, 24], [1, 2], [1], 1, False),
    "mb2": _stage([24, 32], [3, 4, 5], [4, 5, 6], 2, False),
    "mb3": _stage([32, 40], [3, 4, 5, 6], [4, 5, 6], 2, True),
    "mb4": _stage([64, 72], [3, 4, 5, 6], [4, 5, 6], 2, False),
    "mb5": _stage([112, 120, 128], [3, 4, 5, 6, 7, 8], [4, 5, 6], 1, True),
    "mb6": _stage([192, 200, 208, 216], [3, 4, 5, 6, 7, 8], [6], 2, True),
    "mb7": _stage([216, 224], [1, 2], [6], 1, True),
    "last_conv": {"c": [1792, 1984], "act_func": "swish"},
}
"""The published ranges. Which choices lie inside a range, and what a stage's range leaves open (its
kernels, some depths and expansions), is this package's reading and not checked against upstream: give
`supernet_cfg` with a checkpoint."""


@dataclass(frozen=True)
class Stage:
    """Choices of one stage, each sorted, and what is fixed in it."""

    widths: tuple[int, ...]
    depths: tuple[int, ...] = (1,)
    kernels: tuple[int, ...] = (1,)
    expands: tuple[float, ...] = (1,)
    stride: int = 1
    activation: str = "swish"
    squeeze: bool = False

    @classmethod
    def of(cls, name: str, given: Any) -> Stage:
        """Read a stage of upstream's configuration.

        Raises:
            ValueError: it is no mapping with the stage's choices.
        """
        needed = ("c", "d", "k", "t", "s") if name.startswith("mb") else ("c",)
        missing = [key for key in needed if not isinstance(given, Mapping) or key not in given]
        if missing:
            raise ValueError(
                f"attentivenas: supernet_cfg[{name!r}] needs {', '.join(missing)}, got {given!r}"
            )
        return cls(
            choices(given["c"]),
            choices(given.get("d", 1)),
            choices(given.get("k", 1)),
            choices(given.get("t", 1)),
            int(given.get("s", 2 if name == "first_conv" else 1)),
            str(given.get("act_func", "swish")),
            bool(given.get("se", False)),
        )


@dataclass(frozen=True)
class Block:
    """A block slot at full size; `index` and `follows` are positions in the list of widths.

    `mid` is None where the block has no expansion, `squeeze` where it has no squeeze-excitation.
    """

    stage: Stage
    index: int
    follows: int
    position: int
    in_: int
    mid: int | None
    out: int
    squeeze: int | None

    @property
    def stride(self) -> int:
        """The stride of the block."""
        return self.stage.stride if self.position == 0 else 1

    def sizes(self, in_: int, ratio: float) -> tuple[int, int]:
        """Return a subnet's middle and squeeze-excitation widths, never beyond the full ones."""
        mid = in_ if self.mid is None else min(self.mid, make_divisible(round(in_ * ratio), minimum=1))
        squeeze = min(self.squeeze, make_divisible(mid // 4, minimum=1)) if self.squeeze else 0
        return mid, squeeze


@dataclass(frozen=True)
class Layout:
    """The stages by name, in order, with `first_conv` first and `last_conv` last."""

    stages: Mapping[str, Stage]
    resolutions: tuple[int, ...]
    v3_head: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Layout:
        """Read upstream's `supernet_cfg`.

        Raises:
            ValueError: a stage is missing or incomplete.
        """
        blocks = sorted((name for name in config if name.startswith("mb")), key=lambda name: int(name[2:]))
        missing = [name for name in ("first_conv", "last_conv") if name not in config]
        if missing or not blocks:
            raise ValueError(f"attentivenas: supernet_cfg lacks {', '.join(missing) or 'mb1 .. mb7'}")
        names = ("first_conv", *blocks, "last_conv")
        return cls(
            {name: Stage.of(name, config[name]) for name in names},
            choices(config.get("resolutions", DEFAULT["resolutions"])),
            bool(config.get("use_v3_head", True)),
        )

    @property
    def widths(self) -> list[tuple[int, ...]]:
        """Width choices of the stem, of every stage and of the head."""
        return [stage.widths for stage in self.stages.values()]

    @property
    def middle(self) -> list[tuple[str, Stage]]:
        """The stages of blocks."""
        return list(self.stages.items())[1:-1]

    def blocks(self) -> list[Block]:
        """Return every block slot."""
        found = []
        for index, (_, stage) in enumerate(self.middle, start=1):
            for position in range(stage.depths[-1]):
                follows = index if position else index - 1
                in_, out = self.widths[follows][-1], stage.widths[-1]
                mid = None if stage.expands[-1] == 1 else round(in_ * stage.expands[-1])
                squeeze = make_divisible((mid or in_) // 4, minimum=1) if stage.squeeze else None
                found.append(Block(stage, index, follows, position, in_, mid, out, squeeze))
        return found

    def sizes(self, values: AxisValues) -> dict[str, int]:
        """Resolve axis values to dimensions."""
        width: Any = values["width"]
        sizes: dict[str, Any] = {"resolution": values["resolution"][0]}
        sizes.update({f"width{i}": size for i, size in enumerate(width)})
        sizes["head.expand"] = 6 * width[-2]
        for i, block in enumerate(self.blocks()):
            depth, kernel, ratio = (values[a][block.index - 1] for a in ("depth", "kernel", "expand"))
            kept = block.position < depth
            in_, out = width[block.follows], width[block.index]
            mid, squeeze = block.sizes(in_, ratio) if kept else (0, 0)
            sizes[f"block{i}.keep"] = kept
            sizes[f"block{i}.mid"], sizes[f"block{i}.squeeze"] = mid, squeeze
            sizes[f"block{i}.kernel"] = kernel if kept else 0
            sizes[f"block{i}.project"] = kept and in_ != out
        return sizes

    def space(self) -> SubnetSpace:
        """Return the search space, in upstream's notation."""
        axes = [
            Axis("resolution", (Slot("input", self.resolutions),)),
            Axis("width", tuple(Slot(name, stage.widths) for name, stage in self.stages.items())),
            Axis("depth", tuple(Slot(name, stage.depths) for name, stage in self.middle)),
            Axis("kernel", tuple(Slot(name, stage.kernels) for name, stage in self.middle)),
            Axis("expand", tuple(Slot(name, stage.expands) for name, stage in self.middle)),
        ]
        return SubnetSpace("attentivenas", axes, self.sizes, _parse, _format)


def _parse(config: Any) -> dict[str, Any]:
    if not isinstance(config, Mapping) or set(config) != set(KEYS):
        got = sorted(map(str, config)) if isinstance(config, Mapping) else type(config).__name__
        raise SpecError(f"attentivenas: a configuration has exactly the keys {', '.join(KEYS)}; got {got}")
    return {axis: plain(config[key]) for key, axis in KEYS.items()}


def _format(values: AxisValues) -> dict[str, Any]:
    (resolution,) = values["resolution"]
    lists = {key: list(values[axis]) for key, axis in KEYS.items() if key != "resolution"}
    return {"resolution": resolution, **lists}
