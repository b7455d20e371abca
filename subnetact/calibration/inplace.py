"""Overwriting in a traced graph: which nodes overwrite a tensor that others may read later."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from types import FunctionType

from torch import fx, nn

from subnetact.operators.layer_traits import traits_of
from subnetact.supernet.elementwise import elementwise, has_hooks


def hidden_writes(nodes: Sequence[fx.Node], leaves: Mapping[str, nn.Module]) -> str | None:
    """Return the first node, in words, that may overwrite a value which others read later."""
    for node in nodes:
        if not writes(node, leaves):
            continue
        before = node.args[0] if node.args else None
        alone = isinstance(before, fx.Node) and len(before.users) == 1
        if elementwise(node, leaves) is None or not alone or not is_fresh(before, leaves):  # type: ignore[arg-type]
            return f"{node.op} {node.target}"
    return None


def is_fresh(node: fx.Node, leaves: Mapping[str, nn.Module]) -> bool:
    """Tell whether nothing but the node refers to the memory of its output."""
    if elementwise(node, leaves) is not None:
        return True
    module = leaves[str(node.target)] if node.op == "call_module" else None
    return module is not None and traits_of(module).fresh and not has_hooks(module)


def writes(node: fx.Node, leaves: Mapping[str, nn.Module]) -> bool:
    """Tell whether a node may write over one of its operands."""
    if node.op == "call_module":
        return bool(getattr(leaves[str(node.target)], "inplace", False))
    if node.kwargs.get("inplace") or "out" in node.kwargs or _inplace_by_position(node):
        return True
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    return node.target in (operator.iadd, operator.imul) or getattr(node.target, "__name__", "").endswith("_")


def _inplace_by_position(node: fx.Node) -> bool:
    if not isinstance(node.target, FunctionType):
        return False
    names = list(inspect.signature(node.target).parameters)
    return any(name == "inplace" and bool(arg) for name, arg in zip(names, node.args, strict=False))
