"""Precision: copies of weights in int8 or bfloat16, and the matrix products that read them.

A copy is made once, of the full weight. int8 weights are symmetric, with one scale per output channel, so
that a slice of the copy and of its scales is the slice's own quantisation: every subnet reads the one copy in
place. Activations are quantised in every call, each row by itself, and products accumulate in int32.

A product takes three steps, of which only the second multiplies:

1. `quantise_rows`: per row the largest magnitude, then round(x * 127 / largest).
2. The product of int8 matrices of this kind of machine (`kernel_table.py`). On CPUs it is `torch._int_mm`,
   which reads strided slices as fast as dense ones. For few rows, as in a step of generation, it takes half
   the time if the weight is the first factor.
3. `acc * row scale * channel scale + bias`, written over the int32 numbers.

A convolution quantises each sample by itself and multiplies the window of every output pixel with the weight.
Rows and samples do not share scales, so an output does not depend on the other inputs of its batch.

Steps 1 and 3 work on few rows at a time, so that what they write in between stays in the cache. For large
inputs this takes a fifth of the time, most of which would otherwise go into fresh pages of memory.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.device import MachineFacts, machine_facts
from subnetact.errors import PrecisionError
from subnetact.operators.kernel_table import CUBLAS, REFERENCE, STRIDED, Kernel, kernel_for
from subnetact.operators.view_module import mixed_class
from subnetact.spec import FLOAT32, PRECISIONS

__all__ = [
    "FLOAT_BITS",
    "LowConv",
    "LowConv1D",
    "LowLinear",
    "convolution",
    "int8_product",
    "kernel_here",
    "lowered",
    "padded_to_eights",
    "product",
    "quantise_rows",
    "require_precision",
    "why_not",
]

FLOAT_BITS = PRECISIONS[FLOAT32]
"""The size of a precision in a size row that leaves weights as they are."""
LARGEST = 127
"""The largest int8 magnitude that is used. -128 is left out, so that the scale is symmetric."""
TINY = 1e-30
"""The smallest scale, for rows and channels of zeros."""
FEW = 4
"""The most rows for which the weight is the first factor of a product on the CPU."""
CHUNK = 2**17
"""Numbers that are quantised, or scaled back, at a time."""
WINDOWS = 2**22
"""Numbers in the windows of the samples that are convolved at a time, unless one sample has more."""


def lowered(weight: Tensor, bits: int, axis: int, name: str) -> tuple[Tensor, Tensor | None]:
    """Return a copy of a weight at a lower precision.

    Args:
        weight: the full weight.
        bits: 8 for int8, 16 for bfloat16.
        axis: the axis of the output channels.
        name: the name of the module, for messages.

    Returns:
        The copy, and for int8 the scale of every output channel, of shape (channels,), otherwise None.

    Raises:
        PrecisionError: a weight is not finite.
    """
    full = weight.detach()
    if not full.is_meta and not bool(full.isfinite().all()):
        raise PrecisionError(
            f"{name}: its weights are not all finite, so they have no scale; run it at float32 with "
            f"enable_precision(..., keep=[{name!r}])"
        )
    if bits == PRECISIONS["bfloat16"]:
        return full.to(torch.bfloat16), None
    rows = full.transpose(0, axis).float()
    scale = rows.flatten(1).abs().amax(1).div_(LARGEST).clamp_(min=TINY)
    short = (rows / scale.view(-1, *[1] * (rows.dim() - 1))).round_().to(torch.int8)
    return short.transpose(0, axis).contiguous(), scale


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the rows of a matrix to int8, each with a scale of its own.

    Args:
        x: shape (rows, features).

    Returns:
        The int8 numbers, of shape (rows, features), and the scales, of shape (rows, 1). The scale of a row
        with NaN or infinite numbers is not finite either, so the outputs of that row are not.
    """
    if _in_one_piece(x):
        scale = x.abs().amax(1, keepdim=True).mul_(1 / LARGEST).clamp_(min=TINY)
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
        scales.mul_(1 / LARGEST).clamp_(min=TINY)
        factor = scales.reciprocal()
        for j in range(0, x.shape[1], width):
            part = rows[:, j : j + width]
            between = torch.mul(part, factor, out=buffer[: len(rows), : part.shape[1]])
            short[i : i + count, j : j + width].copy_(between.round_())
    return short, scale


