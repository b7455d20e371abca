"""Faster convolutions for a view, which read the sliced weights where they are.

ATen copies a sliced weight into channels_last and again into oneDNN's layout in every call; a matrix product
reads the slice in place. The convolutions of a view are swapped by class. Nothing is traced, so every
network can have them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.engine.packed_conv import PackedConv, can_pack, plain_conv
from subnetact.operators.view_module import mix_in_

__all__ = ["SMALL_MAP", "use_fast_convs_"]

SMALL_MAP = 128
"""Up to this number of output pixels, unfolding the input is cheaper than packing the weight in the call."""
LARGE_MAP = 4096
"""From this number of pixels, packing a 1x1 weight in the call is cheaper than a product with the slice."""


def use_fast_convs_(view: nn.Module) -> nn.Module:
    """Give the plain, ungrouped convolutions of a private view the faster forward, and return the view."""
    for module in view.modules():
        if isinstance(module, nn.Conv2d) and plain_conv(module) and module.groups == 1:
            mix_in_(module, _FastConv)
    return view


class _FastConv:
    """The forward of a Conv2d for inputs in channels_last; for others, that of the plain class."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Map (N, in, H, W) to (N, out, H', W')."""
        if not x.is_contiguous(memory_format=torch.channels_last):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        if self.kernel_size == (1, 1) and self.padding == (0, 0):
            if self.stride == (1, 1) and x.numel() >= LARGE_MAP * x.shape[1] and can_pack(self.weight):
                return PackedConv(self, lambda: self.weight, self.bias, self.weight.dtype)(x)
            return _pointwise(self, x)
        if x.device.type == "cpu":
            height, width = (
                (x.shape[2 + i] + 2 * self.padding[i] - self.dilation[i] * (self.kernel_size[i] - 1) - 1)
                // self.stride[i]
                + 1
                for i in range(2)
            )
            if x.shape[0] * height * width <= SMALL_MAP:
                return _unfolded(self, x, height, width)
        return super().forward(x)  # type: ignore[misc, no-any-return]


def _pointwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    down, right = conv.stride
    pixels = x.permute(0, 2, 3, 1)
    if (down, right) != (1, 1):
        pixels = pixels[:, ::down, ::right]
    return F.linear(pixels, conv.weight[:, :, 0, 0], conv.bias).permute(0, 3, 1, 2)


def _unfolded(conv: nn.Conv2d, x: Tensor, height: int, width: int) -> Tensor:
    # The kernels of a slice are contiguous in memory, so flattening the weight makes a view of it.
    columns = F.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride)  # type: ignore[arg-type]
    y = F.linear(columns.transpose(1, 2), conv.weight.flatten(1), conv.bias)
    return y.view(x.shape[0], height, width, -1).permute(0, 3, 1, 2)
