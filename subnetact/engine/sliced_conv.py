"""SlicedConv: a convolution that reads the slice of its weight in every call, and merges what follows.

It holds no weight. A BatchNorm is folded into a copy of the slice, which lives as long as the call, and
oneDNN's kernels compute the activation and the addition as well. Where there are few pixels for so large a
weight, a matrix product reads the slice where it is, because a copy costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subnetact.engine.packed_conv import SHAPES, PackedConv

FEW_PIXELS = 64
"""Below so many output pixels of a batch, a product with the slice is faster than a copy of it."""
INPUTS_PER_PIXEL = 8
"""So many input channels of a 1x1 convolution need one output pixel more for a copy to pay."""
PIXELS_PER_INPUT = 4
"""Below so many pixels per input channel, oneDNN packs a kernel faster for images in the plain format."""


class SlicedConv(PackedConv):
    """A float32 convolution on the CPU that packs its slice in every call."""

    def __init__(self, *layers: Any) -> None:
        super().__init__(*layers)
        self._ways: Mapping[torch.Size, tuple[str, tuple[int, ...]]] = {}  # of each shape of inputs
        self._scales = None if self._factor is None else self._factor[:, None, None]
        self._shift = None if self._bias is None else self._bias[:, None, None]

    @property
    def nbytes(self) -> int:
        """Bytes that are held between calls: those of the folded bias, which is as small as statistics."""
        return 0

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
