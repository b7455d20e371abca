"""Attention that a network writes out: scores, softmax and the weighted sum become one operation.

The one operation neither writes the scores to memory nor reads them again. Only this form is replaced:

    softmax(q @ k.transpose(-2, -1) * scale + bias, -1) @ v

with a number as the scale and a constant, finite bias, both of which may be missing. The number of axes is
only known when a batch comes. If the axes are batch, heads, tokens and features, one operation computes the
attention; otherwise the operations are those that the network has written out.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from subnetact.operators.view_module import module_class
from subnetact.supernet.elementwise import elementwise, has_hooks

__all__ = ["attended", "merge_attention"]

_PRODUCTS = (operator.matmul, torch.matmul, "matmul")
_TURNS = (torch.transpose, torch.swapaxes, "transpose", "swapaxes")
_SOFTMAX = (F.softmax, torch.softmax, "softmax")
_TIMES = (operator.mul, torch.mul, "mul")
_BY = (operator.truediv, torch.div, "div")
_AXES = ((-2, -1), (-1, -2), (2, 3), (3, 2))


def merge_attention(graph: fx.Graph, leaves: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> int:
    """Replace attention that is written out by calls of `attended`, in place.

    Rows whose scores are all minus infinity become zeros instead of NaN, so the network must make no infinite
    values of finite ones.

    Args:
        graph: a graph that `trace_` made.
        leaves: the modules that the graph calls, by name.
        tensors: the constants that the graph reads, by name.

    Returns:
        The number of replacements.
    """
    return sum(_merge(graph, node, tensors) for node in list(graph.nodes) if _is_softmax(node, leaves))


def _is_softmax(node: fx.Node, leaves: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        module: Any = leaves[str(node.target)]
        plain = module_class(module) is nn.Softmax and not has_hooks(module)
        return bool(plain and module.dim == -1 and len(node.args) == 1)
    if node.op not in ("call_function", "call_method") or node.target not in _SOFTMAX:
        return False
    axis = node.args[1] if len(node.args) == 2 else node.kwargs.get("dim")
    given = {name for name, value in node.kwargs.items() if value is not None}
    return bool(axis == -1 and given <= {"dim", "_stacklevel"})


def _merge(graph: fx.Graph, softmax: fx.Node, tensors: Mapping[str, Tensor]) -> bool:
    summed = _pair(next(iter(softmax.users)), _PRODUCTS) if len(softmax.users) == 1 else None
    if summed is None or summed[0] is not softmax:
        return False
    last, chain, bias, scale = next(iter(softmax.users)), [softmax], None, 1.0
    node: Any = softmax.args[0]
    operation = elementwise(node, {}) if node.op != "call_module" else None
    if operation is not None and operation.name == "add" and len(node.users) == 1:
        constant = [_is_finite(one, tensors) for one in node.args]
        if sum(constant) != 1:
            return False
        chain.append(node)
        bias, node = (node.args[constant.index(found)] for found in (True, False))
    scaled = _scaled(node)
    if scaled is not None and len(node.users) == 1:
        chain.append(node)
        node, scale = scaled
    factors = _pair(node, _PRODUCTS)
    if factors is None or len(node.users) != 1:
        return False
    query, turned = factors
    key = _turned(turned)
    if key is None:
        return False
    with graph.inserting_before(last):
        merged = graph.call_function(attended, (query, key[0], summed[1], bias, scale, key[1]))
    last.replace_all_uses_with(merged)
    for unused in (last, *chain, node):
        graph.erase_node(unused)
    if not turned.users:
        graph.erase_node(turned)
    return True


def _pair(node: Any, targets: tuple[Any, ...]) -> tuple[Any, Any] | None:
    """Return the two operands of an operation, or None if the node computes anything else."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return None
    if node.target not in targets or len(node.args) != 2 or node.kwargs:
        return None
    return node.args[0], node.args[1]


def _scaled(node: Any) -> tuple[fx.Node, float] | None:
    """Return what a node multiplies with a number or divides by one, and the factor."""
    for targets in (_TIMES, _BY):
        operands = _pair(node, targets)
        if operands is None:
            continue
        value, number = operands
        if targets is _TIMES and isinstance(number, fx.Node):
            value, number = number, value
        if isinstance(value, fx.Node) and isinstance(number, int | float) and number:
            return value, float(number if targets is _TIMES else 1 / number)
    return None


def _turned(node: Any) -> tuple[fx.Node, tuple[int, int]] | None:
    """If a node exchanges the last two axes of a tensor, or axes 2 and 3, return the tensor and the axes."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is getattr and node.args[1] == "mT":
        return node.args[0], (-2, -1)  # type: ignore[return-value]
    exchanged = node.op in ("call_function", "call_method") and node.target in _TURNS and not node.kwargs
    axes = tuple(node.args[1:])
    return (node.args[0], axes) if exchanged and axes in _AXES else None  # type: ignore[return-value]


def attended(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, axes: tuple[int, int]
) -> Tensor:
    """Return softmax(query @ key.transpose(*axes) * scale + bias, -1) @ value.

    Args:
        query: the queries, of shape (N, heads, L, E), or with other axes.
        key: the keys, of shape (N, heads, S, E).
        value: the values, of shape (N, heads, S, V).
        bias: a tensor that is added to the scores. If None, nothing is added.
        scale: a factor of the scores.
        axes: the two axes of the keys that are exchanged.
    """
    heads = query.shape[:2]
    four = query.dim() == key.dim() == value.dim() == 4 and heads == key.shape[:2] == value.shape[:2]
    if four and (bias is None or bias.dim() <= 4):
        if bias is not None and bias.dim() == 3:  # Fast kernels take two or four axes.
            bias = bias.unsqueeze(0)
        return F.scaled_dot_product_attention(query, key, value, bias, scale=scale)
    scores = query @ key.transpose(*axes) * scale
    return (scores if bias is None else scores + bias).softmax(-1) @ value


def _is_finite(node: Any, tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether a node reads a constant tensor of finite numbers."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return False
    tensor = tensors[str(node.target)]
    return tensor.is_floating_point() and bool(tensor.isfinite().all())
