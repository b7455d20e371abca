"""PackedConv: a convolution whose weight is packed once, in the layout of the device's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.engine.packed_linear import ONEDNN, SMALLEST_ONEDNN_PRODUCT
from subnetact.files.fork import new_lock
from subnetact.operators.layer_traits import runs_as
from subnetact.operators.operation_traits import OperationTraits

MOST_PIXELS = 1024
"""A small product over at most so many pixels is computed with the plain weight of a 1 x 1 convolution, which
takes 0.3 to 0.85 times as long (`benchmarks/results/linear.json`): a call of oneDNN costs more than that."""
SHAPES = 64
"""Number of input shapes for which a convolution remembers the layout of its weight."""


def plain_conv(module: nn.Module) -> bool:
    """Tell whether a module computes nothing but a zero-padded Conv2d."""
    return (
        isinstance(module, nn.Conv2d)
        and runs_as(module, nn.Conv2d)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def can_pack(weight: Tensor) -> bool:
    """Tell whether oneDNN's fused convolution supports a weight: float32, on the CPU."""
    return ONEDNN and weight.device.type == "cpu" and weight.dtype == torch.float32


def _settings(conv: nn.Conv2d) -> tuple[list[int], list[int], list[int], int]:
    padding: Any = conv.padding
    return list(padding), list(conv.stride), list(conv.dilation), conv.groups


class PackedConv(nn.Module):
    """A convolution with its weight packed, a BatchNorm folded in, and an addition and activation merged."""

    def __init__(
        self, conv: Any, norm: Any = None, activation: OperationTraits | None = None, merge: bool = True
    ) -> None:
        super().__init__()
        self.overwrite = False  # whether the sum may be written over the second input
        self._settings = _settings(conv)
        self._weight: Tensor = conv.weight.detach()
        self._factor: Tensor | None = None
        self._bias: Tensor | None = None if conv.bias is None else conv.bias.detach()
        if norm is not None:
            self._factor = torch.rsqrt(norm.running_var + norm.eps)
            if norm.weight is not None:
                self._factor = self._factor * norm.weight.detach()
            shift = 0.0 if self._bias is None else self._bias
            self._bias = (shift - norm.running_mean) * self._factor
            if norm.bias is not None:
                self._bias = self._bias + norm.bias.detach()
        if self._bias is not None and self._weight.is_floating_point():
            self._bias = self._bias.to(self._weight.dtype)
        self._onednn = can_pack(conv.weight)
        # oneDNN's ReLU and hardtanh turn NaN into a number; without `merge` the activation runs by itself.
        self._merged = (activation.merged, activation.scalars) if activation and merge else ("none", ())
        self._swallows_nan = merge and activation is not None and activation.swallows_nan
        self._activate: Callable[[Tensor], Tensor] | None = None if activation is None else activation.over
        self._reserve: Callable[[int], bool] = lambda _: True
        self._packing = new_lock()
        self._by_layout: dict[bytes, Tensor] = {}
        self._by_shape: dict[torch.Size, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights and the bias."""
        held = sum(map(self._nbytes, list(self._by_layout.values())))
        return held + (0 if self._bias is None else self._bias.nbytes)

    @property
    def swallows_nan(self) -> bool:
        """Whether the result can be a number although the convolution gives NaN."""
        return self._onednn and self._swallows_nan

    def limit(self, reserve: Callable[[int], bool]) -> None:
        """Ask `reserve` for the bytes of every further layout; if it refuses, each call packs the weight."""
        self._reserve = reserve

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Map x to (N, out, H', W') in channels_last; add `other`, which `overwrite` lets it overwrite."""
        weight = self._by_shape.get(x.shape)
        if weight is None:
            weight = self._packed(x.shape)
        if not weight.is_mkldnn:
            if weight.dim() == 2:
                y = F.linear(x.permute(0, 2, 3, 1), weight, self._bias).permute(0, 3, 1, 2)
            else:
                padding, stride, dilation, groups = self._settings
                y = F.conv2d(x, weight, self._bias, stride, padding, dilation, groups)
            return self._finished(y, other)
        return self._convolved(x, weight, other)

    def _finished(self, y: Tensor, other: Tensor | None) -> Tensor:
        """Add and activate, over a fresh result."""
        y = y if other is None else y.add_(other)
        return y if self._activate is None else self._activate(y)

    def _convolved(self, x: Tensor, weight: Tensor, other: Tensor | None) -> Tensor:
        """Run oneDNN's convolution with a packed weight, and what is merged into it."""
        convolve = torch.ops.mkldnn._convolution_pointwise
        name, scalars = self._merged
        y: Tensor
        if other is None:
            y = convolve(x, weight, self._bias, *self._settings, name, scalars, "")
        else:
            unary = None if name == "none" else name
            add = weight, self._bias, *self._settings, "add", None, unary, scalars, ""
            if self.overwrite:
                y = torch.ops.mkldnn._convolution_pointwise_.binary(other, x, *add)
            else:
                y = convolve.binary(x, other, *add)
        return y if self._activate is None or name != "none" else self._activate(y)

    def _packed(self, shape: torch.Size) -> Tensor:
        """Return the weight in the layout for inputs of a shape (N, in, H, W)."""
        with self._packing:  # Other convolutions are packed meanwhile.
            if shape in self._by_shape:
                return self._by_shape[shape]
            # A weight in oneDNN's layout for another shape of inputs can be a hundred times slower.
            packed, layout = self._reordered(shape), b""
            if packed.is_mkldnn:
                layout = bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist())
            if layout not in self._by_layout:
                if not self._reserve(self._nbytes(packed)):
                    return packed
                self._by_layout[layout] = packed
            if len(self._by_shape) >= SHAPES:
                self._by_shape = {}
            self._by_shape[shape] = self._by_layout[layout]
            return self._by_layout[layout]

    def _reordered(self, shape: torch.Size) -> Tensor:
        weight = self._weight
        if self._factor is not None:
            weight = (weight * self._factor.reshape(-1, 1, 1, 1)).to(weight.dtype)
        if not self._onednn:
            return weight.contiguous(memory_format=torch.channels_last)
        pixels = shape[0] * shape[2] * shape[3]
        pointwise = weight.shape[2:] == (1, 1) and self._settings == ([0, 0], [1, 1], [1, 1], 1)
        if pointwise and pixels <= MOST_PIXELS and pixels * weight.numel() <= SMALLEST_ONEDNN_PRODUCT:
            return weight.flatten(1).contiguous()
        packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(weight, *self._settings, shape)
        return packed

    def _nbytes(self, weight: Tensor) -> int:
        return int(torch.ops.mkldnn._nbytes(weight)) if weight.is_mkldnn else weight.nbytes
