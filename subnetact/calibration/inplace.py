"""Activations, sums and products: which nodes of a traced graph may overwrite what they read."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from subnetact.operators.view_module import is_view

__all__ = ["Elementwise", "elementwise", "hidden_writes"]


@dataclass(frozen=True, eq=False)
class Elementwise:
    """An operation on every element of its first argument.

    Attributes:
        name: equal for all ways to write it.
        new: computes it.
        over: computes it over its first argument.
    """

    name: str
    new: Callable[..., Tensor]
    over: Callable[..., Tensor]

    def __call__(self, args: Sequence[Any], over: bool) -> Any:
        """Compute it, over the first argument where that is allowed and has the result's form."""
        first, *others = args
        fits = isinstance(first, Tensor) and all(
            isinstance(other, int | float)
            or (
                other.dtype == first.dtype
                and other.device == first.device
                and _fits(other.shape, first.shape)
            )
            for other in others
        )
        return self.over(*args) if over and fits else self.new(*args)


def _fits(shape: torch.Size, whole: torch.Size) -> bool:
    """Tell whether a tensor can be broadcast to a whole shape."""
    ends = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(a in (1, b) for a, b in ends)


_RELU = Elementwise("relu", torch.relu, torch.relu_)
_RELU6 = Elementwise("relu6", F.relu6, lambda x: F.relu6(x, inplace=True))
_SILU = Elementwise("silu", F.silu, lambda x: F.silu(x, inplace=True))
_HARDSWISH = Elementwise("hardswish", F.hardswish, lambda x: F.hardswish(x, inplace=True))
_ADD = Elementwise("add", operator.add, operator.iadd)
_MULTIPLY = Elementwise("multiply", operator.mul, operator.imul)
_UNARY: Mapping[Any, Elementwise] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, nn.ReLU, "relu", "relu_"), _RELU),
    **dict.fromkeys((F.relu6, nn.ReLU6), _RELU6),
    **dict.fromkeys((F.silu, nn.SiLU), _SILU),
    **dict.fromkeys((F.hardswish, nn.Hardswish), _HARDSWISH),
}
_BINARY: Mapping[Any, Elementwise] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), _ADD),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, "mul", "mul_"), _MULTIPLY),
}
_WRITING = (operator.iadd, operator.imul, torch.relu_)
_HOOKS = tuple(name for name in nn.Module().__dict__ if name.endswith("_hooks"))


def elementwise(node: fx.Node, leaves: Mapping[str, nn.Module]) -> Elementwise | None:
    """Return what a node computes, if it is one of the operations known here."""
    target = node.target
    if node.op == "call_module":
        module = leaves[str(target)]
        cls = type(module).__mro__[2] if is_view(module) else type(module)
        hooked = any(module.__dict__[name] for name in _HOOKS)
        return None if hooked or len(node.args) != 1 or node.kwargs else _UNARY.get(cls)
    if len(node.args) == 1 and set(node.kwargs) <= {"inplace"}:
        return _UNARY.get(target)
    if len(node.args) == 2 and not node.kwargs and isinstance(node.args[0], fx.Node):
        return _BINARY.get(target)
    return None


def hidden_writes(nodes: Sequence[fx.Node], leaves: Mapping[str, nn.Module]) -> str | None:
    """Return a node that writes over a value which others may read later, or None.

    Only known operations may write, and only over the output of a layer or of a known operation that
    nothing else reads: then writing elsewhere is the same.
    """
    for node in nodes:
        if not _writes(node, leaves):
            continue
        before = node.args[0] if node.args else None
        alone = isinstance(before, fx.Node) and len(before.users) == 1
        if elementwise(node, leaves) is None or not alone or not _owns(before, leaves):  # type: ignore[arg-type]
            return f"{node.op} {node.target}"
    return None


def _writes(node: fx.Node, leaves: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return bool(getattr(leaves[str(node.target)], "inplace", False))
    if node.kwargs.get("inplace") or "out" in node.kwargs or _inplace_by_position(node):
        return True
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    return node.target in _WRITING or getattr(node.target, "__name__", "").endswith("_")


def _inplace_by_position(node: fx.Node) -> bool:
    if not isinstance(node.target, FunctionType):
        return False
    names = list(inspect.signature(node.target).parameters)
    return any(name == "inplace" and bool(arg) for name, arg in zip(names, node.args, strict=False))


def _owns(node: fx.Node, leaves: Mapping[str, nn.Module]) -> bool:
    """Tell whether a node's output is memory of its own."""
    if node.op == "call_module":
        module = leaves[str(node.target)]
        layers = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.modules.batchnorm._BatchNorm)
        return isinstance(module, layers) or elementwise(node, leaves) is not None
    return elementwise(node, leaves) is not None
