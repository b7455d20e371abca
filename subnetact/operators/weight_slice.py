"""WeightSlice: the first channels of a convolution, the first features of a linear layer.

The slicing rule is `weight[:out, :in_]` and `bias[:out]`.

Grouped convolutions keep the number of channels per group and lose whole groups. With G groups of
`in_channels / G` inputs and `out_channels / G` outputs, a subnet with g of the G groups uses
`weight[: g * out_channels / G]` with all columns, because the second axis of the weight is the inputs of one
group. A depthwise convolution (one channel per group) therefore keeps its first channels. The number of
outputs decides the number of inputs and the other way round, so only one of `out` and `in_` needs a
dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from subnetact.operators.base import Elastic, Operator
from subnetact.space import SizeRow

__all__ = ["WeightSlice"]


class WeightSlice(Operator):
    """Slices `weight[:out, :in_]` and `bias[:out]` of a convolution or a linear layer.

    It covers `nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d` and `nn.Linear`. How grouped convolutions are sliced is
    said at the top of this file: they lose whole groups.

    Source:
        SuperServe, section 3.1. Every published family slices in this way.
    """

    parts = ("out", "in_")

    @classmethod
    def on(cls, *, out: str | None = None, in_: str | None = None, **others: str) -> Elastic:
        """Describe an elastic convolution or linear layer, for `insert_`.

        Args:
            out: the dimension that gives the number of output channels or features. If None, all are kept.
            in_: the dimension that gives the number of input channels or features. If None, all are kept.
                For a grouped convolution one of `out` and `in_` implies the other.
            others: parts that this operator does not have; `insert_` refuses them.
        """
        return cls._described(out=out, in_=in_, **others)

    def check(self) -> None:
        """Check that the template is a convolution or linear layer, and that grouped sides agree.

        Raises:
            InsertError: the template is another module, or a grouped convolution whose inputs and outputs
                follow different dimensions.
        """
        if not isinstance(self.template, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
            raise self.refuse("only Conv1d, Conv2d, Conv3d and Linear have a weight it can slice")
        if self._groups > 1:
            out, in_ = self.dims.get("out"), self.dims.get("in_")
            if out is not None and in_ is not None and out != in_ and self.full("out") == self.full("in_"):
                raise self.refuse("the inputs and outputs of a grouped convolution follow one dimension")

    @property
    def _groups(self) -> int:
        return int(getattr(self.template, "groups", 1))

    def legal(self, part: str) -> Sequence[int]:
        """Return every legal number of channels: multiples of the channels of one group."""
        each = self.full(part) // self._groups if self._groups > 1 else 1
        return range(each, self.full(part) + 1, each)

    def full(self, part: str) -> int:
        """Return the number of output or input channels (or features) of the full network."""
        names = ("out_features", "in_features") if self._is_linear else ("out_channels", "in_channels")
        return int(getattr(self.template, names[part == "in_"]))

    @property
    def _is_linear(self) -> bool:
        return isinstance(self.template, nn.Linear)

    def sizes(self, row: SizeRow) -> tuple[int, ...]:
        """Return (out, in_) of a subnet. In a grouped convolution one of them implies the other.

        Raises:
            SpecError: a size is not legal.
            InsertError: the channels are not whole groups.
        """
        out, in_ = self.size("out", row), self.size("in_", row)
        if self._groups > 1:
            per_out, per_in = self.full("out") // self._groups, self.full("in_") // self._groups
            groups = out // per_out if "out" in self.dims else in_ // per_in
            sliced = groups * per_out, groups * per_in
            whole = not self.checks or all(
                s == n for s, n, p in zip(sliced, (out, in_), self.parts, strict=True) if p in self.dims
            )
            if not whole:
                raise self.refuse(f"{out} x {in_} channels are not whole groups of {per_out} x {per_in}")
            return sliced
        return out, in_

    def tensors(self, sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
        """Return `weight` and `bias` of the first `out` outputs and `in_` inputs."""
        out, in_ = sizes
        weight: Any = self.weight
        bias: Any = self.bias
        width = weight.shape[1] if self._groups > 1 else in_
        return {"weight": weight[:out, :width], "bias": None if bias is None else bias[:out]}

    def attributes(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Return the channel counts (and groups) of the subnet's module."""
        out, in_ = sizes
        if self._is_linear:
            return {"out_features": out, "in_features": in_}
        groups = self._groups * out // self.full("out") if self._groups > 1 else 1
        return {"out_channels": out, "in_channels": in_, "groups": groups}
