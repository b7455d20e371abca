"""`Recorder`: records a network into a graph in which layers that differ only in sizes have equal code.

`lines` returns a recorded graph as text. The text decides whether a forward that skips a layer does the same
as a forward in which that layer is the identity. A recording of the whole network alone cannot tell: if one
layer is skippable, `x = tanh(layer(x))` in a loop and `tanh` after the loop give the same graph.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.fx.proxy import GraphAppendingTracer
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["Recorder", "check_rank", "lines"]

_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv)
_IDENTITIES = (nn.Identity, _DropoutNd)
"""Modules that are the identity in evaluation mode."""
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


class Recorder(GraphAppendingTracer):
    """Records into one graph; expressions that depend on the size row alone are recorded only once.

    Integers in such expressions, and in slices of weights and statistics, become attributes. Tensors that no
    module has registered become constants, which are copied in every call, because a forward may write into a
    tensor that it has made itself.

    Args:
        graph: the graph to record into.
        tensors: tensor attributes by name; constants are added.
        registered: ids of the network's parameters and buffers.

    Attributes:
        numbers: integer attributes by name.
    """

    def __init__(self, graph: fx.Graph, tensors: dict[str, Tensor], registered: Set[int]) -> None:
        super().__init__(graph)
        self.tensors = tensors
        self.registered = registered
        self.numbers: dict[str, int] = {}
        self._scalars: set[Any] = set()
        self._held: set[Any] = set()
        self._once_recorded: dict[Any, fx.Node] = {}

    def begin(self, row: fx.Node, statistics: fx.Node) -> None:
        """Remember the two arguments of the graph that are not inputs of the network.

        Args:
            row: the node of the size row.
            statistics: the node of the BatchNorm statistics.
        """
        self._row = row
        self._held.add(statistics)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any) -> fx.Node:
        """Record a node, or return an equal node that was recorded before."""
        if kind == "get_attr":
            return self._once(kind, target, (), self._held)
        if target is operator.getitem and args[0] is self._row:
            return self._once(kind, target, (self._row, self._number(args[1])), self._scalars)
        if target in _ARITHMETIC and all(map(self._is_size, args)):
            return self._once(kind, target, tuple(map(self._number, args)), self._scalars)
        if target is operator.getitem and args[0] in self._held:
            args = args[0], map_aggregate(args[1], self._number)
            node = super().create_node(kind, target, args, kwargs, *more)
            self._held.add(node)
            return node
        return super().create_node(kind, target, args, kwargs, *more)

    def create_arg(self, a: Any) -> Any:
        """Convert a value to an argument of a node."""
        if isinstance(a, Tensor):
            name = next((n for n, t in self.tensors.items() if t is a), f"constant_{len(self.tensors)}")
            self.tensors[name] = a
            kept = self._once("get_attr", name, ())
            return kept if id(a) in self.registered else self._once("call_method", "clone", (kept,))
        return super().create_arg(a)

    def drop_unused(self) -> None:
        """Erase the sizes, attributes and slices that no node uses."""
        recorded = {*self._once_recorded.values(), *self._held}
        for node in reversed(self.graph.nodes):
            if node in recorded and not node.users and node.op != "placeholder":
                self.graph.erase_node(node)

    def recorded_once(self) -> set[fx.Node]:
        """Return the nodes whose position in the graph has no meaning: sizes, integers and tensors."""
        return set(self._once_recorded.values())

    def _once(self, kind: str, target: Any, args: tuple[Any, ...], group: set[Any] | None = None) -> fx.Node:
        key = kind, target, str(args)
        if key not in self._once_recorded:
            node = super().create_node(kind, target, args, {})
            self._once_recorded[key] = node
            if group is not None:
                group.add(node)
        return self._once_recorded[key]

    def _is_size(self, value: Any) -> bool:
        return type(value) is int or (isinstance(value, fx.Node) and value in self._scalars)

    def _number(self, value: Any) -> Any:
        if type(value) is not int:
            return value
        name = next((n for n, v in self.numbers.items() if v == value), f"number_{len(self.numbers)}")
        self.numbers[name] = value
        return self._once("get_attr", name, ())


def check_rank(mean: Tensor, x: Tensor, least: int, most: int) -> Tensor:
    """Check the number of dimensions of a BatchNorm's input; TorchScript compiles this function.

    It reads the length of the shape because TorchScript regards `x.dim()` of a convolution's output as
    constant.

    Args:
        mean: the running mean, which is returned so that the call has a use.
        x: the input of the BatchNorm.
        least: smallest allowed number of dimensions.
        most: largest allowed number of dimensions.

    Returns:
        `mean`.

    Raises:
        ValueError: the number of dimensions is outside the range.
    """
    if len(x.size()) < least or len(x.size()) > most:
        raise ValueError(
            "BatchNorm got " + str(len(x.size())) + " dimensions; an input has too few or too many"
        )
    return mean


def lines(
    tracer: Recorder,
    paths: Mapping[str, str],
    modules: Mapping[str, nn.Module],
    without: Sequence[str] = (),
) -> list[str]:
    """Return one line of text per operation whose result is used or that writes into a tensor.

    Args:
        tracer: the recorder of the graph.
        paths: the network's names for the modules that the graph calls.
        modules: those of the called modules that are PyTorch's own. The others may write into their inputs.
        without: names of modules to leave out, as if they were the identity on their first argument.

    Returns:
        The lines. Two graphs with equal lines compute the same.
    """
    graph = tracer.graph
    identities = {name for name, module in modules.items() if isinstance(module, _IDENTITIES)}
    writing = {name for name in paths if name not in modules or getattr(modules[name], "inplace", False)}
    calls = [node for node in graph.nodes if node.op == "call_module" and node.args]
    skipped = {node for node in calls if paths[node.target] in without or node.target in identities}
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
