"""OFA-ProxylessNAS: a ProxylessNAS network of elastic depth, kernel and expansion.

Source: Once-for-All (Cai et al., ICLR 2020); mit-han-lab/once-for-all,
ofa/imagenet_classification/elastic_nn/networks/ofa_proxyless.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F

from ofa_adapters.family import Built, Family
from ofa_adapters.features import mobile_features
from ofa_adapters.layout import choices
from ofa_adapters.networks.mobile import MOBILE, MobileLayout, MobileStage, mobile_names
from subnetact.errors import SpecError
from subnetact.space import make_divisible

WIDTHS = {
    "proxyless": (32, 16, 24, 40, 80, 96, 192, 320, 1280),
    "google": (32, 16, 24, 32, 64, 96, 160, 320, 1280),
}


class ProxylessLayout(MobileLayout):
    """The stages of a ProxylessNAS network, the last of which has one block."""

    family = "ofa_proxyless"
    stages = (*(MobileStage(s, F.relu6) for s in (2, 2, 2, 1, 2)), MobileStage(1, F.relu6, longest=1))
    first_residual = False
    activations = (F.relu6, F.relu6, F.relu6)


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
) -> Built:
    """Build the family with the arguments of upstream's `OFAProxylessNASNets`.

    Args:
        base_stage_width: "google" for the widths of MobileNetV2, or nine widths from the stem to the last
            convolution. If None, the widths of ProxylessNAS.
    """
    named = base_stage_width is None or isinstance(base_stage_width, str)
    base: Any = WIDTHS.get(str(base_stage_width or "proxyless")) if named else base_stage_width
    if base is None or len(base) != len(WIDTHS["google"]):
        raise SpecError(f"base_stage_width: {base_stage_width!r} is neither None, 'google' nor nine widths")
    widths = tuple(make_divisible(width * width_mult) for width in base)
    layout = ProxylessLayout(widths, choices(ks_list), choices(expand_ratio_list), choices(depth_list))
    return layout.build(n_classes, bn_param, dropout_rate, kernel_transform_mode)


FAMILY = Family(
    build,
    names=mobile_names("conv"),
    **MOBILE,
    recognises=lambda keys: keys.have(r"^first_conv\.", r"^feature_mix_layer\.bn\."),
    checkpoints=("ofa_proxyless_d234_e346_k357_w1.3",),
    encodings={"arch_encoder": mobile_features},
)
