"""CompOFA-MobileNetV3: a MobileNetV3 in which the depth of a stage decides its expansions.

Source: CompOFA (Sahni et al., ICLR 2021); gatech-sysml/CompOFA, a fork of mit-han-lab/once-for-all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ofa_adapters.family import Built, Family
from ofa_adapters.layout import choices
from ofa_adapters.networks.mobile import SPELLINGS, mobile_names, mobile_shown
from ofa_adapters.networks.ofa_mbv3 import ENDS, WIDTHS, MobileNetV3Layout
from subnetact.errors import IllegalChoice, SpecError
from subnetact.space import Axis, AxisValues, make_divisible

STAGE_KERNELS = (3, 5, 3, 3, 5)
STAGE_SLOTS = 4


@dataclass(frozen=True)
class CompoundLayout(MobileNetV3Layout):
    """Kernels are an axis unless all are fixed, and expansions unless every depth has its ratio."""

    fixed_kernels: tuple[int, ...] | None = None
    ratios: Mapping[int, float] | None = None

    family = "compofa_mbv3"
    optional = ("ks", "e")

    def implied(self, depths: Sequence[int]) -> dict[str, tuple[Any, ...]]:
        """Return the values of the axes that this space does not have, for the depth of every stage."""
        expands = [self.ratios[depths[stage]] for stage, _, _ in self.blocks] if self.ratios else ()
        implied = {"kernel": self.fixed_kernels, "expand": tuple(expands)}
        return {axis: values for axis, values in implied.items() if values}

    def axes(self) -> list[Axis]:
        fixed = {"kernel": self.fixed_kernels, "expand": self.ratios}
        return [axis for axis in super().axes() if not fixed.get(axis.name)]

    def sizes(self, values: AxisValues) -> dict[str, int]:
        return super().sizes({**values, **self.implied(values["depth"])})

    def format(self, values: AxisValues) -> dict[str, Any]:
        """Return the values of the axes as a configuration for upstream's `set_active_subnet`."""
        complete = {**values, **self.implied(values["depth"])}
        kernel = None if self.fixed_kernels else list(values["kernel"])
        return {"wid": None, "ks": kernel, "e": list(complete["expand"]), "d": list(values["depth"])}

    def parse(self, config: Any) -> dict[str, Any]:
        """Return the values of the axes; stated kernels and expansions must agree with what is implied."""
        given = self.entries(config)
        values = {"depth": given["d"]}
        depths = given["d"] if isinstance(given["d"], list) else [given["d"]] * len(self.stages)
        legal = len(depths) == len(self.stages) and all(depth in self.depths for depth in depths)
        for key, axis, fixed in (("ks", "kernel", self.fixed_kernels), ("e", "expand", self.ratios)):
            stated = given.get(key)
            if not fixed and stated is None:
                raise SpecError(f"{self.family}: a configuration needs the key {key!r}")
            if not fixed:
                values[axis] = stated
            elif stated is not None and legal:  # The space refuses other depths.
                slots = stated if isinstance(stated, list) else [stated] * len(self.blocks)
                implied = self.implied(depths)[axis]
                kept = [i for i, (s, position, _) in enumerate(self.blocks) if position < depths[s]]
                if len(slots) != len(implied) or any(slots[i] != implied[i] for i in kept):
                    raise IllegalChoice(
                        f"{self.family}: the depths {depths} imply {axis}, one value per block; leave out "
                        f"{key!r}, or choose from {list(implied)}, got {stated}"
                    )
        return values


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
) -> Built:
    """Build the family with the arguments of `OFAMobileNetV3` in the CompOFA fork.

    Args:
        width_mult_list: the width multiplier of the network; a list must have one entry.
        compound: whether the depth of a stage decides the expansion of its blocks: the i-th smallest depth
            goes with the i-th smallest expansion.
        fixed_kernel: whether every block has the kernel size of MobileNetV3.
        kernel_transform_mode: 1 for the elastic checkpoints, whose smaller kernels are made by matrices.
    """
    multipliers, depths, expands = choices(width_mult_list), choices(depth_list), choices(expand_ratio_list)
    if len(multipliers) != 1:
        raise SpecError(f"width_mult_list: the width is not elastic, give one multiplier, got {multipliers}")
    if compound and len(depths) != len(expands):
        raise SpecError(
            f"compound: depths {depths} and expand ratios {expands} cannot be paired; give as many of each"
        )
    if fixed_kernel and depths[-1] > STAGE_SLOTS:
        raise SpecError(f"fixed_kernel: kernels are known for {STAGE_SLOTS} blocks per stage, got {depths}")
    # Upstream indexes a list of four entries per stage by block position, even if stages are shorter.
    kernels = (STAGE_KERNELS[i // STAGE_SLOTS] for i in range(depths[-1] * len(STAGE_KERNELS)))
    fixed = tuple(kernels) if fixed_kernel else None
    widths = tuple(make_divisible(width * multipliers[0]) for width in WIDTHS)
    ratios = dict(zip(depths, expands, strict=True)) if compound else None
    layout = CompoundLayout(widths, choices(ks_list), expands, depths, fixed, ratios)
    return layout.build(n_classes, bn_param, dropout_rate, kernel_transform_mode)


FAMILY = Family(
    build,
    names=mobile_names("mobile_inverted_conv"),
    spellings=SPELLINGS,
    source="gatech-sysml/CompOFA",
    licence="Apache-2.0",
    recognises=lambda keys: keys.have(*ENDS, r"\.mobile_inverted_conv\.") and not keys.have(r"_matrix$"),
    unused=r"_matrix$",
    shown={k: rule for k, rule in mobile_shown("width_mult_list").items() if k != "ks_list"},
    checkpoints=("model_best_compofa_simple.pth.tar", "model_best_compofa_simple_elastic.pth.tar"),
)
