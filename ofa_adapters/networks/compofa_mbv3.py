"""CompOFA-MobileNetV3 (CompOFA, ICLR'21; gatech-sysml/CompOFA): depth and expansion go together."""

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
    """MobileNetV3's layout; kernels may be fixed, and depth may decide the expansion of its stage."""

    def parse(self, config: Any) -> dict[str, Any]:
        """Read upstream's configuration; what is fixed or tied may be left out, but not contradict."""
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
        """Write upstream's configuration, as its `set_active_subnet` takes it."""
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
    """Return the plain network at full size, its space, and what in it is elastic.

    Arguments are the CompOFA fork's own; `bn_param` is (momentum, eps). Kernels are centre crops of
    the largest unless `kernel_transform_mode` is 1 (upstream's class attribute, for the elastic
    checkpoints).

    Raises:
        ValueError: several widths, depths that cannot be paired with expansions, or too deep stages.
    """
    widths, depths, expands = choices(width_mult_list), choices(depth_list), choices(expand_ratio_list)
    if len(widths) != 1:
        raise SpecError(f"width_mult_list: the width is not elastic, give one multiplier, got {widths}")
    if compound and len(depths) != len(expands):
        raise SpecError(
            f"compound: depths {depths} and expand ratios {expands} cannot be paired; give as many of each"
        )
    if fixed_kernel and depths[-1] > SLOTS_PER_STAGE:
        raise SpecError(f"fixed_kernel: kernels are known for {SLOTS_PER_STAGE} blocks a stage, got {depths}")
    fixed = None
    if fixed_kernel:
        # Upstream reads one list of four per stage by block position, whatever the stages' length.
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


def looks(keys: Keys) -> bool:
    """Tell whether the names are of a CompOFA network: old names, and no kernel matrices."""
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
    looks=looks,
    unused=r"_matrix$",
    checkpoints=("model_best_compofa_simple.pth.tar", "model_best_compofa_simple_elastic.pth.tar"),
)
