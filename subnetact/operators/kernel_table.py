"""The table of kernels: what each kind of machine multiplies with at a precision, or why it is refused.

`kernel_for` is a function of the facts of a machine alone (`subnetact.device.machine_facts`): no time is
measured, so the answer is the same on a busy machine. On the machine itself `why_not` also tries whether the
products are right.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subnetact.comparison import SIXTEEN_BITS, equal
from subnetact.device import MachineFacts, machine_facts, raise_if_explained
from subnetact.errors import PrecisionError, first_line
from subnetact.spec import FLOAT32, PRECISIONS

LARGEST_INT8 = 127
"""The largest int8 magnitude that is used. -128 is left out, so that scales are symmetric."""
TRIAL_S = 120
"""Seconds after which a process that tries matrix units counts as failed; importing torch is most of it."""
WEIGHT_FIRST = 4
"""The most rows for which the weight is the first factor on the CPU, which takes half the time there."""

STRIDED, CUBLAS, REFERENCE, NATIVE = "strided", "cublas", "reference", "native"
"""The names of products; the rows of the table say what they are."""


class Kernel(NamedTuple):
    """What multiplies at a precision; without a `name`, why it is refused and what a machine needs."""

    precision: str
    name: str
    text: str
    needs: str = ""


_VNNI = (
    "a CPU with AVX-512 VNNI or AMX (Intel since Cascade Lake, AMD since Zen 4), or a CUDA device of compute "
    "capability 7.5"
)
_SLICED = "oneDNN, on slices of the one int8 copy; packed in fused programs"
_SATURATES = "int8 products saturate in 16 bits, or are slower than those of float32"
_BF16 = "a CPU with AVX-512 BF16 or AMX, or a CUDA device of compute capability 8.0"


def _x86_with(facts: MachineFacts, unit: str) -> bool:
    x86 = facts.device == "cpu" and facts.architecture.lower() in ("x86_64", "amd64")
    return x86 and (facts.uses(unit) or facts.uses("amx"))


def _cuda_from(facts: MachineFacts, *capability: int) -> bool:
    return facts.device == "cuda" and facts.cuda >= capability


_ROWS: tuple[tuple[Callable[[MachineFacts], bool], Kernel], ...] = (
    (lambda m: m.reference, Kernel("int8", REFERENCE, "products in float64, exact on every machine")),
    (lambda m: _cuda_from(m, 7, 5), Kernel("int8", CUBLAS, "cuBLAS, with sizes padded to multiples of 8")),
    (lambda m: _x86_with(m, "vnni"), Kernel("int8", STRIDED, _SLICED)),
    (lambda m: m.device == "cpu", Kernel("int8", "", _SATURATES, _VNNI)),
    (lambda _: True, Kernel("int8", "", "there are no int8 products, or none that are known", _VNNI)),
    (lambda m: m.reference, Kernel("bfloat16", NATIVE, "torch's own bfloat16 products")),
    (lambda m: _cuda_from(m, 8, 0), Kernel("bfloat16", NATIVE, "torch's own bfloat16 products")),
    (lambda m: _x86_with(m, "bf16"), Kernel("bfloat16", NATIVE, "oneDNN's bfloat16 products")),
    (lambda _: True, Kernel("bfloat16", "", "its bfloat16 products are slow or not known", _BF16)),
)


@cache
def kernel_for(precision: str, facts: MachineFacts) -> Kernel:
    """Return the first row of the table for a precision and a machine."""
    return next(row for fits, row in _ROWS if row.precision == precision and fits(facts))


def require_precision(precision: str, device: torch.device) -> None:
    """Raise `PrecisionError` unless this kind of machine has a kernel for a precision that computes right."""
    why = why_not(precision, device)
    if why is not None:
        here = ", ".join(name for name in PRECISIONS if why_not(name, device) is None)
        raise PrecisionError(
            f"precision {precision}: {why}; torch {torch.__version__} on {device.type} here runs {here}; "
            "enable only these, or run on such a machine"
        )


def kernel_here(precision: str, device: torch.device) -> Kernel:
    """Return the row of the table for a precision on this machine; if it refuses, raise `PrecisionError`."""
    facts = machine_facts(device.type)
    kernel = kernel_for(precision, facts)
    if not kernel.name:
        raise PrecisionError(f"precision {precision}: {_refusal(kernel, facts)}; run the subnet at float32")
    return kernel


def why_not(precision: str, device: torch.device) -> str | None:
    """Return why this machine does not run a precision, or None if it does."""
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
    if facts.device == "cpu" and facts.uses("amx") and (why := _tiles_fail()):
        return (
            f"the processor announces matrix units (AMX), and {why}; set the environment variable "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before torch is imported, which leaves them out"
        )
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.inference_mode():
            if precision == "int8":
                short = torch.randint(-LARGEST_INT8, LARGEST_INT8 + 1, (64, 256), generator=generator)
                short[:4] = LARGEST_INT8  # Kernels without VNNI may saturate in 16 bits.
                rows, right = short.to(torch.int8).to(facts.device), short @ short.t()
                counts = (1, len(rows))
                good = all(torch.equal(int8_product(rows[:n], rows).cpu().long(), right[:n]) for n in counts)
                return None if good else "its int8 products are wrong"
            x, weight = torch.randn(2, 512, 512, generator=generator).to(facts.device)
            short = F.linear(x.bfloat16(), weight.bfloat16()).float()
            good = equal(short, F.linear(x, weight), SIXTEEN_BITS)
            return None if good else "its bfloat16 products are wrong"
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        raise_if_explained(error)
        return first_line(error)[:120]


def _tiles_fail() -> str:
    """Try both products in a process of their own, which may die of it; return what is wrong, or nothing."""
    code = (
        "import torch; torch.set_num_threads(1); a = torch.ones(64, 64, dtype=torch.int8); "
        "torch._int_mm(a, a.t()); b = a.bfloat16(); torch.nn.functional.linear(b, b)"
    )
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        return f"a process that tried them had not ended after {TRIAL_S} s"
    return "a process that tried them failed" if done.returncode else ""


def int8_product(short: Tensor, weight: Tensor) -> Tensor:
    """Return the int32 product (rows, out) of int8 matrices (rows, features) and (out, features)."""
    if short.is_meta or (is_traced() and short.device.type != "cuda"):
        return torch._int_mm(short, weight.t())
    return _PRODUCTS[kernel_here("int8", short.device).name](short, weight)


def _strided(short: Tensor, weight: Tensor) -> Tensor:
    if len(short) <= WEIGHT_FIRST:
        return torch._int_mm(weight, short.t()).t().contiguous()
    return torch._int_mm(short, weight.t())


def _cublas(short: Tensor, weight: Tensor) -> Tensor:
    rows, columns = padded_to_eights(short, weight)
    return torch._int_mm(rows, columns.t())[: short.shape[0], : len(weight)].contiguous()


def _reference(short: Tensor, weight: Tensor) -> Tensor:
    return (short.double() @ weight.double().t()).to(torch.int32)


_PRODUCTS = {STRIDED: _strided, CUBLAS: _cublas, REFERENCE: _reference}


def padded_to_eights(short: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Append zeros until cuBLAS takes the sizes."""
    rows, features = short.shape
    more = -features % 8
    return _padded(short, more, max(0, 17 - rows)), _padded(weight, more, -len(weight) % 8)


def _padded(matrix: Tensor, columns: int, rows: int) -> Tensor:
    return F.pad(matrix, (0, columns, 0, rows)) if columns or rows else matrix


def is_traced() -> bool:
    """Tell whether a graph is being recorded, so that the code must not depend on sizes."""
    return bool(torch.compiler.is_compiling() or torch._C._is_tracing())  # Dynamo knows the first
