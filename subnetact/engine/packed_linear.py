"""PackedLinear: a linear layer whose weight is packed once, in the layout of a library's matrix products.

Which library is faster depends on the maker of the processor (`benchmarks/results`, `linear.json` there):

- On Intel CPUs, MKL takes 0.8-0.95 times as long with a packed weight as with the plain one, and less than
  half as long with few rows. For many rows of narrow layers it gains nothing and oneDNN takes 0.85-0.94 times
  as long, so these layers have a second copy in oneDNN's layout.
- On other CPUs, MKL gains little, and oneDNN takes 0.6-0.95 times as long as a product with the plain weight,
  with AVX-512 for all layers, and without it for wide ones. Small products use the plain weight where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subnetact.device import machine, machine_facts
from subnetact.files.fork import new_lock
from subnetact.operators.layer_traits import is_layer, runs_as
from subnetact.supernet.elementwise import has_hooks

_MKL = torch.backends.mkl.is_available() and hasattr(  # type: ignore[no-untyped-call]
    torch.ops.mkl, "_mkl_linear"
)
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(  # type: ignore[no-untyped-call]
    torch.ops.mkldnn, "_linear_pointwise"
)
_PACKING = new_lock()  # Shared by all engines: a weight that is being packed is in memory twice.
SMALLEST_WEIGHT_ELEMENTS = 2**14
"""Weights of fewer elements are not packed: calls take as long, and every packed weight takes whole pages."""
MKL_ROWS = 256
"""The number of rows for which weights are packed. Layouts for fewer than 32 rows are slow for many rows."""
LARGEST_ONEDNN_WIDTH = 256
"""On Intel CPUs, layers with at most as many inputs or outputs are packed for oneDNN, too."""
ONEDNN_ROWS = 512
"""The number of rows for which weights are packed for oneDNN."""
SMALLEST_ONEDNN_PRODUCT = 10**6
"""Products of fewer multiplications are not computed by oneDNN, whose calls take about 10 us."""
SMALLEST_WIDTH = 512
"""On other than Intel CPUs without AVX-512, layers of fewer inputs or outputs are not packed."""
PAGE_BYTES = 2**14
"""Bytes that a packed weight may take beyond those of the plain weight, because it takes whole pages."""


@cache
def is_intel() -> bool:
    """Tell whether the processor is one of Intel's."""
    return "Intel" in machine(torch.device("cpu"))["device_name"]


def packing_pays() -> bool:
    """Tell whether products with packed weights are faster on this CPU in layers of all widths."""
    return is_intel() or machine_facts("cpu").aten.startswith("AVX512")


def can_pack_linear(module: Any) -> bool:
    """Tell whether a module is a linear layer, float32 on the CPU, that is worth packing.

    A class with a forward of its own says by `product_weight` that an ordinary layer with the weight that it
    returns has its outputs, up to a view.
    """
    return (
        _MKL
        and isinstance(module, nn.Linear)
        and (runs_as(module, nn.Linear) or hasattr(module, "product_weight"))
        and not has_hooks(module)
        and all(
            p is None or (p.device.type == "cpu" and p.dtype == torch.float32 and p.layout == torch.strided)
            for p in module._parameters.values()
        )
        and module.weight.numel() >= SMALLEST_WEIGHT_ELEMENTS
        and (packing_pays() or min(module.weight.shape) >= SMALLEST_WIDTH)
    )


class PackedLinear(nn.Module):
    """A linear layer with its weight packed."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.plain = layer.weight.detach()
        arranged: Any = getattr(layer, "product_weight", None)
        weight = self.plain if arranged is None else arranged().detach()
        self.outputs, self.inputs = self.plain.shape
        bias = layer._parameters["bias"]
        self.bias = None if bias is None else bias.detach()
        self.mkl: Tensor | None = None
        if is_intel() or not ONEDNN:
            self.mkl = _pack(torch.ops.mkl._mkl_reorder_linear_weight, weight, MKL_ROWS)
        self.onednn: Tensor | None = None
        if ONEDNN and (self.mkl is None or min(self.plain.shape) <= LARGEST_ONEDNN_WIDTH):
            self.onednn = _pack(torch.ops.mkldnn._reorder_linear_weight, weight, ONEDNN_ROWS)
        self.from_rows = ONEDNN_ROWS  # From how many rows oneDNN computes the product.
        if self.mkl is None:
            self.from_rows = -(-SMALLEST_ONEDNN_PRODUCT // self.plain.numel()) if arranged is None else 1
        self.shape = torch.empty(1).expand(self.plain.shape)  # MKL needs only the shape of the plain weight.

    @property
    def nbytes(self) -> int:
        """Bytes that the packed weights take in memory."""
        held = 0 if self.mkl is None else self.plain.nbytes + PAGE_BYTES
        return held + (0 if self.onednn is None else int(torch.ops.mkldnn._nbytes(self.onednn)))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        rows = x.numel() // self.inputs
        y: Tensor
        if rows >= self.from_rows and self.onednn is not None:
            y = torch.ops.mkldnn._linear_pointwise(x, self.onednn, self.bias, "none", [], "")
        elif not rows:
            y = x.new_empty(*x.shape[:-1], self.outputs)
        elif self.mkl is not None:
            y = torch.ops.mkl._mkl_linear(x, self.mkl, self.shape, self.bias, rows)
        else:
            y = F.linear(x, self.plain, self.bias)
        return y


def _pack(reorder: Callable[[Tensor, int], Tensor], weight: Tensor, rows: int) -> Tensor:
    with _PACKING:
        return reorder(weight.contiguous(), rows)


def pack_linears_(view: nn.Module) -> list[PackedLinear]:
    """Pack the linear layers of a private view, and return their products."""
    products: list[PackedLinear] = []
    inside = ""
    for path, module in view.named_modules():
        if inside and path.startswith(inside):
            continue
        if can_pack_linear(module):
            products.append(PackedLinear(module))
            object.__setattr__(module, "forward", products[-1].forward)
        elif path and is_layer(module):  # Such as `nn.MultiheadAttention`, which reads the weights itself.
            inside = f"{path}."
    return products
