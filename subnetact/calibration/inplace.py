"""Which nodes of a traced graph may overwrite the tensor that they read."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from types import FunctionType

import torch
from torch import fx, nn

from subnetact.supernet.elementwise import elementwise

__all__ = ["hidden_writes"]

_WRITING = (operator.iadd, operator.imul, torch.relu_)


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
