"""OFA-MobileNetV3: a MobileNetV3 of elastic depth, kernel and expansion.

Source: Once-for-All (Cai et al., ICLR 2020); mit-han-lab/once-for-all,
ofa/imagenet_classification/elastic_nn/networks/ofa_mbv3.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F

from ofa_adapters.family import Built, Family
from ofa_adapters.features import mobile_features, tutorial_features
from ofa_adapters.layout import choices
from ofa_adapters.networks.mobile import MOBILE, MobileLayout, MobileStage, mobile_names
from subnetact.space import make_divisible

ENDS = (r"^first_conv\.", r"^final_expand_layer\.")
"""Names that a MobileNetV3 has."""
WIDTHS = (16, 16, 24, 40, 80, 112, 160, 960, 1280)


class MobileNetV3Layout(MobileLayout):
    """The stages of a MobileNetV3."""

    family = "ofa_mbv3"
    stages = (
        MobileStage(2, F.relu),
        MobileStage(2, F.relu, squeeze=True),
        MobileStage(2, F.hardswish),
        MobileStage(1, F.hardswish, squeeze=True),
        MobileStage(2, F.hardswish, squeeze=True),
    )
    first_residual = True
    activations = (F.hardswish, F.relu, F.hardswish)


def build(
    n_classes: int = 1000,
    bn_param: tuple[float, float] = (0.1, 1e-5),
    dropout_rate: float = 0.1,
    base_stage_width: Any = None,  # noqa: ARG001
    width_mult: float = 1.0,
    ks_list: int | Sequence[int] = (3, 5, 7),
    expand_ratio_list: float | Sequence[float] = (3, 4, 6),
    depth_list: int | Sequence[int] = (2, 3, 4),
    kernel_transform_mode: int | None = 1,
) -> Built:
    """Build the family with the arguments of upstream's `OFAMobileNetV3`."""
    widths = tuple(make_divisible(width * width_mult) for width in WIDTHS)
    layout = MobileNetV3Layout(widths, choices(ks_list), choices(expand_ratio_list), choices(depth_list))
    return layout.build(n_classes, bn_param, dropout_rate, kernel_transform_mode)


FAMILY = Family(
    build,
    names=mobile_names("conv"),
    **MOBILE,
    recognises=lambda keys: (
        keys.have(*ENDS)
        and (keys.have(r"\.(7to5|5to3)_matrix$") or not keys.have(r"\.mobile_inverted_conv\."))
    ),
    checkpoints=("ofa_mbv3_d234_e346_k357_w1.0", "ofa_mbv3_d234_e346_k357_w1.2"),
    encodings={"arch_encoder": mobile_features, "tutorial": tutorial_features},
)
