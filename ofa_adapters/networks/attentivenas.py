"""AttentiveNAS and AlphaNet: blocks of elastic width, depth, kernel and expansion, and elastic resolution.

Source: AttentiveNAS (Wang et al., CVPR 2021), AlphaNet (Wang et al., ICML 2021);
facebookresearch/AttentiveNAS, models/attentive_nas_dynamic_model.py. Upstream's code and checkpoints are
licensed for non-commercial use (CC-BY-NC-4.0). This package contains neither.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from ofa_adapters.family import CUMULATIVE_UNBIASED, Family, Keys
from ofa_adapters.features import raw_features
from ofa_adapters.networks.mobile_layout import MBConv
from ofa_adapters.networks.mobile_layout import rename as mobile_rename
from ofa_adapters.notation import choices, plain
from subnetact.errors import SpecError
from subnetact.operators import (
    Elastic,
    ElasticAttribute,
    ElasticKernel,
    LayerSelect,
    SubnetNorm,
    WeightSlice,
)
from subnetact.space import Axis, AxisValues, Slot, SubnetSpace, make_divisible

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "swish": F.silu,
    "relu": F.relu,
    "relu6": F.relu6,
    "h_swish": F.hardswish,
}


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
"""The default `supernet_cfg`, which covers the ranges in the papers.

The papers leave open which choices lie inside a range, and some kernels, depths and expansions. This package
fills these gaps without a check against upstream. Give the `supernet_cfg` that a checkpoint was trained with.
"""


@dataclass(frozen=True)
class Stage:
    """One stage of the network: its elastic choices, ascending, and its fixed settings.

    Attributes:
        widths: numbers of output channels.
        depths: numbers of blocks.
        kernels: kernel sizes of the depthwise convolutions.
        expands: ratios of middle to input channels in each block.
        stride: stride of the first block.
        activation: name of the activation, a key of `ACTIVATIONS`.
        squeeze: whether the blocks have squeeze-excitation.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...] = (1,)
    kernels: tuple[int, ...] = (1,)
    expands: tuple[float, ...] = (1,)
    stride: int = 1
    activation: str = "swish"
    squeeze: bool = False

    @classmethod
    def of(cls, name: str, given: Any) -> Stage:
        """Read one stage of upstream's configuration.

        Args:
            name: name of the stage, such as `first_conv` or `mb1`.
            given: its entry in `supernet_cfg`.

        Returns:
            The stage.

        Raises:
            SpecError: the entry is not a mapping, or lacks a key that the stage needs.
        """
        needed = ("c", "d", "k", "t", "s") if name.startswith("mb") else ("c",)
        missing = [key for key in needed if not isinstance(given, Mapping) or key not in given]
        if missing:
            raise SpecError(f"attentivenas: supernet_cfg[{name!r}] needs {', '.join(missing)}, got {given!r}")
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
class BlockSlot:
    """One block slot at full size.

    Attributes:
        stage: the stage of the block.
        index: position of the stage in `AttentiveNASLayout.widths`.
        follows: position in `AttentiveNASLayout.widths` of the stage that produces the block's input.
        position: position of the block in its stage.
        in_: input channels.
        mid: channels of the depthwise convolution. If None, the block has no expansion.
        out: output channels.
        squeeze: channels of the squeeze-excitation. If None, the block has none.
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
        """The stride of the block: that of the stage in its first block, else 1."""
        return self.stage.stride if self.position == 0 else 1

    def sizes(self, in_: int, ratio: float) -> tuple[int, int]:
        """Return a subnet's channels of the depthwise convolution and of the squeeze-excitation.

        Args:
            in_: the subnet's input channels.
            ratio: the subnet's expansion ratio.

        Returns:
            The two numbers of channels, at most those of the full network; the second is 0 if the block has
            no squeeze-excitation.
        """
        mid = in_ if self.mid is None else min(self.mid, make_divisible(round(in_ * ratio), minimum=1))
        squeeze = min(self.squeeze, make_divisible(mid // 4, minimum=1)) if self.squeeze else 0
        return mid, squeeze


@dataclass(frozen=True)
class AttentiveNASLayout:
    """What the choices of an AttentiveNAS supernet mean in sizes.

    Attributes:
        stages: the stages by name, in order, from `first_conv` to `last_conv`.
        resolutions: input sizes in pixels, ascending.
        v3_head: whether the head has two convolutions.
    """

    stages: Mapping[str, Stage]
    resolutions: tuple[int, ...]
    v3_head: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AttentiveNASLayout:
        """Read upstream's `supernet_cfg`.

        Args:
            config: the configuration.

        Returns:
            The layout.

        Raises:
            SpecError: a stage is missing or incomplete.
        """
        blocks = sorted((name for name in config if name.startswith("mb")), key=lambda name: int(name[2:]))
        missing = [name for name in ("first_conv", "last_conv") if name not in config]
        if missing or not blocks:
            raise SpecError(f"attentivenas: supernet_cfg lacks {', '.join(missing) or 'mb1 .. mb7'}")
        names = ("first_conv", *blocks, "last_conv")
        return cls(
            {name: Stage.of(name, config[name]) for name in names},
            choices(config.get("resolutions", DEFAULT["resolutions"])),
            bool(config.get("use_v3_head", True)),
        )

    @property
    def widths(self) -> list[tuple[int, ...]]:
        """The width choices of the stem, of every stage and of the head."""
        return [stage.widths for stage in self.stages.values()]

    @property
    def middle(self) -> list[tuple[str, Stage]]:
        """The stages that consist of blocks, by name."""
        return list(self.stages.items())[1:-1]

    def blocks(self) -> list[BlockSlot]:
        """Return all block slots, in order."""
        found = []
        for index, (_, stage) in enumerate(self.middle, start=1):
            for position in range(stage.depths[-1]):
                follows = index if position else index - 1
                in_, out = self.widths[follows][-1], stage.widths[-1]
                mid = None if stage.expands[-1] == 1 else round(in_ * stage.expands[-1])
                squeeze = make_divisible((mid or in_) // 4, minimum=1) if stage.squeeze else None
                found.append(BlockSlot(stage, index, follows, position, in_, mid, out, squeeze))
        return found

    def sizes(self, values: AxisValues) -> dict[str, int]:
        """Return the size of every dimension for the values of the axes."""
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
        """Return the search space, which reads and writes upstream's configurations."""
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


