"""LoweredWeight: weights in int8 or bfloat16, how subnets slice them, and the products that read them.

How a convolution is sliced and runs at int8:

1. `LoweredWeight.made` makes one int8 copy of the full weight, with one scale per output channel. The
   operator keeps it (`Operator.lowered`), and it follows the weights.
2. `Operator.bind` reads the precision from the size row. A subnet has `weight[:out, :in_]` and the scales
   `[:out]`: `sliced_low` applies the slicing rule of the operator to the copy, and to the scales as if they
   were the bias. One run of outputs and inputs is a view, several (`Segments`) are a packed copy.
3. `LowConv` gives the module its forward. Activations are quantised in every call, each sample by itself
   (each row in linear layers), so that an output does not depend on the other inputs of its batch. Products
   are `torch._int_mm` with int32 sums, times the scales of the sample and of the channel: oneDNN on x86 CPUs
   with AVX-512 VNNI or AMX, cuBLAS from CUDA 7.5 on, and refused elsewhere (`kernel_table.py`). In a traced
   fused program on such a CPU, `engine/int8_conv.py` calls oneDNN's `qconv2d_pointwise` instead, with the
   BatchNorm behind it folded into the scales, if the network keeps finite values finite.

These convolutions stay float32: grouped, depthwise and transposed ones, 1d and 3d ones, those padded with
anything but zeros or with a forward of their own (`WeightSlice.low_mixin`), the first layer of a network and
the last one, unless `last=True`, what `keep=` names, what its parent reads, modules with further parameters
(`supernet/precision.py`), and everything in training mode.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subnetact.errors import PrecisionError
from subnetact.operators.kernel_table import LARGEST_INT8, int8_product, is_traced
from subnetact.operators.view_module import Extractable
from subnetact.spec import FLOAT32, PRECISIONS

FLOAT_BITS = PRECISIONS[FLOAT32]
"""The size of a precision in a size row that leaves weights as they are."""
SMALLEST_SCALE = 1e-30
"""The scale of rows and channels of zeros."""
CHUNK = 2**17
"""Numbers that are quantised, or scaled back, at a time on a CPU; for large inputs, this takes a fifth of the
time, because what is written stays in the cache."""
WINDOW_ELEMENTS = 2**22
"""Numbers in the windows of the samples that are convolved at a time, unless one sample has more."""

_SCALE = "weight_scale"
"""The name of the parameter in which a module has the scales of its weight."""


class LoweredWeight(NamedTuple):
    """A weight, or a slice of it, in int8 or bfloat16; for int8, with the `scale` of every output channel."""

    weight: Tensor
    scale: Tensor | None = None

    @classmethod
    def made(cls, weight: Tensor, bits: int, axis: int = 0, name: str = "a layer") -> LoweredWeight:
        """Return a copy of a full weight, whose output channels are on `axis`, at 8 or 16 bits."""
        full = weight.detach()
        if not full.is_meta and not bool(full.isfinite().all()):
            raise PrecisionError(
                f"{name}: its weights are not all finite, so they have no scale; run it at float32 with "
                f"enable_precision(..., keep=[{name!r}])"
            )
        if bits == PRECISIONS["bfloat16"]:
            return cls(full.to(torch.bfloat16))
        rows = full.transpose(0, axis).float()
        scale = rows.flatten(1).abs().amax(1).div_(LARGEST_INT8).clamp_(min=SMALLEST_SCALE)
        short = (rows / scale.view(-1, *[1] * (rows.dim() - 1))).round_().to(torch.int8)
        return cls(short.transpose(0, axis).contiguous(), scale)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Map x of shape (..., in) to `x @ weight.T + bias` of shape (..., out), in the dtype of x."""
        weight, scale = self
        if scale is None:
            short = None if bias is None else bias.to(weight.dtype)
            return F.linear(x.to(weight.dtype), weight, short).to(x.dtype)
        if not x.numel():
            return x.new_empty(*x.shape[:-1], len(weight))
        rows, row_scale = quantise_rows(x.reshape(-1, x.shape[-1]).float())
        out = _scaled(int8_product(rows, weight), row_scale, scale, bias)
        return out.view(*x.shape[:-1], len(weight)).to(x.dtype)

    def convolution(self, x: Tensor, conv: Any) -> Tensor:
        """Map (N, in, H, W) to what a convolution without groups gives, (N, out, H', W') in channels_last."""
        weight, scale = self
        padding = conv._reversed_padding_repeated_twice
        if any(padding):
            x = F.pad(x, padding)
        if scale is None:
            short = None if conv.bias is None else conv.bias.to(weight.dtype)
            return F.conv2d(x.to(weight.dtype), weight, short, conv.stride, 0, conv.dilation).to(x.dtype)
        if x.device.type != "cpu" or is_traced():
            return self._convolved(x, conv, scale)
        at_once = max(1, WINDOW_ELEMENTS // max(1, x[:1].numel() * weight[0, 0].numel()))
        parts = [self._convolved(part, conv, scale) for part in torch.split(x, at_once)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _convolved(self, x: Tensor, conv: Any, scale: Tensor) -> Tensor:
        """Convolve padded samples at once, each with a scale of its own."""
        pixels = x.permute(0, 2, 3, 1)
        short, scales = quantise_rows(pixels.reshape(x.shape[0], -1).float())
        windows = _windows(short.view(pixels.shape), conv)
        n, rows, columns = windows.shape[:3]
        acc = int8_product(windows.reshape(n * rows * columns, -1), self.weight.flatten(1))
        y = _scaled(acc, scales.expand(n, rows * columns).reshape(-1, 1), scale, conv.bias)
        return y.view(n, rows, columns, -1).permute(0, 3, 1, 2).to(x.dtype)


def sliced_low(operator: Any, sizes: tuple[int, ...], bits: int) -> dict[str, Tensor | None]:
    """Return the parameters of a subnet's module: the rule of its operator, applied to the lowered copy."""
    weight, bias = operator.low_mixin().reads
    copy = LoweredWeight(**operator.lowered(bits).tensors)
    low = operator.sliced(sizes, {**operator._parameters, weight: copy.weight, bias: copy.scale})
    found = {**operator.sliced(sizes, operator._parameters), weight: low[weight]}
    return found if copy.scale is None else {**found, _SCALE: low[bias]}


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 numbers (rows, features) and the scale of every row, (rows, 1), finite if the row is."""
    if _in_one_piece(x):
        scale = x.abs().amax(1, keepdim=True).mul_(1 / LARGEST_INT8).clamp_(min=SMALLEST_SCALE)
        return (x * scale.reciprocal()).round_().to(torch.int8), scale
    short = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = x.new_empty(len(x), 1)
    count, width = max(1, CHUNK // x.shape[1]), min(x.shape[1], CHUNK)
    buffer = x.new_empty(count, width)
    for i in range(0, len(x), count):
        rows, scales = x[i : i + count], scale[i : i + count]
        if count == 1:  # This reads a long row once and writes nothing.
            low, high = torch.aminmax(rows)
            scales.fill_(torch.maximum(high, -low))
        else:
            torch.amax(torch.abs(rows, out=buffer[: len(rows)]), 1, True, out=scales)
        scales.mul_(1 / LARGEST_INT8).clamp_(min=SMALLEST_SCALE)
        factor = scales.reciprocal()
        for j in range(0, x.shape[1], width):
            part = rows[:, j : j + width]
            between = torch.mul(part, factor, out=buffer[: len(rows), : part.shape[1]])
            short[i : i + count, j : j + width].copy_(between.round_())
    return short, scale


def _windows(pixels: Tensor, conv: Any) -> Tensor:
    """Return what each output pixel reads of pixels (N, H, W, in): (N, H', W', in, height * width)."""
    sizes = zip(pixels.shape[1:3], conv.kernel_size, conv.stride, conv.dilation, strict=True)
    (tops, down), (lefts, right) = (
        ([(i * gap, size - (kernel - 1 - i) * gap) for i in range(kernel)], stride)
        for size, kernel, stride, gap in sizes
    )
    shifted = [pixels[:, a:b:down, c:d:right] for a, b in tops for c, d in lefts]
    return shifted[0].unsqueeze(-1) if len(shifted) == 1 else torch.stack(shifted, -1)


def _scaled(acc: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the float32 result of an int32 product, written over its memory where possible."""
    if _in_one_piece(acc):
        out = acc.to(torch.float32).mul_(row_scale).mul_(scale)
        return out if bias is None else out.add_(bias)
    out = acc.view(torch.float32)
    count = max(1, CHUNK // acc.shape[1])
    for i in range(0, len(acc), count):
        part = out[i : i + count]
        part.copy_(acc[i : i + count]).mul_(row_scale[i : i + count]).mul_(scale)
        if bias is not None:
            part.add_(bias)
    return out


def _in_one_piece(x: Tensor) -> bool:
    """Tell whether to work on a matrix at once: it is small, not on the CPU, or is being traced."""
    if is_traced() or x.device.type != "cpu":
        return True
    return x.numel() <= 2 * CHUNK or type(x) is not Tensor


class Low(Extractable):
    """The base of the mixins that let a module compute with a lowered weight.

    Attributes:
        reads: the parameter that is lowered, and one that is sliced as its output channels are.
    """

    reads = ("weight", "bias")

    @property
    def lowered(self: Any) -> LoweredWeight:
        """The weight that the module multiplies with."""
        return LoweredWeight(getattr(self, self.reads[0]), self._parameters.get(_SCALE))

    def extra_repr(self: Any) -> str:
        """Return what the plain class returns, and the dtype of the weight."""
        return f"{super().extra_repr()}, {str(self.lowered.weight.dtype).removeprefix('torch.')}"  # type: ignore[misc]


class LowLinear(Low):
    """The forward of a linear layer at a lower precision."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return self.lowered.product(x, self.bias)  # type: ignore[no-any-return]


class LowConv(Low):
    """The forward of a convolution without groups at a lower precision."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Map (N, in, H, W) to (N, out, H', W'), in channels_last."""
        return self.lowered.convolution(x, self)  # type: ignore[no-any-return]


class LowConv1D(Low):
    """The forward of the `Conv1D` of Hugging Face, which stores the inputs first, at a lower precision."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        weight, scale = self.lowered
        return LoweredWeight(weight.t(), scale).product(x, self.bias)
