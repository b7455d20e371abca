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
    values: dict[fx.Node, Tensor] = {}
    held = {storage_id(tensor) for tensor in tensors.values()}
    owning: dict[str, int] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            values[node] = tensors[str(node.target)]
            continue
        known = node.target in (_FUNCTIONS if node.op == "call_function" else _METHODS)
        inputs = node.all_input_nodes
        if node.op not in ("call_function", "call_method") or not known or not inputs:
            continue
        if not all(one in values for one in inputs):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        result: Any = (
            getattr(args[0], node.target)(*args[1:], **kwargs)
            if isinstance(node.target, str)
            else node.target(*args, **kwargs)
        )
        if not isinstance(result, Tensor):
            continue
        name = f"constant_{len(tensors)}"
        tensors[name] = result
        if storage_id(result) not in held:
            owning[name] = result.nbytes
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        values[constant] = result
        node.replace_all_uses_with(constant)
        graph.erase_node(node)
    return owning
