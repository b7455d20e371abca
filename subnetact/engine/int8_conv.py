"""Int8Conv: the packed int8 convolution of fused programs; `operators/lowered_weight.py` slices its weight.

It multiplies the same int8 numbers as the convolution of the view: every sample is quantised by itself, in
every call. oneDNN's convolution then does all the rest, sample by sample, because a call takes one scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from subnetact.engine.packed_conv import PackedConv
from subnetact.errors import PrecisionError
from subnetact.operators.kernel_table import STRIDED, kernel_here
from subnetact.operators.lowered_weight import SMALLEST_SCALE, LowConv, quantise_rows

ZERO = 128
"""The uint8 number that stands for zero."""


def runs_at_int8(conv: nn.Module) -> bool:
    """Tell whether oneDNN has an int8 kernel for a convolution of a view on this kind of machine."""
    module: Any = conv
    if not isinstance(conv, LowConv) or module.weight.dtype != torch.int8 or isinstance(module.padding, str):
        return False
    try:
        kernel = kernel_here("int8", module.weight.device)
    except PrecisionError:
        return False
    return kernel.name == STRIDED and hasattr(torch.ops.onednn, "qconv2d_pointwise")


class Int8Conv(PackedConv):
    """A convolution of an int8 view, packed."""

    def __init__(self, conv: Any, *merged: Any) -> None:
        super().__init__(conv, *merged)
        scales: Tensor = conv.lowered.scale.detach()
        if self._factor is not None:
            scales = scales * self._factor.abs()
        self._scales = scales.clamp_min(SMALLEST_SCALE)
        self._zeros = torch.zeros(len(self._scales), dtype=torch.int32)

    def _reordered(self, shape: torch.Size) -> Tensor:
        weight = self._weight
        if self._factor is not None:  # Scales are positive, so a negative factor changes the weights.
            weight = torch.where((self._factor < 0)[:, None, None, None], -weight, weight)
        padding, stride, dilation, groups = self._settings
        packed: Tensor = torch.ops.onednn.qconv_prepack(
            weight.contiguous(), self._scales, 1.0, ZERO, stride, padding, dilation, groups, list(shape)
        )
        return packed

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Run the convolution, as `PackedConv` does."""
        shape = x[:1].shape
        weight = self._by_shape.get(shape)
        if weight is None:
            weight = self._packed(shape)
        n, channels, height, width = x.shape
        short, scales = quantise_rows(x.permute(0, 2, 3, 1).reshape(n, -1))
        shifted = short.view(torch.uint8).bitwise_xor_(ZERO)
        samples = shifted.view(n, 1, height, width, channels).permute(0, 1, 4, 2, 3)
        total = None if other is None else other if self.overwrite else other.clone()
        padding, stride, dilation, groups = self._settings
        settings = (self._bias, stride, padding, dilation, groups, 1.0, 0, torch.float32)
        name, scalars = self._merged
        unary = None if name == "none" else name
        convolve: Any = torch.ops.onednn.qconv2d_pointwise
        outputs = list[Tensor]()
        for i, scale in enumerate(scales[:, 0].tolist()):
            sample = (samples[i], scale, ZERO, weight, self._scales, self._zeros)
            if total is None:
                outputs.append(convolve(*sample, *settings, name, scalars, ""))
            else:  # in place
                row = total[i : i + 1]
                convolve.binary(*sample, row, *settings, 1.0, 0, "sum", 1.0, unary, scalars, "")
        if total is not None:
            return total
        return outputs[0] if n == 1 else torch.cat(outputs)
