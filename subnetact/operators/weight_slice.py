"""WeightSlice: the first channels of a convolution, the first features of a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from subnetact.operators.base import Operator
from subnetact.space import Row

__all__ = ["WeightSlice"]


class WeightSlice(Operator):
    """Slices `weight[:out, :in_]` and `bias[:out]` (SuperServe section 3.1; every published family).

    Covers `nn.Conv1d/2d/3d` and `nn.Linear`. A grouped convolution keeps the width of a group and
    loses whole groups, so a depthwise convolution keeps its first channels; only one of `out` and
    `in_` need be followed there, the other is implied.
    """

    parts = ("out", "in_")

    def check(self) -> None:
        """Refuse other modules, and grouped ones whose two sides follow different dimensions."""
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
        """Return every number of channels that is whole groups."""
        each = self.full(part) // self._groups if self._groups > 1 else 1
        return range(each, self.full(part) + 1, each)

    def full(self, part: str) -> int:
        """Return the number of output or input channels of the full network."""
        names = ("out_features", "in_features") if self._is_linear else ("out_channels", "in_channels")
        return int(getattr(self.template, names[part == "in_"]))

    @property
    def _is_linear(self) -> bool:
        return isinstance(self.template, nn.Linear)

    def sizes(self, row: Row) -> tuple[int, ...]:
        """Return (out, in_), the one implied by the other where groups tie them together."""
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
