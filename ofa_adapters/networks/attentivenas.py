"""AttentiveNAS and AlphaNet: blocks of elastic width, depth, kernel and expansion, and elastic resolution.

Source: AttentiveNAS (Wang et al., CVPR 2021), AlphaNet (Wang et al., ICML 2021);
facebookresearch/AttentiveNAS, models/attentive_nas_dynamic_model.py.
Upstream is licensed for non-commercial use (CC-BY-NC-4.0). This package has neither its code nor its weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from ofa_adapters.family import CUMULATIVE_UNBIASED, Built, Family, Names
from ofa_adapters.features import raw_features
from ofa_adapters.layout import Activation, Layout, choices, conv_norm
from ofa_adapters.networks.mobile import KINDS, SPELLINGS, MBConv, MobileNet, block_names, mbconv_elastic
from subnetact.errors import SpecError
from subnetact.operators import Elastic, ElasticAttribute, LayerSelect, WeightSlice
from subnetact.space import Axis, AxisValues, Slot, make_divisible

ACTIVATIONS: Mapping[str, Activation] = {
    "swish": F.silu,
    "relu": F.relu,
    "relu6": F.relu6,
    "h_swish": F.hardswish,
}
HEAD_EXPANSION = 6
"""Output to input channels of the first convolution of a head with two."""


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
    """One stage of the network: its elastic choices, ascending, and its fixed settings."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    kernels: tuple[int, ...]
    expands: tuple[float, ...]
    stride: int
    activation: Activation
    squeeze: bool

    @classmethod
    def of(cls, name: str, given: Any) -> Stage:
        """Read the entry of a stage, such as `first_conv` or `mb1`, in upstream's `supernet_cfg`."""
        needed = ("c", "d", "k", "t", "s") if name.startswith("mb") else ("c",)
        activation: Any = given.get("act_func", "swish") if isinstance(given, Mapping) else None
        if not isinstance(given, Mapping) or not set(needed) <= set(given) or activation not in ACTIVATIONS:
            raise SpecError(
                f"attentivenas: supernet_cfg[{name!r}] needs {', '.join(needed)}, and an act_func out of "
                f"{', '.join(ACTIVATIONS)}, got {given!r}"
            )
        widths, depths, kernels, expands = (choices(given.get(key, 1)) for key in ("c", "d", "k", "t"))
        stride = int(given.get("s", 2 if name == "first_conv" else 1))
        squeeze = bool(given.get("se", False))
        return cls(widths, depths, kernels, expands, stride, ACTIVATIONS[activation], squeeze)


@dataclass(frozen=True)
class BlockSlot:
    """One block at full size; `index` and `before` are the positions of its own and its input's width."""

    stage: Stage
    index: int
    before: int
    position: int
    in_: int
    mid: int | None
    squeeze: int | None


