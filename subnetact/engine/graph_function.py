"""A traced graph as one Python function, which calls its layers directly.

`fx.GraphModule` looks every layer up by its path, and every layer its parameters, through `nn.Module`. With
one sample, that takes about as long as the smaller half of a network's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, fx, nn

from subnetact.supernet.elementwise import has_hooks


def graph_function(graph: fx.Graph, values: Mapping[str, nn.Module | Tensor]) -> Callable[..., Any]:
    """Return the function that a graph computes; `values` are the layers and tensors that it names."""
    made, named = fx.Graph(), SimpleNamespace()
    copies: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(graph.nodes):
        copied = copies[node] = made.node_copy(node, copies.__getitem__)
        if node.op in ("get_attr", "call_module"):
            value, copied.target = values[str(node.target)], f"value_{number}"
            setattr(named, copied.target, value if node.op == "get_attr" else _forward_of(value))
    code = made.python_code("self")
    defined = dict(code.globals)
    exec(compile(code.src, "<fused program>", "exec"), defined)
    return partial(defined.pop("forward"), named)  # Kept there, it would be a reference circle.


def _forward_of(layer: Any) -> Callable[..., Any]:
    """Return the forward of a layer that finds its parameters without asking `nn.Module`."""
    if has_hooks(layer):
        return layer  # type: ignore[no-any-return]
    if not (layer._parameters or layer._buffers or layer._modules):
        return layer.forward  # type: ignore[no-any-return]
    quick = copy(layer)
    quick.__dict__.update({**layer._buffers, **layer._modules, **layer._parameters})
    return quick.forward  # type: ignore[no-any-return]
