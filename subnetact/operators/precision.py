"""Precision: copies of weights in int8 or bfloat16, and the matrix products that read them.

A copy is made once, of the full weight. int8 weights are symmetric, with one scale per output channel, so
that a slice of the copy and of its scales is the slice's own quantisation: every subnet reads the one copy in
place. Activations are quantised in every call, each row by itself, and products accumulate in int32.

A product takes three steps, of which only the second multiplies:

1. `quantise_rows`: per row the largest magnitude, then round(x * 127 / largest).
2. `torch._int_mm`, which reads strided slices as fast as dense ones. For few rows, as in a step of
   generation, it takes half the time if the weight is the first factor.
3. `acc * row scale * channel scale + bias`, written over the int32 numbers.

Steps 1 and 3 work on few rows at a time, so that what they write in between stays in the cache. For large
inputs this takes a fifth of the time, most of which would otherwise go into fresh pages of memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.errors import PrecisionError
from subnetact.operators.view_module import mixed_class
from subnetact.spec import FLOAT32, PRECISIONS

__all__ = [
    "FLOAT_BITS",
    "LowConv",
    "LowConv1D",
    "LowLinear",
    "LowWideConv",
    "lowered",
    "product",
    "quantise_rows",
    "require_precision",
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
    count = max(1, CHUNK // x.shape[1])
    buffer = x.new_empty(count, x.shape[1])
    for i in range(0, len(x), count):
        rows, scales = x[i : i + count], scale[i : i + count]
        between = buffer[: len(rows)]
        torch.amax(torch.abs(rows, out=between), 1, True, out=scales)
        scales.mul_(1 / LARGEST).clamp_(min=TINY)
        short[i : i + count].copy_(torch.mul(rows, scales.reciprocal(), out=between).round_())
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
    if not _is_traced() and len(rows) <= FEW and x.device.type == "cpu":
        return _few_rows(rows.float(), weight, bias, scale).view(*x.shape[:-1], len(weight)).to(x.dtype)
    short, row_scale = quantise_rows(rows.float())
    out = _scaled(_int_product(short, weight), row_scale, scale, bias)
    return out.view(*x.shape[:-1], len(weight)).to(x.dtype)


def _few_rows(rows: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    """Return what the three steps compute, bit for bit, with the weight as the first factor."""
    row_scale = rows.abs().amax(1, keepdim=True).mul_(1 / LARGEST).clamp_(min=TINY)
    short = (rows * row_scale.reciprocal()).round_().to(torch.int8)
    acc = torch._int_mm(weight, short.t()).t()
    out = torch.mul(acc.contiguous(), row_scale).mul_(scale)
    return out if bias is None else out.add_(bias)


def _int_product(short: Tensor, weight: Tensor) -> Tensor:
    """Return the int32 product of int8 matrices of shapes (rows, features) and (out, features)."""
    if short.device.type == "cuda":  # cuBLAS needs more than 16 rows, and other sizes in steps of 8.
        if weight.shape[0] % 8 or weight.shape[1] % 8:
            return (short.double() @ weight.double().t()).to(torch.int32)
        if len(short) <= 16:
            return torch._int_mm(F.pad(short, (0, 0, 0, 32 - len(short))), weight.t())[: len(short)]
    return torch._int_mm(short, weight.t())


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

    reads_copy = True
    """Whether the module reads the copy at the lower precision. Otherwise it reads the full weight."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle an extracted module; its class is made from two that have names."""
        return _remade, type(self).__bases__, dict(self.__dict__)

    def extra_repr(self: Any) -> str:
        """Return what the plain class returns, and the dtype of the weight."""
        return f"{super().extra_repr()}, {str(self.weight.dtype).removeprefix('torch.')}"  # type: ignore[misc]


class LowWideConv(_Low):
    """Marks a convolution with a kernel of several positions: it is float32 in views, int8 when fused."""

    reads_copy = False


class LowLinear(_Low):
    """The forward of a linear layer at a lower precision."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return product(x, self.weight, self.bias, self._parameters.get("weight_scale"))


class LowConv(_Low):
    """The forward of a 1x1 convolution without padding at a lower precision: a product per pixel."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Map (N, in, H, W) to (N, out, H / stride, W / stride), in channels_last."""
        down, right = self.stride
        pixels = x.permute(0, 2, 3, 1)
        if (down, right) != (1, 1):
            pixels = pixels[:, ::down, ::right]
        y = product(pixels, self.weight[:, :, 0, 0], self.bias, self._parameters.get("weight_scale"))
        return y.permute(0, 3, 1, 2)


class LowConv1D(_Low):
    """The forward of the `Conv1D` of Hugging Face, which stores the inputs first, at a lower precision."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return product(x, self.weight.t(), self.bias, self._parameters.get("weight_scale"))


def _remade(kind: type, cls: type[nn.Module]) -> nn.Module:
    made: Any = mixed_class
    return object.__new__(made(kind, cls))  # type: ignore[no-any-return]


def require_precision(precision: str, device: torch.device) -> None:
    """Check that this machine and this build of torch compute correctly at a precision, and do so faster.

    Args:
        precision: `float32`, `int8` or `bfloat16`.
        device: where subnets run.

    Raises:
        PrecisionError: the device or the build of torch cannot compute at this precision, computes something
            else, or (bfloat16) takes longer than at float32.
    """
    why = _why_not(precision, device.type)
    if why is not None:
        raise PrecisionError(
            f"precision {precision}: {why}; torch {torch.__version__} on {device.type} here runs "
            f"{', '.join(_runnable(device.type))}"
        )


def _runnable(kind: str) -> list[str]:
    return [name for name in PRECISIONS if _why_not(name, kind) is None]


@cache
def _why_not(precision: str, kind: str) -> str | None:
    """Return why a kind of device cannot run a precision, or None if it can."""
    if precision == FLOAT32 or kind == "meta":
        return None
    if kind == "cpu" and _announces_tiles() and not _tiles_work():
        return (
            "the processor announces matrix units (AMX) and lets no process use them; set the environment "
            "variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before torch is imported"
        )
    return _computes(precision, kind)


def _announces_tiles() -> bool:
    """Tell whether oneDNN would use the matrix units of the processor."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    announced = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return bool(announced) and ("AMX" in limit or limit in ("", "ALL", "DEFAULT"))


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
                rows = short.to(torch.int8).to(kind)
                got = _int_product(rows, rows[:, :192].repeat(1, 2)[:, :256]).cpu()
                right = short @ short[:, :192].repeat(1, 2)[:, :256].t()
                few = torch._int_mm(rows, rows[:1].t()).cpu() if kind == "cpu" else short @ short[:1].t()
                good = torch.equal(got.long(), right) and torch.equal(few.long(), short @ short[:1].t())
                return None if good else "its int8 products are wrong"
            x, weight = torch.randn(2, 512, 512, generator=generator).to(kind)
            short_x, short_weight = x.bfloat16(), weight.bfloat16()
            off = (F.linear(short_x, short_weight).float() - F.linear(x, weight)).abs().max()
            if not bool(off <= 0.02 * F.linear(x, weight).abs().max()):
                return "its bfloat16 products are wrong"
            slow, fast = _fastest(x, weight), _fastest(short_x, short_weight)
            return None if fast < slow else f"a product takes {fast:.2f} ms, at float32 {slow:.2f} ms"
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return " ".join(str(error).split())[:120]


def _fastest(x: Tensor, weight: Tensor) -> float:
    """Return the shortest of ten times that a product takes, in ms."""
    taken = []
    for _ in range(10):
        start = time.perf_counter()
        F.linear(x, weight)
        if x.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken) * 1e3