@dataclass(frozen=True)
class AttentiveNASLayout(Layout):
    """The stages by name, from `first_conv` to `last_conv`; all but these two consist of blocks."""

    stages: Mapping[str, Stage]
    resolutions: tuple[int, ...]
    v3_head: bool

    family = "attentivenas"
    keys: ClassVar = {
        "resolution": "resolution",
        "width": "width",
        "depth": "depth",
        "kernel_size": "kernel",
        "expand_ratio": "expand",
    }
    single = ("resolution",)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AttentiveNASLayout:
        """Read upstream's `supernet_cfg`."""
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
    def blocks(self) -> list[BlockSlot]:
        """All block slots, in order."""
        found, stages = [], list(self.stages.values())
        for index, stage in enumerate(stages[1:-1], start=1):
            for position in range(stage.depths[-1]):
                before = index if position else index - 1
                in_ = stages[before].widths[-1]
                mid = None if stage.expands[-1] == 1 else round(in_ * stage.expands[-1])
                squeeze = make_divisible((mid or in_) // 4, minimum=1) if stage.squeeze else None
                found.append(BlockSlot(stage, index, before, position, in_, mid, squeeze))
        return found

    def axes(self) -> list[Axis]:
        middle = list(self.stages.items())[1:-1]
        return [
            Axis("resolution", (Slot("input", self.resolutions),)),
            Axis("width", tuple(Slot(name, stage.widths) for name, stage in self.stages.items())),
            Axis("depth", tuple(Slot(name, stage.depths) for name, stage in middle)),
            Axis("kernel", tuple(Slot(name, stage.kernels) for name, stage in middle)),
            Axis("expand", tuple(Slot(name, stage.expands) for name, stage in middle)),
        ]

    def sizes(self, values: AxisValues) -> dict[str, int]:
        width = values["width"]
        sizes = {"resolution": values["resolution"][0], **{f"width{i}": w for i, w in enumerate(width)}}
        sizes["head.expand"] = HEAD_EXPANSION * width[-2]
        for i, block in enumerate(self.blocks):
            depth, kernel, ratio = (values[a][block.index - 1] for a in ("depth", "kernel", "expand"))
            kept = int(block.position < depth)
            mid = in_ = width[block.before]
            if block.mid is not None:
                mid = min(block.mid, make_divisible(round(in_ * ratio), minimum=1))
            squeeze = min(block.squeeze, make_divisible(mid // 4, minimum=1)) if block.squeeze else 0
            sizes[f"block{i}.keep"] = kept
            sizes[f"block{i}.mid"], sizes[f"block{i}.squeeze"] = kept * mid, kept * squeeze
            sizes[f"block{i}.kernel"] = kept * kernel
            sizes[f"block{i}.project"] = int(kept and in_ != width[block.index])
        return sizes

    def elastic(self) -> dict[str, Elastic]:
        last, before, middle = f"width{len(self.stages) - 1}", f"width{len(self.stages) - 2}", "head.expand"
        mixed = middle if self.v3_head else before
        elastic = {
            "resize": ElasticAttribute.on(resolution="resolution"),
            "blocks": LayerSelect.on(**{str(i): f"block{i}.keep" for i in range(len(self.blocks))}),
            "classifier": WeightSlice.on(in_=last),
            **conv_norm("first_conv", "first_bn", None, "width0"),
            **conv_norm("final_conv", "final_bn", before, middle),
            **conv_norm("mix_conv", "mix_bn", mixed, last),
        }
        for i, block in enumerate(self.blocks):
            path, in_, out = f"blocks.{i}", f"width{block.before}", f"width{block.index}"
            elastic |= mbconv_elastic(path, f"block{i}", in_, out)
            elastic[f"{path}.shortcut"] = LayerSelect.on(conv=f"block{i}.project")
            elastic[f"{path}.shortcut.conv"] = WeightSlice.on(in_=in_, out=out)
        return elastic


def resized(x: Tensor, resolution: int) -> Tensor:
    """Scale images (N, C, H, W) to a height and width in pixels; TorchScript compiles this function."""
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
    """An MBConv whose shortcut is pooled if it has a stride; the subnets that need no projection skip it."""

    def __init__(self, slot: BlockSlot, bn: Mapping[str, Any]) -> None:
        stage, in_, out = slot.stage, slot.in_, slot.stage.widths[-1]
        stride = 1 if slot.position else stage.stride
        super().__init__(in_, slot.mid, out, stage.kernels, stride, stage.activation, bn, slot.squeeze)
        self.shortcut = nn.Sequential(OrderedDict(conv=nn.Conv2d(in_, out, 1, bias=False)))
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_, H, W) to (N, out, H / stride, W / stride)."""
        shortcut = x
        if self.stride > 1:
            shortcut = F.avg_pool2d(x, self.stride, self.stride, padding=x.shape[-1] % 2)
        return self.transform(x) + self.shortcut(shortcut)  # type: ignore[no-any-return]


def build(
    supernet_cfg: Mapping[str, Any] | None = None,
    n_classes: int = 1000,
    bn_param: tuple[float, float] = (0.0, 1e-5),
) -> Built:
    """Build the family with the arguments of upstream's `AttentiveNasDynamicModel`.

    Args:
        supernet_cfg: maps the stages `first_conv`, `mb1` .. `mb7` and `last_conv` to their choices of width
            `c`, depth `d`, kernel `k` and expansion `t` and their settings `s` (stride), `act_func` and `se`
            (squeeze-excitation); it also has `resolutions` and `use_v3_head`. Give the one that a checkpoint
            was trained with. If None, `DEFAULT`.
    """
    layout = AttentiveNASLayout.of(DEFAULT if supernet_cfg is None else supernet_cfg)
    bn = {"momentum": bn_param[0], "eps": bn_param[1]}
    first, *_, before, last = layout.stages.values()
    blocks = [ShortcutBlock(slot, bn) for slot in layout.blocks]
    widths = (first.widths[-1], before.widths[-1], last.widths[-1])
    activations = (first.activation, last.activation)
    final = HEAD_EXPANSION * before.widths[-1] if layout.v3_head else None
    resize = Resize(layout.resolutions[-1])
    network = MobileNet(blocks, widths, final, activations, n_classes, bn, stride=first.stride, resize=resize)
    return layout.built(network)


def completed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint with the BatchNorms that upstream's networks hold in reserve and never use."""
    for key in [key for key in tensors if key.endswith(".bn.bn.running_mean")]:
        mean, path = tensors[key], key.removesuffix("bn.running_mean")
        for i in range(2):
            own = f"{path}bn_tracking.{i}"
            tensors[f"{own}.running_mean"] = torch.zeros_like(mean)
            tensors[f"{own}.running_var"] = torch.ones_like(mean)
            tensors[f"{own}.num_batches_tracked"] = torch.tensor(0)
    return tensors


def head_names(v3_head: bool) -> Names:
    """Return the names behind the blocks: a network has one convolution there, or two with `v3_head`."""
    two = {"last_conv.final_expand_layer": "final", "last_conv.feature_mix_layer": "mix"}
    layers = two if v3_head else {"last_conv": "mix"}
    return [(f"{layer}.{k}.{k}", f"{own}_{k}") for layer, own in layers.items() for k in KINDS]


FAMILY = Family(
    build,
    names=(
        *block_names("blocks.#", "mobile_inverted_conv", "{0}.{0}"),
        ("blocks.#.shortcut.conv.conv", "blocks.#.shortcut.conv"),
        *((f"first_conv.{k}.{k}", f"first_{k}") for k in KINDS),
        *head_names(True),
        *head_names(False),
        ("classifier.linear.linear", "classifier"),
    ),
    spellings=SPELLINGS,
    dialect=lambda given: head_names((given.get("supernet_cfg") or DEFAULT).get("use_v3_head", True)),
    completed=completed,
    source="facebookresearch/AttentiveNAS, facebookresearch/AlphaNet",
    licence="CC-BY-NC-4.0",
    recognises=lambda keys: keys.have(r"^last_conv\.", r"^blocks\.0\.mobile_inverted_conv\."),
    checkpoints=("attentive_nas_pretrained.pth.tar", "alphanet_pretrained.pth.tar"),
    unused=r"\.bn_tracking\.",
    shown={"n_classes": lambda shapes, _: shapes.size("classifier.weight")},
    calibration=CUMULATIVE_UNBIASED,
    encodings={"acc_predictor": raw_features},
)
