"""Records the symbolic network into a graph, so that layers which differ only in sizes have equal code."""

from __future__ import annotations

import operator
from collections.abc import Set
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.fx.proxy import GraphAppendingTracer

__all__ = ["Recorder", "check_rank"]

_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv)


class Recorder(GraphAppendingTracer):
    """Records into one graph, what depends on the row alone once.

    Numbers in that, and in slices of weights and statistics, become attributes. Tensors that no module
    registered become constants, copied in each call: a forward may write into what it has made.

    Args:
        graph: to record into.
        tensors: the attributes that are tensors, by name; constants are added.
        registered: ids of the network's parameters and buffers.

    Attributes:
        numbers: the attributes that are numbers, by name.
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
        """Note the two arguments that are no inputs of the network."""
        self._row = row
        self._held.add(statistics)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any) -> fx.Node:
        """Record a node, or return the equal one that is there."""
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
        """Make a graph's argument of a value."""
        if isinstance(a, Tensor):
            name = next((n for n, t in self.tensors.items() if t is a), f"constant_{len(self.tensors)}")
            self.tensors[name] = a
            kept = self._once("get_attr", name, ())
            return kept if id(a) in self.registered else self._once("call_method", "clone", (kept,))
        return super().create_arg(a)

    def drop_unused(self) -> None:
        """Erase sizes, attributes and slices that nothing uses."""
        recorded = {*self._once_recorded.values(), *self._held}
        for node in reversed(self.graph.nodes):
            if node in recorded and not node.users and node.op != "placeholder":
                self.graph.erase_node(node)

    def recorded_once(self) -> set[fx.Node]:
        """Return the nodes whose position means nothing: sizes, numbers, tensors."""
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
    """Refuse an input that BatchNorm refuses, and return `mean`. TorchScript compiles it as it is.

    It asks for the length of the shape: TorchScript takes `x.dim()` of a convolution's output for known.
    """
    if len(x.size()) < least or len(x.size()) > most:
        raise ValueError(
            "BatchNorm got " + str(len(x.size())) + " dimensions; an input has too few or too many"
        )
    return mean
