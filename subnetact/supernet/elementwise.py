"""Activations, sums and products in a traced graph, recognised however the network writes them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from subnetact.operators.view_module import HOOKS, module_class

__all__ = ["ADDITIONS", "PRODUCTS", "Elementwise", "elementwise", "has_hooks"]


@dataclass(frozen=True, eq=False)
class Elementwise:
    """An operation on every element, computed into a `new` tensor or `over` its first argument."""

    name: str
    new: Callable[..., Tensor]
    over: Callable[..., Tensor]

    def __call__(self, args: Sequence[Any], over: bool) -> Any:
        """Compute the result, over the first operand if `over` allows it and shape, dtype and device fit."""
        first, *others = args
        if over and not others:
            return self.over(first)
        fits = isinstance(first, Tensor) and all(
            isinstance(other, int | float) or _fits(other, first) for other in others
        )
        return self.over(*args) if over and fits else self.new(*args)


def _fits(tensor: Tensor, whole: Tensor) -> bool:
    """Tell whether a tensor can be broadcast to another one, over which the result may be written."""
    ends = zip(reversed(tensor.shape), reversed(whole.shape), strict=False)
    alike = tensor.dtype == whole.dtype and tensor.device == whole.device
    return alike and tensor.dim() <= whole.dim() and all(a in (1, b) for a, b in ends)


_RELU = Elementwise("relu", torch.relu, torch.relu_)
_RELU6 = Elementwise("relu6", F.relu6, lambda x: F.relu6(x, inplace=True))
_SILU = Elementwise("silu", F.silu, lambda x: F.silu(x, inplace=True))
_HARDSWISH = Elementwise("hardswish", F.hardswish, lambda x: F.hardswish(x, inplace=True))
_gelu_ = torch.ops.aten.gelu_.default
_GELU = {
    way: Elementwise("gelu", partial(F.gelu, approximate=way), partial(_gelu_, approximate=way))
    for way in ("none", "tanh")
}
_ADD = Elementwise("add", operator.add, operator.iadd)
_MULTIPLY = Elementwise("multiply", operator.mul, operator.imul)
_UNARY: Mapping[Any, Elementwise] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, nn.ReLU, "relu", "relu_"), _RELU),
    **dict.fromkeys((F.relu6, nn.ReLU6), _RELU6),
    **dict.fromkeys((F.silu, nn.SiLU), _SILU),
    **dict.fromkeys((F.hardswish, nn.Hardswish), _HARDSWISH),
}
ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
PRODUCTS = (operator.mul, operator.imul, torch.mul, "mul", "mul_")
_BINARY: Mapping[Any, Elementwise] = {**dict.fromkeys(ADDITIONS, _ADD), **dict.fromkeys(PRODUCTS, _MULTIPLY)}


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a module has hooks of its own, which run with its calls."""
    return any(module.__dict__[name] for name in HOOKS)


def elementwise(node: fx.Node, leaves: Mapping[str, nn.Module]) -> Elementwise | None:
    """Return the operation of a node of a graph; None for anything else, and for modules with hooks."""
    target = node.target
    if node.op == "call_module":
        module: Any = leaves[str(target)]
        if has_hooks(module) or len(node.args) != 1 or node.kwargs:
            return None
        cls = module_class(module)
        return _GELU.get(module.approximate) if cls is nn.GELU else _UNARY.get(cls)
    if target is F.gelu and len(node.args) == 1:
        return _GELU.get(str(node.kwargs.get("approximate", "none")))
    if len(node.args) == 1 and set(node.kwargs) <= {"inplace"}:
        return _UNARY.get(target)
    if len(node.args) == 2 and not node.kwargs and isinstance(node.args[0], fx.Node):
        return _BINARY.get(target)
    return None
