"""FusedProgram: one subnet with packed weights, and with operations merged into its layers.

BatchNorms, activations and additions are merged into convolutions (`packed_conv.py`). The weights of linear
layers are packed (`packed_linear.py`), and the operations after them overwrite their outputs.
`fusion_plan.py` decides which subnets become fused programs.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from subnetact.device import raise_if_explained
from subnetact.engine.finite_values import overflows, stays_finite
from subnetact.engine.graph_function import graph_function
from subnetact.engine.head_attention import attend_by_heads
from subnetact.engine.int8_conv import Int8Conv, runs_at_int8
from subnetact.engine.packed_conv import PackedConv, SlicedConv, plain_conv
from subnetact.engine.packed_linear import PackedLinear, can_pack_linear, pack_linears_
from subnetact.operators.layer_traits import is_batch_norm, is_layer, runs_as, traits_of
from subnetact.operators.lowered_weight import LowConv
from subnetact.operators.operation_traits import OperationTraits, operation_of
from subnetact.supernet.batches import call_with
from subnetact.supernet.elementwise import elementwise, has_hooks, writes
from subnetact.supernet.trace import trace_


class _Overwriting(nn.Module):
    """An elementwise operation whose result is written over its first operand."""

    def __init__(self, operation: OperationTraits) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, *operands: Any) -> Any:
        return self.operation(operands)


class FusedProgram:
    """One subnet with packed weights, made of a `view` of its own; not `traced`, it is the view itself.

    If it is not `packed`, it holds no weights: its convolutions read their slices in every call.
    """

    def __init__(self, view: nn.Module, probe: Any = None, traced: bool = True, packed: bool = True) -> None:
        self.graph: fx.Graph | None = None
        self.plain = False
        self.values: dict[str, Any] = {}
        self.paths: dict[str, str] = {}  # for layers that the network lacks, one that they stand for
        self.blocks: list[Callable[[Any], Any]] | None = None  # `blocks.py` keeps the parts of the graph here
        self.forward: Callable[..., Any] = view
        if traced:
            self.graph = self._fused(view, probe, packed)
            self.forward = graph_function(self.graph, self.values)
        layers = list(self.values.values()) if traced else pack_linears_(view)
        self._convs = [layer for layer in layers if isinstance(layer, PackedConv)]
        self._linears = [layer for layer in layers if isinstance(layer, PackedLinear)]
        if not self._convs and not self._linears:
            raise ValueError("there is nothing to fuse: the network has no ordinary Conv2d or large Linear")
        self.swallows_nan = any(conv.swallows_nan for conv in self._convs)

    def __call__(self, x: Any) -> Any:
        """Run a batch, with images in channels_last, and return the network's output."""
        return call_with(self.forward, x)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that belong to this program alone. New input shapes can add to them."""
        return sum(conv.nbytes for conv in self._convs) + sum(linear.nbytes for linear in self._linears)

    def limit(self, reserve: Callable[[int], bool]) -> None:
        """Bound the memory of further input shapes: `reserve` is asked whether it may take so many bytes."""
        for conv in self._convs:
            conv.reserve = reserve

    def _fused(self, view: nn.Module, probe: Any, packed: bool) -> fx.Graph:
        graph, self.values = _traced(view)
        # oneDNN's ReLU and hardtanh turn NaN into a number, so finite values must not become NaN before them.
        merge = stays_finite(graph, self.values) and not overflows(view, probe)
        order = {node: i for i, node in enumerate(graph.nodes)}
        for node in list(graph.nodes):
            if node.op == "call_module" and len(node.args) == 1:
                conv = self.values[str(node.target)]
                if (plain_conv(conv) or (merge and runs_at_int8(conv))) and not has_hooks(conv):
                    kind = Int8Conv if isinstance(conv, LowConv) else PackedConv if packed else SlicedConv
                    self._fuse_conv(graph, node, order, merge, kind)
        if packed:
            attend_by_heads(graph)
            self._pack_linears(graph)
        _erase_unused(graph)
        self._overwrite_added(graph)
        used = {node.target for node in graph.nodes if node.op in ("call_module", "get_attr")}
        self.values = {name: value for name, value in self.values.items() if name in used}
        return graph

    def _fuse_conv(
        self, graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int], merge: bool, kind: type[PackedConv]
    ) -> None:
        """Replace a convolution, and the operations that alone use its output, by one node."""
        conv, chain = self.values[str(node.target)], [node]
        norm = self._norm(_only_user(node))
        if norm is not None:
            chain += node.users
        other = self._added(_only_user(chain[-1]), chain[-1])
        if other is not None and order[other] < order[node]:
            chain += chain[-1].users
        else:
            other = None
        activation = elementwise(_only_user(chain[-1]), self.values)
        if activation is not None and activation.merged and (other is None or activation.after_sum):
            chain += chain[-1].users
        else:
            activation = None
        name = f"subnetact_fused_{order[node]}"
        with graph.inserting_before(chain[-1]):
            fused = graph.call_module(name, (node.args[0],) if other is None else (node.args[0], other))
        order[fused] = order[chain[-1]]
        chain[-1].replace_all_uses_with(fused)
        for done in reversed(chain):
            graph.erase_node(done)
        self.values[name] = kind(conv, norm, activation, merge)
        self.paths[name] = str(node.target)

    def _norm(self, node: fx.Node | None) -> Any:
        """Return the BatchNorm with running statistics that a node applies, or None if it applies none."""
        if node is not None and node.op == "call_module":
            norm = self.values[str(node.target)]
            folds = is_batch_norm(norm) and not _is_derived_norm(norm) and not has_hooks(norm)
            return norm if folds and not norm.training and norm.running_mean is not None else None
        if node is None or node.target is not F.batch_norm:
            return None
        given = inspect.signature(F.batch_norm).bind(*node.args, **node.kwargs)
        given.apply_defaults()
        found: dict[str, Any] = {"eps": given.arguments["eps"]}
        for name in ("running_mean", "running_var", "weight", "bias"):
            read = given.arguments[name]
            if read is not None and (not isinstance(read, fx.Node) or read.op != "get_attr"):
                return None
            found[name] = None if read is None else self.values[str(read.target)]
        constant = given.arguments["training"] is False and found["running_mean"] is not None
        return SimpleNamespace(**found) if constant else None

    def _added(self, node: fx.Node | None, to: fx.Node) -> fx.Node | None:
        """Return what a node adds to another one, or None if it does something else."""
        operation = elementwise(node, self.values)
        if node is None or operation is None or operation.kind != "addition":
            return None
        other = node.args[1] if node.args[0] is to else node.args[0]
        return other if isinstance(other, fx.Node) and other is not to and other.op != "get_attr" else None

    def _pack_linears(self, graph: fx.Graph) -> None:
        """Pack the linear layers of a graph, whose outputs the operations after them overwrite."""
        for node in list(graph.nodes):
            if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
                path, layer = str(node.target), self.values[str(node.target)]
                if can_pack_linear(layer):
                    layer = self.values[path] = PackedLinear(layer)
                if isinstance(layer, PackedLinear):  # It may be called several times.
                    self._overwrite_output(graph, node)

    def _overwrite_output(self, graph: fx.Graph, node: fx.Node) -> None:
        """Let the elementwise operations that alone read a fresh output write their results over it."""
        path = str(node.target)
        while (reader := _only_user(node)) is not None:
            operation = elementwise(reader, self.values)
            others = tuple(operand for operand in reader.args if operand is not node)
            if operation is None or len(others) != len(reader.args) - 1:
                return
            if others and writes(reader, self.values):
                return  # It may overwrite the other operand, which others may read.
            name = f"subnetact_over_{node.name}"
            self.values[name], self.paths[name] = _Overwriting(operation), path
            with graph.inserting_before(reader):
                over = graph.call_module(name, (node, *others))
            reader.replace_all_uses_with(over)
            graph.erase_node(reader)
            node = over

    def _overwrite_added(self, graph: fx.Graph) -> None:
        """Let a convolution write its sum over the value that it adds, if nothing reads that value later."""
        order = {node: i for i, node in enumerate(graph.nodes)}
        convs = {node for node in order if isinstance(self.values.get(str(node.target)), PackedConv)}
        for node in convs:
            x, *added = node.args
            # Other readers must be fused convolutions: other operations may have returned a view of it.
            self.values[str(node.target)].overwrite = any(
                other is not x
                and other in convs
                and all(user in convs and order[user] <= order[node] for user in other.users)
                for other in added
            )


def _traced(view: nn.Module) -> tuple[fx.Graph, dict[str, Any]]:
    """Return the graph of a view, with the inside of derived BatchNorms if possible, and what it names."""
    try:
        graph, values = trace_(view, lambda m: is_layer(m) and not _is_derived_norm(m))
    except Exception as error:
        raise_if_explained(error)
        graph, values = trace_(view)
    _erase_checks_of_shape(graph)
    for node in list(graph.nodes):
        if _passes_on(node, values):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    _erase_unused(graph)
    return graph, values


def _is_derived_norm(module: nn.Module) -> bool:
    return is_batch_norm(module) and not runs_as(module)


def _passes_on(node: fx.Node, leaves: Mapping[str, nn.Module]) -> bool:
    """Tell whether a node returns its first argument: an identity, or dropout that is not in training."""
    if node.op == "call_module":
        layer = leaves[str(node.target)]
        plain = len(node.args) == 1 and runs_as(layer) and not has_hooks(layer)
        return plain and traits_of(layer).kind == "identity" and not layer.training
    if operation_of(node.target).kind != "identity" or not isinstance(node.target, FunctionType):
        return False
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    return bool(node.args) and given.get("training") is False and not given.get("inplace")


_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


def _erase_checks_of_shape(graph: fx.Graph) -> None:
    """Erase assertions about the number of axes; they hold for the example, which has the batches' shape."""
    for node in list(graph.nodes):
        if node.target is torch._assert and isinstance(node.args[0], fx.Node):
            condition = node.args[0]
            read = condition.args[0] if condition.target in _COMPARISONS else None
            if isinstance(read, fx.Node) and read.target is getattr and read.args[1] == "ndim":
                graph.erase_node(node)


def _erase_unused(graph: fx.Graph) -> None:
    """Erase reads of tensors, of attributes, and comparisons that nothing uses."""
    pure = (getattr, *_COMPARISONS)
    graph.eliminate_dead_code(lambda node: node.op != "get_attr" and node.target not in pure)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