def resized(x: Tensor, resolution: int) -> Tensor:
    """Scale square images to a resolution by bicubic interpolation; TorchScript compiles this function.

    Args:
        x: images of shape (N, C, H, W).
        resolution: the new height and width in pixels.

    Returns:
        Images of shape (N, C, resolution, resolution); `x` itself if its width is the resolution.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(resized, (x,), x, resolution)
    if x.shape[-1] == resolution:
        return x
    return F.interpolate(x, (resolution, resolution), mode="bicubic", align_corners=False)


class Resize(nn.Module):
    """Scales images to the resolution of the subnet."""

    def __init__(self, resolution: int) -> None:
        super().__init__()
        self.resolution = resolution

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to (N, 3, resolution, resolution)."""
        return resized(x, self.resolution)


class ShortcutBlock(MBConv):
    """An MBConv whose shortcut is pooled if the block has a stride, and projected if the width changes.

    Whether the width changes depends on the subnet, so every block has a projection, which subnets skip.
    """

    def __init__(self, in_: int, mid: int | None, out: int, kernels: Any, stride: int, *rest: Any) -> None:
        super().__init__(in_, mid, out, kernels, stride, *rest)
        self.shortcut = nn.Sequential(OrderedDict(conv=nn.Conv2d(in_, out, 1, bias=False)))
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_, H, W) to (N, out, H / stride, W / stride)."""
        shortcut = x
        if self.stride > 1:
            shortcut = F.avg_pool2d(x, self.stride, self.stride, padding=x.shape[-1] % 2)
        return self.transform(x) + self.shortcut(shortcut)  # type: ignore[no-any-return]


class AttentiveNet(nn.Module):
    """The full network: resize, stem, blocks, and a head with or without a second convolution."""

    def __init__(self, layout: AttentiveNASLayout, n_classes: int, bn: Mapping[str, float]) -> None:
        super().__init__()
        activation = {name: ACTIVATIONS[stage.activation] for name, stage in layout.stages.items()}
        first, last = layout.widths[0][-1], layout.widths[-1][-1]
        self.resize = Resize(layout.resolutions[-1])
        self.first_conv = nn.Conv2d(3, first, 3, layout.stages["first_conv"].stride, 1, bias=False)
        self.first_bn = nn.BatchNorm2d(first, **bn)  # type: ignore[arg-type]
        self.first_activation = activation["first_conv"]
        self.blocks = nn.Sequential(
            *(
                ShortcutBlock(
                    block.in_,
                    block.mid,
                    block.out,
                    block.stage.kernels,
                    block.stride,
                    ACTIVATIONS[block.stage.activation],
                    bn,
                    block.squeeze,
                )
                for block in layout.blocks()
            )
        )
        before = layout.widths[-2][-1]
        self.final_conv = self.final_bn = self.mix_conv = self.last_conv = self.last_bn = None
        if layout.v3_head:
            self.final_conv = nn.Conv2d(before, 6 * before, 1, bias=False)
            self.final_bn = nn.BatchNorm2d(6 * before, **bn)  # type: ignore[arg-type]
            self.mix_conv = nn.Conv2d(6 * before, last, 1, bias=False)
        else:
            self.last_conv = nn.Conv2d(before, last, 1, bias=False)
            self.last_bn = nn.BatchNorm2d(last, **bn)  # type: ignore[arg-type]
        self.last_activation = activation["last_conv"]
        self.classifier = nn.Linear(last, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, n_classes)."""
        x = self.blocks(self.first_activation(self.first_bn(self.first_conv(self.resize(x)))))
        act = self.last_activation
        if self.final_conv is not None and self.final_bn is not None and self.mix_conv is not None:
            x = act(self.final_bn(self.final_conv(x))).mean((2, 3), keepdim=True)
            x = act(self.mix_conv(x)).flatten(1)
        elif self.last_conv is not None and self.last_bn is not None:
            x = act(self.last_bn(self.last_conv(x))).mean((2, 3))
        return self.classifier(x)  # type: ignore[no-any-return]


