"""Finite values: which samples have NaN or infinite values, and whether a network can make some of others.

Some operations of fused programs turn NaN into a number, so a program may use them only if no NaN can reach
them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn

from subnetact.engine.packed_conv import plain_conv
from subnetact.operators.layer_traits import traits_of
from subnetact.operators.lowered_weight import LowConv, LowLinear
from subnetact.operators.view_module import module_class
from subnetact.supernet.elementwise import ADDITIONS, PRODUCTS, spellings

LIMIT = 1e8
"""Inputs up to this absolute value count as ordinary; `overflows` probes a network with values as large."""

_OPERATIONS = ADDITIONS | PRODUCTS | {getattr, torch._assert} | spellings(
    "sub", "neg", "getitem", "matmul", "floordiv", "eq", "relu", "relu6", "silu", "gelu", "sigmoid", "tanh",
    "hardtanh", "hardswish", "hardsigmoid", "leaky_relu", "elu", "mish", "softmax", "erf", "clamp", "dropout",
    "mean", "sum", "flatten", "view", "view_as", "reshape", "unflatten", "permute", "transpose", "swapaxes",
    "t", "unsqueeze", "squeeze", "expand", "expand_as", "contiguous", "clone", "to", "float", "size", "dim",
    "cat", "chunk", "split", "unbind", "arange", "zeros_like", "embedding", "linear", "conv2d", "batch_norm",
    "layer_norm", "group_norm", "max_pool2d", "avg_pool2d", "adaptive_max_pool2d", "adaptive_avg_pool2d",
    "pad", "interpolate", "pixel_shuffle",
)  # fmt: skip
_DIVISIONS = spellings("truediv", "div")


def stays_finite(graph: fx.Graph, leaves: Mapping[str, nn.Module]) -> bool:
    """Tell whether finite values stay finite in a traced network, unless they overflow."""
    for node in graph.nodes:
        if node.op == "call_module" and not _is_known(leaves[str(node.target)]):
            return False
        by_number = node.target in _DIVISIONS and isinstance(node.args[1], int | float) and node.args[1] != 0
        if node.op in ("call_function", "call_method") and node.target not in _OPERATIONS and not by_number:
            return False
    return True


def _is_known(module: nn.Module) -> bool:
    cls = module_class(module)
    known = isinstance(module, LowConv | LowLinear) or plain_conv(module)
    return known or cls.forward is nn.BatchNorm2d.forward or traits_of(cls, derived=False).finite


def strange_samples(x: Tensor) -> list[int]:
    """Return the positions of the samples of a batch that have NaN, infinite or huge values."""
    if torch.linalg.vector_norm(x).item() <= LIMIT:  # NaN is not.
        return []
    rows = x.reshape(len(x), x.shape[1:].numel())
    norms: list[float] = torch.linalg.vector_norm(rows, dim=1).tolist()
    return [i for i, norm in enumerate(norms) if not norm <= LIMIT]


def overflows(view: nn.Module, probe: Tensor | None) -> bool:
    """Tell whether weights, or the output for a probe of values up to `LIMIT`, are not finite tensors."""
    tensors = (*view.parameters(), *view.buffers())
    if not all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point()):
        return True
    if probe is None or not probe.is_floating_point():
        return False
    output = view(probe * (LIMIT / max(1.0, float(probe.abs().amax()))))
    return not isinstance(output, Tensor) or not bool(output.isfinite().all())
