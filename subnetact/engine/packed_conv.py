"""PackedConv: a convolution whose weight is packed once, in the layout of the device's kernels.

A `SlicedConv` reads the slice of its weight in every call, and merges what follows. It holds no weight. A
BatchNorm is folded into a copy of the slice, which lives as long as the call, and oneDNN's kernels compute
the activation and the addition as well. Where there are few pixels for so large a weight, a matrix product
reads the slice where it is, because a copy costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.engine.packed_linear import ONEDNN, ONEDNN_ROWS, SMALLEST_ONEDNN_PRODUCT
from subnetact.files.fork import new_lock
from subnetact.operators.layer_traits import runs_as
from subnetact.operators.operation_traits import OperationTraits

MOST_PIXELS = 1024
"""Over at most so many pixels, a 1 x 1 convolution is a matrix product, taking about 0.9 times as long. A
small one uses the plain weight."""
SHAPES = 64
"""Number of input shapes for which a convolution remembers the layout of its weight."""
FEW_PIXELS = 64
"""Below so many output pixels of a batch, a product with the slice is faster than a copy of it."""
INPUTS_PER_PIXEL = 8
"""So many input channels of a 1x1 convolution need one output pixel more for a copy to pay."""
PIXELS_PER_INPUT = 4
"""Below so many pixels per input channel, oneDNN packs a kernel faster for images in the plain format."""


def plain_conv(module: nn.Module) -> bool:
    """Tell whether a module computes nothing but a zero-padded Conv2d."""
    return (
        isinstance(module, nn.Conv2d)
        and runs_as(module, nn.Conv2d)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def can_pack(weight: Tensor) -> bool:
    """Tell whether oneDNN's fused convolutions support a weight: float32 or int8, on the CPU."""
    return ONEDNN and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.int8)


class PackedConv(nn.Module):
    """A convolution with its weight packed, a BatchNorm folded in, and an addition and activation merged."""

    def __init__(
        self, conv: Any, norm: Any = None, activation: OperationTraits | None = None, merge: bool = True
    ) -> None:
        super().__init__()
        self.overwrite = False  # whether the sum may be written over the second input
        self._settings = list(conv.padding), list(conv.stride), list(conv.dilation), int(conv.groups)
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
        # Whether the result can be a number although the convolution gives NaN.
        self.swallows_nan = merge and self._onednn and activation is not None and activation.swallows_nan
        self._activate: Callable[[Tensor], Tensor] | None = None if activation is None else activation.over
        self.reserve: Callable[[int], bool] = lambda _: True  # if not, each call packs a further layout
        self._packing = new_lock()
        self._by_layout: dict[bytes, Tensor] = {}
        self._by_shape: dict[torch.Size, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights and the bias."""
        held = sum(map(self._nbytes, list(self._by_layout.values())))
        return held + (0 if self._bias is None else self._bias.nbytes)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Map x to (N, out, H', W') in channels_last; add `other`, which `overwrite` lets it overwrite."""
        weight = self._by_shape.get(x.shape)
        if weight is None:
            weight = self._packed(x.shape)
        if weight.dim() == 2:
            return self._multiplied(x, weight, other)
        if not weight.is_mkldnn:
            padding, stride, dilation, groups = self._settings
            return self._finished(F.conv2d(x, weight, self._bias, stride, padding, dilation, groups), other)
        return self._convolved(x, weight, other)

    def _multiplied(self, x: Tensor, weight: Tensor, other: Tensor | None) -> Tensor:
        """Run a 1 x 1 convolution as a product over the pixels; a packed weight merges an activation."""
        rows = x.permute(0, 2, 3, 1)
        name, scalars = self._merged if weight.is_mkldnn and other is None else ("none", ())
        if weight.is_mkldnn:
            y = torch.ops.mkldnn._linear_pointwise(rows, weight, self._bias, name, scalars, "")
        else:
            y = F.linear(rows, weight, self._bias)
        y = y.permute(0, 3, 1, 2)
        return y if name != "none" else self._finished(y, other)

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
                if not self.reserve(self._nbytes(packed)):
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
        if pointwise and pixels <= MOST_PIXELS:
            weight = weight.flatten(1).contiguous()
            few = pixels * weight.numel() <= SMALLEST_ONEDNN_PRODUCT
            return weight if few else torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_ROWS)
        packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(weight, *self._settings, shape)
        return packed

    def _nbytes(self, weight: Tensor) -> int:
        return int(torch.ops.mkldnn._nbytes(weight)) if weight.is_mkldnn else weight.nbytes


class SlicedConv(PackedConv):
    """A float32 convolution on the CPU that packs its slice in every call."""

    def __init__(self, *layers: Any) -> None:
        super().__init__(*layers)
        self._ways: Mapping[torch.Size, tuple[str, tuple[int, ...]]] = {}  # of each shape of inputs
        self._scales = None if self._factor is None else self._factor[:, None, None]
        self._shift = None if self._bias is None else self._bias[:, None, None]

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Run the convolution, as `PackedConv` does."""
        way, size = self._ways.get(x.shape) or self._way(x.shape)
        weight, scales = self._weight, self._scales
        padding, stride, dilation, _ = self._settings
        if way.startswith("slice"):
            if way == "slice, columns":
                rows = torch.ops.aten.im2col(x, weight.shape[2:], dilation, padding, stride).transpose(1, 2)
            else:
                rows = x.permute(0, 2, 3, 1)[:, :: stride[0], :: stride[1]]
            # The kernels of a slice are contiguous, so that flattening its weight makes a view.
            y = F.linear(rows, weight.flatten(1)).view(size).permute(0, 3, 1, 2)
            y = y if scales is None else y.mul_(scales)
            return self._finished(y if self._shift is None else y.add_(self._shift), other)
        folded = weight if scales is None else weight * scales.unsqueeze(1)
        if way == "copy, plain":
            y = F.conv2d(x.contiguous(), folded, self._bias, stride, padding, dilation)
            return self._finished(y.contiguous(memory_format=torch.channels_last), other)
        return self._convolved(x, folded, other)

    def _way(self, shape: torch.Size) -> tuple[str, tuple[int, ...]]:
        """Return how to compute inputs of a shape, and the shape (N, H', W', out) of the result."""
        (out, inputs, *kernel), (padding, stride, dilation, groups) = self._weight.shape, self._settings
        height, width = (
            (shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
            for i in range(2)
        )
        pixels, pointwise = shape[0] * height * width, kernel == [1, 1] and padding == [0, 0]
        if pointwise and groups == 1 and pixels < max(FEW_PIXELS, inputs // INPUTS_PER_PIXEL):
            way = "slice, pixels"
        elif pointwise or groups > 1:
            way = "copy"
        elif pixels < FEW_PIXELS:
            way = "slice, columns"
        else:
            way = "copy, plain" if pixels < PIXELS_PER_INPUT * inputs else "copy"
        answer = way, (shape[0], height, width, out)
        self._ways = {**({} if len(self._ways) >= SHAPES else self._ways), shape: answer}
        return answer
