"""The table of kernels: what each kind of machine multiplies with at a precision, or why it is refused.

A machine is described by what torch and oneDNN use of it (`subnetact.device.machine_facts`), within the
limits of the environment. `kernel_for` is a function of these facts alone: no time is measured, so the
answer is the same on a busy machine, and every row of the table can be asked for on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from subnetact.device import MachineFacts

__all__ = [
    "CUBLAS",
    "NATIVE",
    "REFERENCE",
    "STRIDED",
    "Kernel",
    "kernel_for",
]

STRIDED = "strided"
"""`torch._int_mm`, which reads slices of the one int8 copy where they are."""
CUBLAS = "cublas"
"""`torch._int_mm` of sizes that cuBLAS takes."""
REFERENCE = "reference"
"""Products in float64: exact and slow, on every machine."""
NATIVE = "native"
"""The products that torch has for a dtype."""


@dataclass(frozen=True)
class Kernel:
    """One row of the table: what multiplies at a precision on some machines, or why nothing does.

    Attributes:
        precision: `int8` or `bfloat16`.
        name: which product multiplies; empty if the precision is refused.
        text: what multiplies, or why the precision is refused.
        needs: what a machine must have instead, if the precision is refused.
    """

    precision: str
    name: str
    text: str
    needs: str = ""


_VNNI = "a CPU with AVX-512 VNNI or AMX (Intel since Cascade Lake, AMD since Zen 4), or a CUDA device"
_BF16 = "a CPU with AVX-512 BF16 or AMX, or a CUDA device of compute capability 8.0"


def _any(_: MachineFacts) -> bool:
    return True


def _cpu(m: MachineFacts) -> bool:
    return m.device == "cpu"


def _x86(m: MachineFacts) -> bool:
    return _cpu(m) and m.architecture.lower() in ("x86_64", "amd64")


_ROWS: tuple[tuple[Callable[[MachineFacts], bool], Kernel], ...] = (
    (lambda m: m.reference, Kernel("int8", REFERENCE, "products in float64, exact on every machine")),
    (
        lambda m: m.device == "cuda" and m.cuda >= (7, 5),
        Kernel("int8", CUBLAS, "cuBLAS, with sizes padded to multiples of 8"),
    ),
    (
        lambda m: m.device == "cuda",
        Kernel("int8", "", "it has no int8 matrix units", "compute capability 7.5"),
    ),
    (
        lambda m: _x86(m) and (m.uses("vnni") or m.uses("amx")),
        Kernel("int8", STRIDED, "oneDNN, on slices of the one int8 copy; packed in fused programs"),
    ),
    (
        lambda m: _x86(m) and m.aten.startswith("AVX512"),
        Kernel("int8", "", "oneDNN's int8 products saturate in 16 bits, or are slow, without VNNI", _VNNI),
    ),
    (
        _x86,
        Kernel("int8", "", "int8 products with slices take some 30 times as long as float32 products", _VNNI),
    ),
    (_cpu, Kernel("int8", "", "no int8 product is known to be faster than float32 there", _VNNI)),
    (_any, Kernel("int8", "", "its int8 products are not known", _VNNI)),
    (
        lambda m: m.reference or (m.device == "cuda" and m.cuda >= (8, 0)),
        Kernel("bfloat16", NATIVE, "torch's own bfloat16 products"),
    ),
    (
        lambda m: _x86(m) and (m.uses("bf16") or m.uses("amx")),
        Kernel("bfloat16", NATIVE, "oneDNN's bfloat16 products"),
    ),
    (
        _cpu,
        Kernel("bfloat16", "", "it converts bfloat16 numbers one by one, which takes longer", _BF16),
    ),
    (_any, Kernel("bfloat16", "", "its bfloat16 products are slow or not known", _BF16)),
)  # fmt: skip


@cache
def kernel_for(precision: str, facts: MachineFacts) -> Kernel:
    """Return the first row of the table for a precision and a machine.

    Args:
        precision: `int8` or `bfloat16`.
        facts: the machine.
    """
    return next(row for fits, row in _ROWS if row.precision == precision and fits(facts))