def build(
    supernet_cfg: Mapping[str, Any] | None = None,
    n_classes: int = 1000,
    bn_param: tuple[float, float] = (0.0, 1e-5),
) -> tuple[nn.Module, SubnetSpace, dict[str, Elastic]]:
    """Build the full network, its search space and its elastic description.

    The arguments are those of upstream's `AttentiveNasDynamicModel`.

    Args:
        supernet_cfg: maps the stages `first_conv`, `mb1` .. `mb7` and `last_conv` to their choices of width
            `c`, depth `d`, kernel `k` and expansion `t` and their settings `s` (stride), `act_func` and `se`
            (squeeze-excitation); it also has `resolutions` and `use_v3_head`. Give the one that a checkpoint
            was trained with. If None, `DEFAULT`.
        n_classes: number of classes.
        bn_param: momentum and eps of every BatchNorm.

    Returns:
        The plain network at full size, its search space, and its elastic description.

    Raises:
        SpecError: the configuration lacks a stage, or names an unknown activation.
    """
    layout = AttentiveNASLayout.of(DEFAULT if supernet_cfg is None else supernet_cfg)
    unknown = {stage.activation for stage in layout.stages.values()} - set(ACTIVATIONS)
    if unknown:
        raise SpecError(
            f"attentivenas: unknown act_func {sorted(unknown)}; choose from {', '.join(ACTIVATIONS)}"
        )
    bn = {"momentum": bn_param[0], "eps": bn_param[1]}
    return AttentiveNet(layout, n_classes, bn), layout.space(), _elastic(layout)


