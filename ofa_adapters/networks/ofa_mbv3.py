"""OFA-MobileNetV3: a MobileNetV3 of elastic depth, kernel and expansion.

Source: Once-for-All (Cai et al., ICLR 2020); mit-han-lab/once-for-all,
ofa/imagenet_classification/elastic_nn/networks/ofa_mbv3.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ofa_adapters.family import Family, Keys
from ofa_adapters.features import ARCH_ENCODER_SIZES, mobile_features, tutorial_features
from ofa_adapters.networks.mobile_layout import MBConv, MobileLayout, MobileStage, rename
from ofa_adapters.notation import choices
from subnetact.operators import Elastic
from subnetact.space import SubnetSpace, make_divisible

WIDTHS = (16, 16, 24, 40, 80, 112, 160, 960, 1280)
STRIDES = (2, 2, 2, 1, 2)
ACTIVATIONS = (F.relu, F.relu, F.hardswish, F.hardswish, F.hardswish)
SQUEEZES = (False, True, False, True, True)


class MobileNetV3(nn.Module):
    """The full network: stem, a fixed block, elastic stages, and a head of two 1x1 convolutions."""

    def __init__(
        self,
        blocks: list[MBConv],
        widths: Sequence[int],
        n_classes: int,
        bn: Mapping[str, Any],
        dropout: float,
    ) -> None:
        super().__init__()
        first, *_, last, final, mixed = widths
        self.first_conv = nn.Conv2d(3, first, 3, 2, 1, bias=False)
        self.first_bn = nn.BatchNorm2d(first, **bn)
        self.blocks = nn.Sequential(*blocks)
        self.final_conv = nn.Conv2d(last, final, 1, bias=False)
        self.final_bn = nn.BatchNorm2d(final, **bn)
        self.mix_conv = nn.Conv2d(final, mixed, 1, bias=False)
        self.dropout = nn.Dropout(float(dropout))
        self.classifier = nn.Linear(mixed, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, n_classes)."""
        x = self.blocks(F.hardswish(self.first_bn(self.first_conv(x))))
        x = F.hardswish(self.final_bn(self.final_conv(x))).mean((2, 3), keepdim=True)
        x = F.hardswish(self.mix_conv(x)).flatten(1)
        return self.classifier(self.dropout(x))  # type: ignore[no-any-return]


def network_and_layout(
    family: str,
    width_mult: float,
    n_classes: int,
    bn_param: tuple[float, float],
    dropout_rate: float,
    first_residual: bool,
    matrices: bool,
    cls: type[MobileLayout] = MobileLayout,
    **layout: Any,
) -> tuple[MobileNetV3, MobileLayout]:
    """Build a MobileNetV3 at full size, and the layout of its elastic stages.

    Args:
        family: name of the search space.
        width_mult: width multiplier of the network.
        n_classes: number of classes.
        bn_param: momentum and eps of every BatchNorm.
        dropout_rate: dropout rate before the classifier.
        first_residual: whether the fixed first block has a residual connection.
        matrices: whether smaller kernels are made by learned matrices.
        cls: class of the layout.
        layout: further arguments of that class.

    Returns:
        The network and the layout.
    """
    widths = [make_divisible(width * width_mult) for width in WIDTHS]
    stages = tuple(map(MobileStage, widths[2:7], STRIDES, ACTIVATIONS, SQUEEZES))
    found = cls(family, widths[1], stages, **layout)
    bn = {"momentum": bn_param[0], "eps": bn_param[1]}
    fixed = MBConv(widths[0], None, widths[1], (3,), 1, F.relu, bn, residual=first_residual)
    blocks = [fixed, *found.network_blocks(bn, matrices)]
    return MobileNetV3(blocks, widths, n_classes, bn, dropout_rate), found


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
) -> tuple[nn.Module, SubnetSpace, dict[str, Elastic]]:
    """Build the full network, its search space and its elastic description.

    The arguments are those of upstream's `OFAMobileNetV3`.

    Args:
        n_classes: number of classes.
        bn_param: momentum and eps of every BatchNorm.
        dropout_rate: dropout rate before the classifier.
        base_stage_width: ignored, as upstream ignores it.
        width_mult: width multiplier of the network.
        ks_list: kernel size choices per block.
        expand_ratio_list: expansion ratio choices per block.
        depth_list: depth choices per stage.
        kernel_transform_mode: upstream's class attribute. If 1, smaller kernels are made by learned matrices;
            if None, they are centre crops of the largest.

    Returns:
        The plain network at full size, its search space, and its elastic description.

    Raises:
        SpecError: a list is empty, or contains something other than finite numbers >= 0.
    """
    network, layout = network_and_layout(
        "ofa_mbv3",
        width_mult,
        n_classes,
        bn_param,
        dropout_rate,
        first_residual=make_divisible(WIDTHS[0] * width_mult) == make_divisible(WIDTHS[1] * width_mult),
        matrices=kernel_transform_mode is not None,
        kernels=choices(ks_list),
        expands=choices(expand_ratio_list),
        depths=choices(depth_list),
    )
    return network, layout.space(), layout.elastic()


def recognises(keys: Keys) -> bool:
    """Return whether the names are those of an OFA-MobileNetV3 or of a network extracted from one."""
    return (
        keys.some(r"^first_conv\.")
        and keys.some(r"^final_expand_layer\.")
        and (keys.some(r"\.(7to5|5to3)_matrix$") or not keys.some(r"\.mobile_inverted_conv\."))
    )


FAMILY = Family(
    build,
    rename,
    source="mit-han-lab/once-for-all",
    licence="MIT",
    recognises=recognises,
    checkpoints=("ofa_mbv3_d234_e346_k357_w1.0", "ofa_mbv3_d234_e346_k357_w1.2"),
    image_sizes=ARCH_ENCODER_SIZES,
    encodings={"arch_encoder": mobile_features, "tutorial": tutorial_features},
)