def product(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """Compute `x @ weight.T + bias` as `F.linear` does, with a weight of any precision.

    Args:
        x: shape (..., features).
        weight: shape (out, features), in the dtype of `x`, in int8 or in bfloat16.
        bias: shape (out,), or None.
        scale: the scales of an int8 weight, of shape (out,).

    Returns:
        Shape (..., out), in the dtype of `x`.
    """
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    if scale is None:
        short = None if bias is None else bias.to(weight.dtype)
        return F.linear(x.to(weight.dtype), weight, short).to(x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    if not x.numel():
        return x.new_empty(*x.shape[:-1], len(weight))
    short, row_scale = quantise_rows(rows.float())
    out = _scaled(int8_product(short, weight), row_scale, scale, bias)
    return out.view(*x.shape[:-1], len(weight)).to(x.dtype)


def convolution(conv: Any, x: Tensor) -> Tensor:
    """Compute what a convolution without groups computes, with a weight of a lower precision.

    Args:
        conv: the module. Its weight has shape (out, in, height, width), in int8 or in bfloat16.
        x: shape (N, in, H, W).

    Returns:
        Shape (N, out, H', W'), in channels_last, in the dtype of `x`.
    """
    weight, scale = conv.weight, conv._parameters.get("weight_scale")
    padding = conv._reversed_padding_repeated_twice
    if any(padding):
        x = F.pad(x, padding)
    if scale is None:
        short = None if conv.bias is None else conv.bias.to(weight.dtype)
        return F.conv2d(x.to(weight.dtype), weight, short, conv.stride, 0, conv.dilation).to(x.dtype)
    if x.device.type != "cpu" or _is_traced():
        return _int8_convolution(conv, x)
    at_once = max(1, WINDOWS // max(1, x[:1].numel() * weight[0, 0].numel()))
    parts = [_int8_convolution(conv, part) for part in torch.split(x, at_once)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _int8_convolution(conv: Any, x: Tensor) -> Tensor:
    """Convolve padded samples at once, each with a scale of its own."""
    pixels = x.permute(0, 2, 3, 1)
    short, scales = quantise_rows(pixels.reshape(x.shape[0], -1).float())
    windows = _windows(short.view(pixels.shape), conv)
    n, rows, columns = windows.shape[:3]
    acc = int8_product(windows.reshape(n * rows * columns, -1), conv.weight.flatten(1))
    per_pixel = scales.expand(n, rows * columns).reshape(-1, 1)
    y = _scaled(acc, per_pixel, conv._parameters["weight_scale"], conv.bias)
    return y.view(n, rows, columns, -1).permute(0, 3, 1, 2).to(x.dtype)


def _windows(pixels: Tensor, conv: Any) -> Tensor:
    """Return what each output pixel reads of pixels (N, H, W, in): (N, H', W', in, height * width)."""
    sizes = zip(pixels.shape[1:3], conv.kernel_size, conv.stride, conv.dilation, strict=True)
    (tops, down), (lefts, right) = (
        ([(i * gap, size - (kernel - 1 - i) * gap) for i in range(kernel)], stride)
        for size, kernel, stride, gap in sizes
    )
    shifted = [pixels[:, a:b:down, c:d:right] for a, b in tops for c, d in lefts]
    return shifted[0].unsqueeze(-1) if len(shifted) == 1 else torch.stack(shifted, -1)


def int8_product(short: Tensor, weight: Tensor) -> Tensor:
    """Return the int32 product of int8 matrices, with the kernel of this kind of machine.

    Args:
        short: shape (rows, features).
        weight: shape (out, features).

    Returns:
        Shape (rows, out).

    Raises:
        PrecisionError: the table has no kernel for this machine.
    """
    if short.is_meta or (_is_traced() and short.device.type != "cuda"):
        return torch._int_mm(short, weight.t())
    return _PRODUCTS[kernel_here("int8", short.device).name](short, weight)


def _strided(short: Tensor, weight: Tensor) -> Tensor:
    if len(short) <= FEW:
        return torch._int_mm(weight, short.t()).t().contiguous()
    return torch._int_mm(short, weight.t())


def _cublas(short: Tensor, weight: Tensor) -> Tensor:
    short, weight, (rows, out) = padded_to_eights(short, weight)
    return torch._int_mm(short, weight.t())[:rows, :out].contiguous()


def _reference(short: Tensor, weight: Tensor) -> Tensor:
    return (short.double() @ weight.double().t()).to(torch.int32)


_PRODUCTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    STRIDED: _strided,
    CUBLAS: _cublas,
    REFERENCE: _reference,
}


def padded_to_eights(short: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return int8 matrices of sizes that cuBLAS takes: features and outputs in eights, and more than 16 rows.

    Args:
        short: shape (rows, features).
        weight: shape (out, features).

    Returns:
        Both matrices, with zeros behind them, which change nothing, and the rows and columns of the product
        that count.
    """
    (rows, features), out = short.shape, len(weight)
    return (
        _padded(short, -features % 8, max(0, 17 - rows)),
        _padded(weight, -features % 8, -out % 8),
        (rows, out),
    )


def _padded(matrix: Tensor, columns: int, rows: int) -> Tensor:
    return F.pad(matrix, (0, columns, 0, rows)) if columns or rows else matrix


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


def _is_traced() -> bool:
    return bool(torch._C._is_tracing() or torch.compiler.is_compiling())


def _in_one_piece(x: Tensor) -> bool:
    """Tell whether to work on a matrix at once: it is small, not on the CPU, or is being traced."""
    if _is_traced() or x.device.type != "cpu":
        return True
    return x.numel() <= 2 * CHUNK or type(x) is not Tensor


class _Low:
    """The base of mixins that let a module compute with a weight of a lower precision."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle an extracted module; its class is made from two that have names."""
        return _remade, type(self).__bases__, dict(self.__dict__)

    def extra_repr(self: Any) -> str:
        """Return what the plain class returns, and the dtype of the weight."""
        return f"{super().extra_repr()}, {str(self.weight.dtype).removeprefix('torch.')}"  # type: ignore[misc]


class LowLinear(_Low):
    """The forward of a linear layer at a lower precision."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return product(x, self.weight, self.bias, self._parameters.get("weight_scale"))


class LowConv(_Low):
    """The forward of a convolution without groups at a lower precision."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Map (N, in, H, W) to (N, out, H', W'), in channels_last."""
        return convolution(self, x)


class LowConv1D(_Low):
    """The forward of the `Conv1D` of Hugging Face, which stores the inputs first, at a lower precision."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return product(x, self.weight.t(), self.bias, self._parameters.get("weight_scale"))


def _remade(kind: type, cls: type[nn.Module]) -> nn.Module:
    made: Any = mixed_class
    return object.__new__(made(kind, cls))  # type: ignore[no-any-return]


def require_precision(precision: str, device: torch.device) -> None:
    """Check that this kind of machine has a kernel for a precision, and that it computes correctly.

    Args:
        precision: `float32`, `int8` or `bfloat16`.
        device: where subnets run.

    Raises:
        PrecisionError: the machine would take longer than at float32, or computes something else.
    """
    why = why_not(precision, device)
    if why is not None:
        here = ", ".join(name for name in PRECISIONS if why_not(name, device) is None)
        raise PrecisionError(
            f"precision {precision}: {why}; torch {torch.__version__} on {device.type} here runs {here}; "
            "enable only these, or run on such a machine"
        )


def kernel_here(precision: str, device: torch.device) -> Kernel:
    """Return the row of the table of kernels for a precision on this machine.

    Args:
        precision: `int8` or `bfloat16`.
        device: where subnets run.

    Raises:
        PrecisionError: there is none that is faster than float32.
    """
    facts = machine_facts(device.type)
    kernel = kernel_for(precision, facts)
    if not kernel.name:
        raise PrecisionError(f"precision {precision}: {_refusal(kernel, facts)}; run the subnet at float32")
    return kernel


def why_not(precision: str, device: torch.device) -> str | None:
    """Return why this machine does not run a precision, or None if it does.

    Args:
        precision: `float32`, `int8` or `bfloat16`.
        device: where subnets run.
    """
    if precision == FLOAT32 or device.type == "meta":
        return None
    if precision not in PRECISIONS:
        return "no such precision is known"
    facts = machine_facts(device.type)
    kernel = kernel_for(precision, facts)
    return _wrong(precision, facts) if kernel.name else _refusal(kernel, facts)


def _refusal(kernel: Kernel, facts: MachineFacts) -> str:
    return f"this is a machine ({facts}) on which {kernel.text}; it needs {kernel.needs}"


@cache
def _wrong(precision: str, facts: MachineFacts) -> str | None:
    """Return what is wrong with the products that run on this machine, or None if nothing is."""
    if facts.device == "cpu" and facts.uses("amx") and not _tiles_work():
        return (
            "the processor announces matrix units (AMX) and lets no process use them; set the environment "
            "variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before torch is imported"
        )
    return _computes(precision, facts.device)


def _tiles_work() -> bool:
    """Run both kinds of products in a process of their own, which an illegal instruction may end."""
    code = (
        "import torch; torch.set_num_threads(1); a = torch.ones(64, 64, dtype=torch.int8); "
        "torch._int_mm(a, a.t()); b = a.bfloat16(); torch.nn.functional.linear(b, b)"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


def _computes(precision: str, kind: str) -> str | None:
    """Return what is wrong with the products of a precision on this machine, or None if nothing is."""
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.inference_mode():
            if precision == "int8":
                short = torch.randint(-LARGEST, LARGEST + 1, (64, 256), generator=generator)
                short[:4] = LARGEST  # Kernels without VNNI may saturate in 16 bits.
                rows, right = short.to(torch.int8).to(kind), short @ short.t()
                good = all(
                    torch.equal(int8_product(rows[:n], rows).cpu().long(), right[:n]) for n in (1, len(rows))
                )
                return None if good else "its int8 products are wrong"
            x, weight = torch.randn(2, 512, 512, generator=generator).to(kind)
            exact = F.linear(x, weight)
            off = (F.linear(x.bfloat16(), weight.bfloat16()).float() - exact).abs().max()
            return None if bool(off <= 0.02 * exact.abs().max()) else "its bfloat16 products are wrong"
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return " ".join(str(error).split())[:120]
