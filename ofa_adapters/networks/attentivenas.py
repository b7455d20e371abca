"""AttentiveNAS (CVPR'21) and AlphaNet (ICML'21): MobileNetV3-like blocks with elastic everything.

Upstream's code and checkpoints are licensed for
non-commercial use (CC-BY-NC-4.0); none of either is in this package.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from ofa_adapters.family import CUMULATIVE_UNBIASED, Family, Keys
from ofa_adapters.features import raw_features
from ofa_adapters.networks.attentivenas_space import DEFAULT, Layout
from ofa_adapters.networks.mobile import MBConv
from ofa_adapters.networks.mobile import rename as mobile_rename
from subnetact.operators import (
    Elastic,
    ElasticAttribute,
    ElasticKernel,
    LayerSelect,
    SubnetNorm,
    WeightSlice,
)
from subnetact.space import SubnetSpace

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "swish": F.silu,
    "relu": F.relu,
    "relu6": F.relu6,
    "h_swish": F.hardswish,
}


def resized(x: Tensor, resolution: int) -> Tensor:
    """Scale square images (N, C, H, W) to a resolution. TorchScript compiles it as it is."""
    if has_torch_function_unary(x):
        return handle_torch_function(resized, (x,), x, resolution)
    if x.shape[-1] == resolution:
        return x
    return F.interpolate(x, (resolution, resolution), mode="bicubic", align_corners=False)


class Resize(nn.Module):
    """Scales images to the subnet's resolution."""

    def __init__(self, resolution: int) -> None:
        super().__init__()
        self.resolution = resolution

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to (N, 3, resolution, resolution), bicubic, unless W is the resolution."""
        return resized(x, self.resolution)


class ShortcutBlock(MBConv):
    """An MBConv with a shortcut: pooled where the block strides, projected where the width changes.

    Whether the width changes depends on the subnet, so every block has a projection.
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

    def __init__(self, layout: Layout, n_classes: int, bn: Mapping[str, float]) -> None:
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
    """Return the plain network at full size, its space, and what in it is elastic.

    Arguments are `AttentiveNasDynamicModel`'s own: `supernet_cfg` maps `first_conv`, `mb1` .. `mb7`
    and `last_conv` to the choices `c`, `d`, `k`, `t` and the settings `s`, `act_func`, `se`, and has
    `resolutions` and `use_v3_head`. The default covers the published ranges; give the one that a
    checkpoint was trained with. `bn_param` is (momentum, eps).

    Raises:
        ValueError: the configuration lacks a stage or names an unknown activation.
    """
    layout = Layout.of(DEFAULT if supernet_cfg is None else supernet_cfg)
    unknown = {stage.activation for stage in layout.stages.values()} - set(ACTIVATIONS)
    if unknown:
        raise ValueError(
            f"attentivenas: unknown act_func {sorted(unknown)}; choose from {', '.join(ACTIVATIONS)}"
        )
    bn = {"momentum": bn_param[0], "eps": bn_param[1]}
    return AttentiveNet(layout, n_classes, bn), layout.space(), _elastic(layout)


def _elastic(layout: Layout) -> dict[str, Elastic]:
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
    """Map an upstream name to the plain network's."""
    key = mobile_rename(re.sub(r"^last_conv\.(final_expand_layer|feature_mix_layer)\.", r"\1.", key))
    return re.sub(r"^last_conv\.(conv|bn)\.", r"last_\1.", key)


def infer(tensors: Mapping[str, Tensor], given: Mapping[str, Any]) -> dict[str, Any]:
    """Read from the tensors' names whether the head has two convolutions, where that is not given."""
    config = given.get("supernet_cfg")
    if config is None or "use_v3_head" in config:
        return dict(given)
    two = any("last_conv.final_expand_layer." in key for key in tensors)
    return {**given, "supernet_cfg": {**config, "use_v3_head": two}}


def looks(keys: Keys) -> bool:
    """Tell whether the names are of an AttentiveNAS or AlphaNet supernet."""
    return keys.some(r"^last_conv\.") and keys.some(r"^blocks\.0\.mobile_inverted_conv\.")


FAMILY = Family(
    build,
    rename,
    source="facebookresearch/AttentiveNAS, facebookresearch/AlphaNet",
    licence="CC-BY-NC-4.0",
    looks=looks,
    checkpoints=("attentive_nas_pretrained.pth.tar", "alphanet_pretrained.pth.tar"),
    unused=r"\.bn_tracking\.",
    infer=infer,
    calibration=CUMULATIVE_UNBIASED,
    encodings={"acc_predictor": raw_features},
)