def _elastic(layout: AttentiveNASLayout) -> dict[str, Elastic]:
    last, before = f"width{len(layout.widths) - 1}", f"width{len(layout.widths) - 2}"
    blocks = layout.blocks()
    elastic = {
        "resize": ElasticAttribute.on(resolution="resolution"),
        "first_conv": WeightSlice.on(out="width0"),
        "first_bn": SubnetNorm.on(channels="width0"),
        "blocks": LayerSelect.on(**{str(i): f"block{i}.keep" for i in range(len(blocks))}),
        "classifier": WeightSlice.on(in_=last),
    }
    if layout.v3_head:
        elastic["final_conv"] = WeightSlice.on(in_=before, out="head.expand")
        elastic["final_bn"] = SubnetNorm.on(channels="head.expand")
        elastic["mix_conv"] = WeightSlice.on(in_="head.expand", out=last)
    else:
        elastic["last_conv"] = WeightSlice.on(in_=before, out=last)
        elastic["last_bn"] = SubnetNorm.on(channels=last)
    for i, block in enumerate(blocks):
        in_, out, mid = f"width{block.follows}", f"width{block.index}", f"block{i}.mid"
        parts = {
            "depth_conv": ElasticKernel.on(channels=mid, kernel=f"block{i}.kernel"),
            "depth_bn": SubnetNorm.on(channels=mid),
            "project_conv": WeightSlice.on(in_=mid, out=out),
            "project_bn": SubnetNorm.on(channels=out),
            "shortcut": LayerSelect.on(conv=f"block{i}.project"),
            "shortcut.conv": WeightSlice.on(in_=in_, out=out),
        }
        if block.mid is not None:
            parts["expand_conv"] = WeightSlice.on(in_=in_, out=mid)
            parts["expand_bn"] = SubnetNorm.on(channels=mid)
        if block.squeeze is not None:
            parts["squeeze_reduce"] = WeightSlice.on(in_=mid, out=f"block{i}.squeeze")
            parts["squeeze_expand"] = WeightSlice.on(in_=f"block{i}.squeeze", out=mid)
        elastic.update({f"blocks.{i}.{name}": entry for name, entry in parts.items()})
    return elastic


def rename(key: str) -> str:
    """Return the plain network's name for a name in upstream's state_dict."""
    key = mobile_rename(re.sub(r"^last_conv\.(final_expand_layer|feature_mix_layer)\.", r"\1.", key))
    return re.sub(r"^last_conv\.(conv|bn)\.", r"last_\1.", key)


def infer(tensors: Mapping[str, Tensor], given: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a given `supernet_cfg` with `use_v3_head`, which the names of the tensors reveal."""
    config = given.get("supernet_cfg")
    if config is None or "use_v3_head" in config:
        return dict(given)
    two = any("last_conv.final_expand_layer." in key for key in tensors)
    return {**given, "supernet_cfg": {**config, "use_v3_head": two}}


def recognises(keys: Keys) -> bool:
    """Return whether the names in a state_dict are those of an AttentiveNAS or AlphaNet supernet."""
    return keys.some(r"^last_conv\.") and keys.some(r"^blocks\.0\.mobile_inverted_conv\.")


FAMILY = Family(
    build,
    rename,
    source="facebookresearch/AttentiveNAS, facebookresearch/AlphaNet",
    licence="CC-BY-NC-4.0",
    recognises=recognises,
    checkpoints=("attentive_nas_pretrained.pth.tar", "alphanet_pretrained.pth.tar"),
    unused=r"\.bn_tracking\.",
    infer=infer,
    calibration=CUMULATIVE_UNBIASED,
    encodings={"acc_predictor": raw_features},
)
