"""CompOFA-MobileNetV3: a MobileNetV3 in which the depth of a stage decides its expansions.

Source: CompOFA (Sahni et al., ICLR 2021); gatech-sysml/CompOFA, a fork of mit-han-lab/once-for-all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ofa_adapters.family import Family, Keys
from ofa_adapters.networks.mobile_layout import MobileLayout, rename
from ofa_adapters.networks.ofa_mbv3 import network_and_layout
from ofa_adapters.notation import choices, is_list, upstream_config
from subnetact.errors import IllegalChoice, SpecError
from subnetact.operators import Elastic
from subnetact.space import AxisValues, SubnetSpace

STAGE_KERNELS = (3, 5, 3, 3, 5)
SLOTS_PER_STAGE = 4


@dataclass(frozen=True)
class CompoundLayout(MobileLayout):
    """A `MobileLayout` in which kernels may be fixed and the depth may decide the expansion of its stage."""

    def parse(self, config: Any) -> dict[str, Any]:
        """Return the values of the axes for an upstream configuration.

        Args:
            config: upstream's `{"ks", "e", "d"}`. `ks` may be left out if kernels are fixed, and `e` if the
                depth decides the expansion. If they are given, they must agree with what is implied.

        Returns:
            The values of every axis.

        Raises:
            SpecError: a key is missing or unknown, or a list has the wrong length.
            IllegalChoice: a value contradicts what is implied.
        """
        given = upstream_config(self.family, config, ("d",), ("ks", "e"))
        values = {"depth": given["d"]}
        slots = len(self.blocks)
        for key, axis in (("ks", "kernel"), ("e", "expand")):
            implied = self.fixed_kernels if key == "ks" else self._tied(given["d"]) if self.tied else None
            stated = given.get(key)
            if implied is None:
                if stated is None:
                    raise SpecError(f"{self.family}: a configuration needs the key {key!r}")
                values[axis] = stated
            elif stated is not None:
                self._agree(axis, stated if is_list(stated) else [stated] * slots, implied, given["d"])
        return values

    def _tied(self, depths: Any) -> list[Any]:
        per_stage = depths if is_list(depths) else [depths] * len(self.stages)
        if self.tied is None or len(per_stage) != len(self.stages):
            return [None] * len(self.blocks)
        return [self._ratio(per_stage[stage]) for stage, _ in self.blocks]

    def _ratio(self, depth: Any) -> float | None:
        known = self.tied and isinstance(depth, int | float) and depth in self.tied
        return self.tied[int(depth)] if self.tied and known else None

    def _agree(self, axis: str, stated: Sequence[Any], implied: Sequence[Any], depths: Any) -> None:
        per_stage = depths if is_list(depths) else [depths] * len(self.stages)
        if len(stated) != len(self.blocks):
            raise SpecError(f"{self.family}: {axis} has {len(self.blocks)} slots, got {len(stated)} values")
        if len(per_stage) != len(self.stages):
            return
        for i, (stage, position) in enumerate(self.blocks):
            depth = per_stage[stage]
            kept = isinstance(depth, int | float) and position < depth
            if kept and implied[i] is not None and not _equal(stated[i], implied[i]):
                raise IllegalChoice(
                    f"{self.family}: {axis}[{i}] (block{i}): {stated[i]!r} is not a choice; "
                    f"choose from {implied[i]}, which depth {depth} of stage{stage + 1} implies"
                )

    def format(self, values: AxisValues) -> dict[str, Any]:
        """Return the values of the axes as a configuration for upstream's `set_active_subnet`."""
        depths = list(values["depth"])
        expand = self._tied(depths) if self.tied else list(values["expand"])
        kernel = None if self.fixed_kernels else list(values["kernel"])
        return {"wid": None, "ks": kernel, "e": expand, "d": depths}


def _equal(value: Any, implied: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isclose(value, implied)


def build(
    n_classes: int = 1000,
    bn_param: tuple[float, float] = (0.1, 1e-5),
    dropout_rate: float = 0.1,
    base_stage_width: Any = None,  # noqa: ARG001
    width_mult_list: float | Sequence[float] = 1.0,
    ks_list: int | Sequence[int] = (3, 5, 7),
    expand_ratio_list: float | Sequence[float] = (3, 4, 6),
    depth_list: int | Sequence[int] = (2, 3, 4),
    compound: bool = True,
    fixed_kernel: bool = True,
    kernel_transform_mode: int | None = None,
) -> tuple[nn.Module, SubnetSpace, dict[str, Elastic]]:
    """Build the full network, its search space and its elastic description.

    The arguments are those of `OFAMobileNetV3` in the CompOFA fork.

    Args:
        n_classes: number of classes.
        bn_param: momentum and eps of every BatchNorm.
        dropout_rate: dropout rate before the classifier.
        base_stage_width: ignored, as upstream ignores it.
        width_mult_list: the width multiplier of the network; a list must have one entry.
        ks_list: kernel size choices per block.
        expand_ratio_list: expansion ratio choices per block.
        depth_list: depth choices per stage.
        compound: whether the depth of a stage decides the expansion of its blocks: the i-th smallest depth
            goes with the i-th smallest expansion.
        fixed_kernel: whether every block has the kernel size of MobileNetV3.
        kernel_transform_mode: upstream's class attribute. If None, smaller kernels are centre crops of the
            largest; if 1, they are made by learned matrices, as in the elastic checkpoints.

    Returns:
        The plain network at full size, its search space, and its elastic description.

    Raises:
        SpecError: several widths, depths and expansions of different number, or stages that are too deep.
    """
    widths, depths, expands = choices(width_mult_list), choices(depth_list), choices(expand_ratio_list)
    if len(widths) != 1:
        raise SpecError(f"width_mult_list: the width is not elastic, give one multiplier, got {widths}")
    if compound and len(depths) != len(expands):
        raise SpecError(
            f"compound: depths {depths} and expand ratios {expands} cannot be paired; give as many of each"
        )
    if fixed_kernel and depths[-1] > SLOTS_PER_STAGE:
        raise SpecError(
            f"fixed_kernel: kernels are known for {SLOTS_PER_STAGE} blocks per stage, got {depths}"
        )
    fixed = None
    if fixed_kernel:
        # Upstream indexes a list of four entries per stage by block position, even if stages are shorter.
        fixed = tuple(STAGE_KERNELS[i // SLOTS_PER_STAGE] for i in range(depths[-1] * len(STAGE_KERNELS)))
    network, layout = network_and_layout(
        "compofa_mbv3",
        widths[0],
        n_classes,
        bn_param,
        dropout_rate,
        first_residual=True,
        matrices=kernel_transform_mode is not None,
        kernels=choices(ks_list),
        expands=expands,
        depths=depths,
        fixed_kernels=fixed,
        tied=dict(zip(depths, expands, strict=True)) if compound else None,
        cls=CompoundLayout,
    )
    return network, layout.space(), layout.elastic()


def recognises(keys: Keys) -> bool:
    """Return whether the names are those of a CompOFA network: OFA's old names without kernel matrices."""
    return (
        keys.some(r"^first_conv\.")
        and keys.some(r"^final_expand_layer\.")
        and keys.some(r"\.mobile_inverted_conv\.")
        and not keys.some(r"_matrix$")
    )


FAMILY = Family(
    build,
    rename,
    source="gatech-sysml/CompOFA",
    licence="Apache-2.0",
    recognises=recognises,
    unused=r"_matrix$",
    checkpoints=("model_best_compofa_simple.pth.tar", "model_best_compofa_simple_elastic.pth.tar"),
)
