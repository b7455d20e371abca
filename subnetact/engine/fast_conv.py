"""Faster convolutions for a view, which read the sliced weights where they are.

ATen copies a sliced weight into channels_last and again into oneDNN's layout in every call; a matrix product
reads the slice in place. Nothing is traced, so every network can have them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.engine.packed_conv import can_pack, packed_once, plain_conv
from subnetact.operators.view_module import mix_in_

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
            large = self.stride == (1, 1) and x.numel() >= LARGE_MAP * x.shape[1]
            if large and can_pack(self.weight) and not torch.is_autocast_enabled("cpu"):
                return packed_once(self, x)
            pixels = x.permute(0, 2, 3, 1)
            if self.stride != (1, 1):
                pixels = pixels[:, :: self.stride[0], :: self.stride[1]]
            return F.linear(pixels, self.weight[:, :, 0, 0], self.bias).permute(0, 3, 1, 2)
        if x.device.type == "cpu":
            height, width = (
                (x.shape[2 + i] + 2 * self.padding[i] - self.dilation[i] * (self.kernel_size[i] - 1) - 1)
                // self.stride[i]
                + 1
                for i in range(2)
            )
            if x.shape[0] * height * width <= SMALL_MAP:
                columns = F.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)
                # The kernels of a slice are contiguous, so flattening the weight makes a view of it.
                y = F.linear(columns.transpose(1, 2), self.weight.flatten(1), self.bias)
                return y.view(x.shape[0], height, width, -1).permute(0, 3, 1, 2)
        return super().forward(x)  # type: ignore[misc, no-any-return]
