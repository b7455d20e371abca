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


def spellings(*names: str) -> frozenset[Any]:
    """Return the functions of torch and of `operator` with some names, in place or not, and methods."""
    both = [*names, *(f"{name}_" for name in names)]
    functions = {getattr(home, name, None) for home in (operator, torch, F) for name in both}
    return frozenset({f for f in functions if callable(f)}.union(n for n in both if hasattr(Tensor, n)))


ADDITIONS = spellings("add", "iadd")
PRODUCTS = spellings("mul", "imul")
_gelu_ = torch.ops.aten.gelu_.default
_GELU = {
    way: Elementwise("gelu", partial(F.gelu, approximate=way), partial(_gelu_, approximate=way))
    for way in ("none", "tanh")
}
_ACTIVATIONS = {
    nn.ReLU: Elementwise("relu", torch.relu, torch.relu_),
    nn.ReLU6: Elementwise("relu6", F.relu6, partial(F.relu6, inplace=True)),
    nn.SiLU: Elementwise("silu", F.silu, partial(F.silu, inplace=True)),
    nn.Hardswish: Elementwise("hardswish", F.hardswish, partial(F.hardswish, inplace=True)),
}
_UNARY = {call: each for each in _ACTIVATIONS.values() for call in spellings(each.name)}
_BINARY = {
    **dict.fromkeys(ADDITIONS, Elementwise("add", operator.add, operator.iadd)),
    **dict.fromkeys(PRODUCTS, Elementwise("multiply", operator.mul, operator.imul)),
}


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
        return _GELU.get(module.approximate) if cls is nn.GELU else _ACTIVATIONS.get(cls)
    if target is F.gelu and len(node.args) == 1:
        return _GELU.get(str(node.kwargs.get("approximate", "none")))
    if len(node.args) == 1 and set(node.kwargs) <= {"inplace"}:
        return _UNARY.get(target)
    if len(node.args) == 2 and not node.kwargs and isinstance(node.args[0], fx.Node):
        return _BINARY.get(target)
    return None
