"""Nodes of a traced graph: which compute every element by itself, and which write over their operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch.fx.graph import inplace_methods

from subnetact.operators.operation_traits import OperationTraits, calls_of, operation_of
from subnetact.operators.view_module import HOOKS, module_class

ADDITIONS = calls_of("addition")
PRODUCTS = calls_of("product")


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a module has hooks, or a forward that a tool has bound to it, which run with its calls."""
    return "forward" in module.__dict__ or any(module.__dict__[name] for name in HOOKS)


def elementwise(node: fx.Node | None, leaves: Mapping[str, nn.Module]) -> OperationTraits | None:
    """Return the operation of a node of a graph; None for anything else, and for modules with hooks."""
    if node is None:
        return None
    call: Any = node.target
    settings: Mapping[str, Any] = node.kwargs
    if node.op == "call_module":
        module = leaves[str(call)]
        if has_hooks(module) or node.kwargs:
            return None
        call, settings = module_class(module), module.__dict__
    elif settings.keys() - {"inplace", "approximate"}:
        return None
    operation = operation_of(call, settings.get("approximate", "none"))
    operands = 1 if operation.kind == "activation" else 2
    fits = len(node.args) == operands and isinstance(node.args[0], fx.Node)
    return operation if operation.new is not None and fits else None


def writes(node: fx.Node, leaves: Mapping[str, nn.Module]) -> bool:
    """Tell whether a node may write over one of its operands."""
    if node.op == "call_module":
        return bool(getattr(leaves[str(node.target)], "inplace", False))
    name = getattr(node.target, "__name__", str(node.target))
    in_place = name in inplace_methods or (name.endswith("_") and not name.endswith("__"))
    return in_place or "out" in node.kwargs or bool(node.kwargs.get("inplace"))
