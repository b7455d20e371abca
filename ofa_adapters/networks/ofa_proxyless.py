"""OFA-ProxylessNAS: a ProxylessNAS network of elastic depth, kernel and expansion.

Source: Once-for-All (Cai et al., ICLR 2020); mit-han-lab/once-for-all,
ofa/imagenet_classification/elastic_nn/networks/ofa_proxyless.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import Family, Keys
from ofa_adapters.features import ARCH_ENCODER_SIZES, mobile_features
from ofa_adapters.networks.mobile_layout import MBConv, MobileLayout, MobileStage, rename
from ofa_adapters.notation import choices
from subnetact.errors import SpecError
from subnetact.operators import Elastic
from subnetact.space import SubnetSpace, make_divisible

WIDTHS = {
    "proxyless": (32, 16, 24, 40, 80, 96, 192, 320, 1280),
    "google": (32, 16, 24, 32, 64, 96, 160, 320, 1280),
}
STRIDES = (2, 2, 2, 1, 2, 1)


class ProxylessNet(nn.Module):
    """The full network: stem, a fixed block, elastic stages, and a 1x1 convolution before the mean."""

    def __init__(
        self,
        blocks: list[MBConv],
        widths: Sequence[int],
        n_classes: int,
        bn: Mapping[str, Any],
        dropout: float,
    ) -> None:
        super().__init__()
        first, *_, last, mixed = widths
        self.first_conv = nn.Conv2d(3, first, 3, 2, 1, bias=False)
        self.first_bn = nn.BatchNorm2d(first, **bn)
        self.blocks = nn.Sequential(*blocks)
        self.mix_conv = nn.Conv2d(last, mixed, 1, bias=False)
        self.mix_bn = nn.BatchNorm2d(mixed, **bn)
        self.dropout = nn.Dropout(float(dropout))
        self.classifier = nn.Linear(mixed, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, n_classes)."""
        x = self.blocks(F.relu6(self.first_bn(self.first_conv(x))))
        x = F.relu6(self.mix_bn(self.mix_conv(x))).mean((2, 3))
        return self.classifier(self.dropout(x))  # type: ignore[no-any-return]


def build(
    n_classes: int = 1000,
    bn_param: tuple[float, float] = (0.1, 1e-3),
    dropout_rate: float = 0.1,
    base_stage_width: str | Sequence[int] | None = None,
    width_mult: float = 1.3,
    ks_list: int | Sequence[int] = (3, 5, 7),
    expand_ratio_list: float | Sequence[float] = (3, 4, 6),
    depth_list: int | Sequence[int] = (2, 3, 4),
    kernel_transform_mode: int | None = 1,
) -> tuple[nn.Module, SubnetSpace, dict[str, Elastic]]:
    """Build the full network, its search space and its elastic description.

    The arguments are those of upstream's `OFAProxylessNASNets`.

    Args:
        n_classes: number of classes.
        bn_param: momentum and eps of every BatchNorm.
        dropout_rate: dropout rate before the classifier.
        base_stage_width: "google" for the widths of MobileNetV2, or nine widths from the stem to the last
            convolution. If None, the widths of ProxylessNAS.
        width_mult: width multiplier of the network.
        ks_list: kernel size choices per block.
        expand_ratio_list: expansion ratio choices per block.
        depth_list: depth choices per stage.
        kernel_transform_mode: upstream's class attribute. If 1, smaller kernels are made by learned matrices;
            if None, they are centre crops of the largest.

    Returns:
        The plain network at full size, its search space, and its elastic description.

    Raises:
        SpecError: `base_stage_width` is something else, or a list contains something other than finite
            numbers >= 0.
    """
    named = base_stage_width is None or isinstance(base_stage_width, str)
    base: Any = WIDTHS.get(str(base_stage_width or "proxyless")) if named else base_stage_width
    if base is None or len(base) != len(WIDTHS["google"]):
        raise SpecError(f"base_stage_width: {base_stage_width!r} is neither None, 'google' nor nine widths")
    widths = [make_divisible(width * width_mult) for width in base]
    longest = (None, None, None, None, None, 1)
    stages = tuple(
        MobileStage(width, stride, F.relu6, longest=length)
        for width, stride, length in zip(widths[2:8], STRIDES, longest, strict=True)
    )
    layout = MobileLayout(
        "ofa_proxyless", widths[1], stages, choices(ks_list), choices(expand_ratio_list), choices(depth_list)
    )
    bn = {"momentum": bn_param[0], "eps": bn_param[1]}
    fixed = MBConv(widths[0], None, widths[1], (3,), 1, F.relu6, bn)
    blocks = [fixed, *layout.network_blocks(bn, kernel_transform_mode is not None)]
    return ProxylessNet(blocks, widths, n_classes, bn, dropout_rate), layout.space(), layout.elastic()


def recognises(keys: Keys) -> bool:
    """Return whether the names are those of an OFA-ProxylessNAS or of a network extracted from one."""
    return keys.some(r"^first_conv\.") and keys.some(r"^feature_mix_layer\.bn\.")


FAMILY = Family(
    build,
    rename,
    source="mit-han-lab/once-for-all",
    licence="MIT",
    recognises=recognises,
    checkpoints=("ofa_proxyless_d234_e346_k357_w1.3",),
    image_sizes=ARCH_ENCODER_SIZES,
    encodings={"arch_encoder": mobile_features},
)
