"""Constants of a traced graph: what follows from weights alone is computed once."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from subnetact.operators.tensor_version import storage_id

__all__ = ["fold_constants"]

_FUNCTIONS = {
    operator.add, operator.sub, operator.mul, operator.neg, operator.getitem, operator.matmul, torch.add,
    torch.sub, torch.mul, torch.cat, torch.stack, torch.reshape, torch.transpose, torch.permute,
    torch.flatten, torch.unsqueeze, torch.squeeze, torch.matmul, torch.exp, torch.sigmoid, torch.tanh,
    F.embedding, F.interpolate, F.softmax, F.pad,
}  # fmt: skip
_METHODS = {
    "add", "sub", "mul", "neg", "reshape", "view", "transpose", "permute", "flatten", "unsqueeze", "squeeze",
    "contiguous", "t", "matmul", "exp", "sigmoid", "tanh", "softmax", "float", "index_select", "unflatten",
}  # fmt: skip


def fold_constants(graph: fx.Graph, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Replace operations whose inputs are all constants by their results.

    Args:
        graph: a graph whose `get_attr` nodes read `tensors`.
        tensors: the constants by name. Results are added.

    Returns:
        The names of the results that own memory, with their bytes.
    """
    known: dict[fx.Node, bool] = {}  # Whether the node is a constant.
    for node in graph.nodes:
        inputs = node.all_input_nodes
        called = node.op in ("call_function", "call_method")
        foldable = node.target in (_FUNCTIONS if node.op == "call_function" else _METHODS)
        known[node] = node.op == "get_attr" or (
            called and foldable and bool(inputs) and all(known[one] for one in inputs)
        )
        if called and _writes(node) and node.args and known.get(node.args[0], False):
            return {}  # The network changes its own state, so nothing here is constant.
    values: dict[fx.Node, Any] = {}
    held = {storage_id(tensor) for tensor in tensors.values()}
    owning: dict[str, int] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            values[node] = tensors[str(node.target)]
        elif known[node] and all(one in values for one in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            target: Any = node.target
            result = (
                getattr(args[0], target)(*args[1:], **kwargs)
                if node.op == "call_method"
                else target(*args, **kwargs)
            )
            if not isinstance(result, Tensor):
                continue
            name = f"subnetact_constant_{len(tensors)}"
            tensors[name] = result
            if storage_id(result) not in held:
                owning[name] = result.nbytes
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            values[constant] = result
            node.replace_all_uses_with(constant)
            graph.erase_node(node)
    return owning


def _writes(node: fx.Node) -> bool:
    if "out" in node.kwargs or node.target in (operator.setitem, operator.iadd, operator.imul, operator.isub):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return bool(node.kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__"))
