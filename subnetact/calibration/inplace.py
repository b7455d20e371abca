"""Overwriting in a traced graph: which nodes overwrite a tensor that others may read later."""

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
    """Find a node that may overwrite a value which others read later.

    A node may overwrite its input if the node is a known elementwise operation, if nothing else reads the
    input, and if the input is the output of a layer or of another known operation. Writing the result to a
    new tensor is then equivalent.

    Args:
        nodes: the nodes of a graph that `trace_` made.
        leaves: the modules that the graph calls, by name.

    Returns:
        The first other node that overwrites something, in words. If no node does, None.
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
    """Tell whether nothing else refers to the memory of a node's output."""
    if node.op == "call_module":
        module = leaves[str(node.target)]
        layers = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.modules.batchnorm._BatchNorm)
        return isinstance(module, layers) or elementwise(node, leaves) is not None
    return elementwise(node, leaves) is not None
