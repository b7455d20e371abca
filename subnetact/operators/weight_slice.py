"""WeightSlice: the first channels of a convolution, the first features of a linear layer or an embedding."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from subnetact.operators.base import Operator
from subnetact.operators.lowered_weight import FLOAT_BITS, Low, LowConv, LowConv1D, LowLinear
from subnetact.operators.weight_runs import runs_of
from subnetact.space import SizeRow

_CONV1D = "transformers.pytorch_utils"
"""The module of the forward of the `Conv1D` of Hugging Face."""


class WeightSlice(Operator):
    """Slices `weight[:out, :in_]` and `bias[:out]` of a convolution, a linear layer or an embedding.

    It covers `nn.Conv1d` to `nn.Conv3d`, `nn.ConvTranspose1d` to `nn.ConvTranspose3d`, `nn.Linear`,
    `nn.Embedding` (the outputs are its columns) and the `Conv1D` of Hugging Face's transformers. Transposed
    convolutions, embeddings and `Conv1D` store the inputs first: `weight[:in_, :out]`.

    A grouped convolution loses whole groups. The second axis of its weight is the inputs of one group and
    stays: a subnet with g of G groups uses `weight[: g * out_channels / G]`. A depthwise convolution keeps
    its first channels.

    Parts:
        out: the output channels or features; it may be the `Segments` of a fused layer.
        in_: the input channels or features; they may be `Segments` behind a concatenation. For a grouped
            convolution one of `out` and `in_` implies the other. An embedding has no elastic inputs, because
            every row belongs to one index.

    Source:
        SuperServe, section 3.1. Every published family slices in this way.
    """

    slices = ("convolution", "transposed convolution", "linear", "embedding")
    parts = ("out", "in_")
    segmented = ("out", "in_")

    def check(self) -> None:
        """Refuse other templates, what changes its weight, and inputs that cannot be elastic."""
        super().check()
        extra = [n for n, p in self._parameters.items() if p is not None and n not in self.traits.axes]
        if extra:
            raise self.refuse(f"it slices weight and bias, and has no rule for {', '.join(extra)}")
        if self.traits.kind == "embedding" and self._followed("in_"):
            raise self.refuse("every row of an embedding belongs to one index; only 'out' can be elastic")
        if getattr(self.template, "max_norm", None) is not None:
            raise self.refuse("with max_norm, a subnet would renormalise rows of the weights of all subnets")
        out, in_ = self._followed("out"), self._followed("in_")
        if self._groups > 1 and out and in_ and out != in_ and self.full("out") == self.full("in_"):
            raise self.refuse("the inputs and outputs of a grouped convolution follow one dimension")

    @property
    def _groups(self) -> int:
        return int(getattr(self.template, "groups", 1))

    def group_size(self, part: str) -> int:
        """Return the channels of one group; 1 if there are no groups."""
        return self.full(part) // self._groups if self._groups > 1 else 1

    def _followed(self, part: str) -> list[int | None]:
        """Return the position of the dimension of every segment; an empty list if no segment has one."""
        dims = [self.dims.get(name) for name in self.names(part)]
        return dims if any(dim is not None for dim in dims) else []

    def lengths(self, part: str) -> tuple[int, ...]:
        """Return the full lengths of the segments; both sides of a grouped convolution have the same ones."""
        other = self.parts[part == "out"]
        if self._groups > 1 and part not in self.segments and other in self.segments:
            return tuple(n // self.group_size(other) * self.group_size(part) for n in self.segments[other])
        return super().lengths(part)

    def zeroing_equals_dropping(self, part: str) -> bool:  # noqa: ARG002
        """Return False for unknown forwards, which may normalise the weights over all inputs."""
        home = str(type(self.template).forward.__module__)
        known = home == _CONV1D or home.startswith("torch.nn.")
        return known or self._groups > 1 or self.traits.kind == "embedding"

    def sizes(self, row: SizeRow) -> tuple[int, ...]:
        """Return (out, in_) of a subnet, per segment; in a grouped convolution one implies the other."""
        given = super().sizes(row)
        if self._groups == 1:
            return given
        sides = dict(zip(self.parts, self.kept_parts(given), strict=True))
        leading = "out" if self._followed("out") else "in_"
        groups = [size // self.group_size(leading) for size in sides[leading].sizes]
        found = {part: tuple(n * self.group_size(part) for n in groups) for part in self.parts}
        followed = [part for part in self.parts if self._followed(part)]
        if self.checks and any(found[part] != sides[part].sizes for part in followed):
            raise self.refuse(
                f"{sides['out'].total} x {sides['in_'].total} channels are not whole groups of "
                f"{self.group_size('out')} x {self.group_size('in_')}"
            )
        return found["out"] + found["in_"]

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the parts of the axes; the second axis of a grouped weight is one group, which stays."""
        return super().axes(name)[: None if self._groups == 1 else 1]

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the channel counts (and groups) of the subnet's module."""
        found = super().attributes(sizes)
        if self._groups > 1:
            found["groups"] = self._groups * self.totals(sizes)[0] // self.full("out")
        return found

    def view_tensors(self, sizes: tuple[int, ...], bits: int) -> dict[str, Tensor | None]:
        """Return what every operator does, or the runs of the weight of a linear layer that is not packed."""
        packs = self.actuation is None or self.actuation.packs
        if not packs and bits == FLOAT_BITS and type(self.template).forward is nn.Linear.forward:
            runs = runs_of(self.get_parameter("weight"), *self.kept_parts(sizes))
            if len(runs) > 1:
                return {**runs, **self.sliced(sizes, {"bias": self._parameters["bias"]})}
        return super().view_tensors(sizes, bits)

    def low_mixin(self) -> type[Low] | None:
        """Return the forward at a lower precision of a linear layer, a convolution or a `Conv1D`."""
        module: Any = self.template
        forward = type(module).forward
        if forward is nn.Linear.forward:
            return LowLinear
        if forward is nn.Conv2d.forward and type(module)._conv_forward is nn.Conv2d._conv_forward:
            padded = any(module._reversed_padding_repeated_twice) and module.padding_mode != "zeros"
            return None if module.groups > 1 or padded else LowConv
        return LowConv1D if forward.__module__ == _CONV1D else None
