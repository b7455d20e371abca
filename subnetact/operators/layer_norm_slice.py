"""LayerNormSlice: norms without statistics of each subnet, over the first features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from subnetact.comparison import equal
from subnetact.device import tolerated
from subnetact.operators.base import Operator
from subnetact.operators.view_module import view_module


class LayerNormSlice(Operator):
    """Slices `weight[:features]` and `bias[:features]` of a LayerNorm, an RMSNorm, a GroupNorm and others.

    Means, variances and mean squares are over the features that the subnet has. A GroupNorm keeps whole
    groups, or any number of features if it has a single group. The many RMSNorm classes of transformers and
    timm are tried: the operator runs the sliced module on random numbers, and compares it with the rule. The
    gated RMSNorms of Mamba-2 work in groups; every subnet has all groups, and of each the first features. An
    InstanceNorm, and torchvision's FrozenBatchNorm2d, treat every channel by itself; subnets have slices of
    their running statistics, if there are any. There is nothing that subnets would be calibrated for.

    Parts:
        features: the features (channels); they may be `Segments` behind a concatenation, and are the
            `Segments` of the groups, of one dimension, in an RMSNorm that works in groups.

    Source:
        AutoFormer and DynaBERT slice their LayerNorms in this way.
    """

    slices = ("norm", "channel norm")
    parts = ("features",)
    segmented = ("features",)

    def check(self) -> None:
        """Refuse other modules, norms over several axes, and what is no RMSNorm of its first features."""
        if self.traits.kind in self.slices:
            super().check()
            if len(getattr(self.template, "normalized_shape", (1,))) != 1:
                raise self.refuse("it normalises over several axes; only norms over one axis can be sliced")
            if self.segments and list(self.buffers()):
                raise self.refuse("its running statistics can be sliced, but not in several segments")
        elif not _is_rms_norm(self):
            raise self.refuse(
                "only GroupNorm, and LayerNorm and RMSNorm over one axis, have an affine it can slice"
            )
        else:
            groups, lengths = _groups(self.template), self.lengths("features")
            dims = {self.dims.get(name) for name in self.names("features")}
            if groups > 1 and (len(lengths) != groups or len({*lengths}) > 1 or len(dims) > 1):
                raise self.refuse(
                    f"it works in {groups} groups of {self.full('features') // groups} features, of each of "
                    "which a subnet keeps equally many; give one segment per group, all of one dimension"
                )

    def full(self, part: str) -> int:
        """Return the number of features of the full network."""
        if self.traits.sizes:
            return super().full(part)
        shape = getattr(self.template, "normalized_shape", None)
        if "weight" in self.shapes and not isinstance(shape, tuple):
            return self.shapes["weight"][0]
        return int((shape or self.template.weight.shape)[0])

    def group_size(self, part: str) -> int:
        """Return the features of one group; 1 if all of them are in one group."""
        groups = getattr(self.template, "num_groups", 1)
        return self.full(part) // groups if groups > 1 else 1

    def zeroing_equals_dropping(self, part: str) -> bool:  # noqa: ARG002
        """Return False where the mean and the variance are over all features, dropped ones included."""
        return self.traits.kind == "channel norm" or getattr(self.template, "num_groups", 1) > 1

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the features, also for the RMSNorms that are not in the table of layer traits."""
        return super().axes(name) if self.traits.axes else ("features",)

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the `normalized_shape`, or the numbers of channels and groups, of the subnet's module."""
        found, features = super().attributes(sizes), self.totals(sizes)[0]
        if "normalized_shape" in self.template.__dict__:
            found["normalized_shape"] = (features,)
        if getattr(self.template, "num_groups", 1) > 1:
            found["num_groups"] = features // self.group_size("features")
        if "group_size" in self.template.__dict__:
            found["group_size"] = features // _groups(self.template)
        return found


def _groups(template: Any) -> int:
    """Return the number of groups in which an RMSNorm works."""
    own = template.__dict__
    size = own.get("group_size")
    return int(own.get("n_groups", 1) if size is None else len(template.weight) // size)


def _is_rms_norm(norm: LayerNormSlice) -> bool:
    """Tell whether a module, sliced to its first features, is an RMSNorm of them."""
    template = norm.template
    weight = template._parameters.get("weight")
    plain = set(template._parameters) == {"weight"} and not template._modules and not template._buffers
    if not plain or weight is None or weight.dim() != 1 or len(weight) < 2 * _groups(template):
        return False
    return any(_is_rms_norm_over(norm, len(weight), trailing) for trailing in ((), (1, 1)))


def _is_rms_norm_over(norm: LayerNormSlice, full: int, trailing: tuple[int, ...]) -> bool:
    """Try a module on (N, features, *trailing), with numbers so large that its epsilon does not matter."""
    groups = _groups(norm.template)
    kept = full // groups // 2 * groups
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(full, generator=generator) + 0.5
    x = 1e3 * torch.randn((3, kept, *trailing), generator=generator)
    with tolerated(), torch.no_grad():  # The module may take other inputs.
        gain = _sliced(norm, weight)(torch.full((1, full, *trailing), 1e3))[:, :kept]
        found = _sliced(norm, weight[:kept])(x)
        grouped = x.view(3, groups, -1, *trailing)
        return equal(found, (grouped / grouped.square().mean(2, keepdim=True).sqrt()).view_as(x) * gain)
    return False


def _sliced(norm: LayerNormSlice, weight: Tensor) -> nn.Module:
    return view_module(norm.template, parameters={"weight": weight}, **norm.attributes((len(weight),)))
