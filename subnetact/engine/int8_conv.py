"""Int8Conv: a packed convolution that computes in int8, for fused programs of int8 subnets.

The input is quantised in every call, with one scale for the whole batch, and the weight per output channel.
oneDNN's int8 convolution then adds the bias, applies the activation and writes float32. Input shapes for
which this would take longer than float32 run at float32, with the same int8 weight scaled back, and so do
batches in which one input is much larger than another one, which would be left with few levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subnetact.engine.packed_conv import PackedConv
from subnetact.operators.precision import CHUNK, TINY, LowConv, LowWideConv, lowered

__all__ = ["Int8Conv", "int8_pays"]

LEVELS = 255
"""The largest uint8 number."""
WORTHWHILE = 160
"""Quantising one number takes as long as int8 saves in this many products with it."""
SPREAD = 8.0
"""The largest ratio of the ranges of two inputs of one batch that share a scale."""
FIXED = 1.5e7
"""The operations of a quantisation take as long as int8 saves in this many products, whatever their size."""


def int8_pays(conv: nn.Module) -> bool:
    """Tell whether a convolution of an int8 view is faster in int8 for large inputs, quantisation included.

    Every number of the input is quantised once, and multiplied with one weight per output channel and
    position of the kernel. Convolutions with few output channels, and depthwise ones, stay at float32.

    Args:
        conv: a module of a view.
    """
    if not isinstance(conv, LowConv | LowWideConv) or not _available():
        return False
    module: Any = conv
    height, width = module.kernel_size
    down, right = module.stride
    on_cpu = module.weight.device.type == "cpu" and module.groups == 1
    return bool(on_cpu and module.out_channels * height * width >= WORTHWHILE * down * right)


def _available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(  # type: ignore[no-untyped-call]
        torch.ops.onednn, "qconv2d_pointwise"
    )


class Int8Conv(PackedConv):
    """A convolution with its weight packed for oneDNN's int8 kernels.

    Args:
        conv: the convolution of an int8 view.
        factor: a factor per output channel that the weight is multiplied with, that of a BatchNorm. If None,
            the weight is used as it is.
        bias: of shape (out,), or None.
        activation: as for `PackedConv`.
        scalars: as for `PackedConv`.
        unsigned: whether no input is ever negative.
    """

    def __init__(
        self,
        conv: Any,
        factor: Tensor | None,
        bias: Tensor | None,
        activation: str = "none",
        scalars: Sequence[float] = (),
        unsigned: bool = False,
    ) -> None:
        super().__init__(conv, lambda: conv.weight, bias, torch.float32, activation, scalars)
        self._onednn = True
        self._unsigned = unsigned
        numbers, scales = _quantised(conv, factor)
        self._numbers, self._scales = numbers, scales
        self._zeros = torch.zeros(len(self._scales), dtype=torch.int32)
        self._per_input = conv.out_channels * math.prod(conv.kernel_size) / math.prod(conv.stride)
        self._exact = PackedConv(
            conv,
            lambda: numbers() * scales[:, None, None, None],
            bias,
            torch.float32,
            activation,
            scalars,
        )

    def limit(self, reserve: Callable[[int], bool]) -> None:
        """Ask before further layouts take memory, at int8 or float32, as `PackedConv` does."""
        super().limit(reserve)
        self._exact.limit(reserve)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights and the bias."""
        return super().nbytes + sum(map(self._nbytes, list(self._exact._by_layout.values())))

    def pays(self, shape: torch.Size) -> bool:
        """Tell whether int8 is faster than float32 for inputs of a shape (N, in, H, W)."""
        return bool(shape.numel() * (self._per_input - WORTHWHILE) >= FIXED)

    @property
    def swallows_nan(self) -> bool:
        """Whether the result can be a number although the convolution gives NaN: always."""
        return True

    def _reorder(self, shape: torch.Size) -> Tensor:
        padding, stride, dilation, groups = self._settings
        numbers, zero = self._numbers(), 0 if self._unsigned else 1
        packed: Tensor = torch.ops.onednn.qconv_prepack(
            numbers, self._scales, 1.0, zero, stride, padding, dilation, groups, list(shape)
        )
        return packed

    def __call__(self, x: Tensor, other: Tensor | None = None, overwrite: bool = False) -> Tensor:
        """Run the convolution, as `PackedConv` does."""
        if not self.pays(x.shape):
            return self._exact(x, other, overwrite)
        weight = self._by_shape.get(x.shape)
        if weight is None:
            weight = self.prepare(x.shape)
        quantised = _short(x, self._unsigned)
        if quantised is None:
            return self._exact(x, other, overwrite)
        short, scale, zero = quantised
        padding, stride, dilation, groups = self._settings
        name, scalars = self._merged
        given = (short, scale, zero, weight, self._scales, self._zeros)
        settings = (self._bias, stride, padding, dilation, groups, 1.0, 0, torch.float32)
        convolve = torch.ops.onednn.qconv2d_pointwise
        if other is None:
            y: Tensor = convolve(*given, *settings, name, list(scalars), "")
            return y
        total = other if overwrite else other.clone()
        unary = None if name == "none" else name
        accumulated = (1.0, 0, "sum", 1.0, unary, list(scalars), "")
        added: Tensor = convolve.binary(*given, total, *settings, *accumulated)
        return added


def _quantised(conv: Any, factor: Tensor | None) -> tuple[Callable[[], Tensor], Tensor]:
    """Return a function that makes the int8 weight, and the scales with the factor in them.

    A negative factor changes the sign of the weights of its channel, because scales are positive.
    """
    if conv.weight.dtype == torch.int8:
        scales: Tensor = conv.weight_scale
    else:
        scales = lowered(conv.weight, 8, 0, "conv")[1]  # type: ignore[assignment]
    factor = torch.ones_like(scales) if factor is None else factor
    negative = factor < 0

    def numbers() -> Tensor:
        short = conv.weight if conv.weight.dtype == torch.int8 else lowered(conv.weight, 8, 0, "conv")[0]
        flipped = torch.where(negative[:, None, None, None], -short, short)
        return flipped.contiguous()

    return numbers, (scales * factor.abs()).detach().clamp_min(TINY)


def _short(x: Tensor, unsigned: bool) -> tuple[Tensor, float, int] | None:
    """Quantise a tensor in channels_last to uint8; return the scale and the number that stands for zero.

    Returns None if the ranges of its inputs differ too much to share a scale.
    """
    n, c, h, w = x.shape
    flat = x.permute(0, 2, 3, 1).reshape(-1)
    # One call per input is five times as fast as one call over a dimension.
    ends = torch.stack([torch.stack(torch.aminmax(one)) for one in flat.view(n, -1)]).tolist()
    low, high = min(0.0, *(a for a, _ in ends)), max(0.0, *(b for _, b in ends))
    if any(0.0 < SPREAD * (max(b, 0.0) - min(a, 0.0)) < high - low for a, b in ends):
        return None
    scale = max((high - low) / LEVELS, TINY)
    zero = 0 if unsigned else min(max(round(-low / scale), 1), LEVELS)
    out = torch.empty(flat.shape, dtype=torch.uint8)
    buffer = torch.empty(min(CHUNK, len(flat)))
    for i in range(0, len(flat), CHUNK):
        part = flat[i : i + CHUNK]
        between = torch.mul(part, 1 / scale, out=buffer[: len(part)])
        if zero:
            between.add_(zero).clamp_(max=LEVELS)
        out[i : i + CHUNK].copy_(between.round_())
    return out.view(n, h, w, c).permute(0, 3, 1, 2), scale, zero
