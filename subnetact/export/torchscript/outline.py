"""A graph as text, to tell whether two forwards do the same."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.nn.modules.dropout import _DropoutNd

from subnetact.export.torchscript.recorder import Recorder

__all__ = ["lines"]

_HANDING_ON = (nn.Identity, _DropoutNd)
"""Modules that do nothing where they are not trained."""
_WRITING = {
    operator.setitem,
    operator.iand,
    operator.ior,
    *(
        value
        for name, value in vars(operator).items()
        if name.startswith("i") and hasattr(operator, name[1:])
    ),
}


def lines(
    tracer: Recorder,
    paths: Mapping[str, str],
    modules: Mapping[str, nn.Module],
    without: Sequence[str] = (),
) -> list[str]:
    """Return one line for each operation that counts: its results are used, or it writes into a tensor.

    Args:
        tracer: what has recorded the graph.
        paths: the network's names of the modules it calls.
        modules: those of PyTorch's own among them; the others may write into their inputs.
        without: names of modules that are left out: their first argument is their result.
    """
    graph = tracer.graph
    handing_on = {name for name, module in modules.items() if isinstance(module, _HANDING_ON)}
    writing = {name for name in paths if name not in modules or getattr(modules[name], "inplace", False)}
    calls = [node for node in graph.nodes if node.op == "call_module" and node.args]
    skipped = {node for node in calls if paths[node.target] in without or node.target in handing_on}
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        needed = node.op in ("placeholder", "output") or (node not in skipped and _may_write(node, writing))
        if needed or node in live:
            live.add(node)
            live.update([node.args[0]] if node in skipped else node.all_input_nodes)
    once = tracer.recorded_once()
    names: dict[Any, str] = {}
    found: list[str] = []

    def named(value: Any) -> Any:
        return _Name(names[value]) if isinstance(value, fx.Node) else value

    for node in graph.nodes:
        if node not in live:
            continue
        if node in skipped:
            names[node] = names[node.args[0]]
            continue
        args, kwargs = map_aggregate(node.args, named), map_aggregate(dict(node.kwargs), named)
        text = f"{node.op} {_target(node, tracer, paths)} {args!r} {kwargs!r}"
        if node in once:
            names[node] = f"({text})"
        else:
            names[node] = f"%{len(found)}"
            found.append(text)
    return found


class _Name(str):
    def __repr__(self) -> str:
        return str(self)


def _may_write(node: fx.Node, writing: Set[str]) -> bool:
    if node.op == "call_module":
        return node.target in writing
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") or bool(node.kwargs.get("inplace")) or "out" in node.kwargs
    return in_place or node.target in _WRITING


def _target(node: fx.Node, tracer: Recorder, paths: Mapping[str, str]) -> str:
    if node.op == "call_module":
        return paths[str(node.target)]
    if node.op == "call_function":
        return f"{getattr(node.target, '__name__', '')} {id(getattr(node.target, '__code__', node.target))}"
    if node.op != "get_attr":
        return str(node.target)
    value = tracer.tensors.get(str(node.target), tracer.numbers.get(str(node.target)))
    if not isinstance(value, Tensor) or id(value) in tracer.registered:
        return str(value) if isinstance(value, int) else f"tensor {id(value)}"
    return f"{value.dtype} {tuple(value.shape)} {_digest(value)}"


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
