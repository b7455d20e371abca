"""FusedProgram: one subnet with packed weights, and with operations merged into its layers.

BatchNorms, activations and additions are merged into convolutions (`packed_conv.py`). The weights of linear
layers are packed, those of queries, keys and values together, and the operations after them overwrite their
outputs (`packed_linear.py`). `plan.py` decides which subnets become fused programs.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from subnetact.engine.fast_conv import use_fast_convs_
from subnetact.engine.finite_values import LIMIT, overflows, stays_finite
from subnetact.engine.graph_function import graph_function
from subnetact.engine.int8_conv import Int8Conv, runs_at_int8
from subnetact.engine.packed_conv import PackedConv, plain_conv
from subnetact.engine.packed_linear import (
    PackedLinear,
    can_pack_linear,
    is_packed,
    pack_linear_,
    pack_linears_,
)
from subnetact.operators.lowered_weight import LowConv
from subnetact.operators.view_module import module_class, owned
from subnetact.supernet.batches import call_with
from subnetact.supernet.elementwise import Elementwise, elementwise, has_hooks
from subnetact.supernet.trace import trace_

__all__ = ["FusedProgram"]

_Activation = tuple[str, tuple[float, ...]]
_ONEDNN_NAMES: dict[str, _Activation] = {
    "relu": ("relu", ()),
    "relu6": ("hardtanh", (0.0, 6.0)),
    "hardswish": ("hardswish", ()),
}
"""What oneDNN calls the activations that it computes in the same pass as a convolution, and their scalars."""


class _FusedConv(nn.Module):
    """A packed convolution as a module of the program's graph.

    `overwrite` says whether the second input may be overwritten with the result.
    """

    def __init__(self, conv: PackedConv) -> None:
        super().__init__()
        self.conv = conv
        self.overwrite = False

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.conv(x, other, self.overwrite)


class _Overwriting(nn.Module):
    """An elementwise operation whose result is written over its first operand."""

    def __init__(self, operation: Elementwise) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, *operands: Any) -> Any:
        return self.operation(operands, True)


class FusedProgram:
    """One subnet with packed weights, and with operations merged into its convolutions and linear layers.

    oneDNN's ReLU and hardtanh turn NaN into a number. So they are used only if the weights are finite and if
    nothing in the network can make NaN of finite numbers, which is tried on large values of the `probe`;
    `accepts` then tells which inputs the program may be given. In other networks these activations run by
    themselves and keep NaN.

    Nobody else may use the `view`. A program with a `dtype` computes in it, and converts inputs and outputs.
    One that is not `traced` is the view itself with packed linear layers. `paths` tells of modules that the
    network does not have which of its layers they stand for.
    """

    def __init__(
        self,
        view: nn.Module,
        dtype: torch.dtype | None = None,
        probe: Any = None,
        traced: bool = True,
    ) -> None:
        self.dtype = dtype if traced else None
        self._convs: list[PackedConv] = []
        self._linears: list[PackedLinear] = []
        self.paths: dict[str, str] = {}
        self._copied = 0
        self.module: nn.Module
        self._forward: Callable[..., Any]
        if traced:
            self.module, modules = self._graph_module(view, probe)
            self._forward = graph_function(self.module.graph, modules)
        else:
            self._linears = pack_linears_(use_fast_convs_(view))
            self.module = self._forward = view
        if not self._convs and not self._linears:
            raise ValueError("there is nothing to fuse: the network has no ordinary Conv2d or large Linear")
        self._swallows_nan = any(conv.swallows_nan for conv in self._convs)

    def _graph_module(self, view: nn.Module, probe: Tensor | None) -> tuple[fx.GraphModule, dict[str, Any]]:
        dtype = self.dtype
        if dtype is not None and any(p.dtype == torch.int8 for p in view.parameters()):
            raise ValueError(f"its int8 layers would compute something else in a program of {dtype}")
        graph, leaves, tensors = _traced(view)
        modules: dict[str, Any] = dict(leaves)
        order = {node: i for i, node in enumerate(graph.nodes)}
        merge = stays_finite(graph, leaves) and not overflows(view, probe)
        for node in list(graph.nodes):
            conv = leaves[node.target] if node.op == "call_module" and len(node.args) == 1 else None
            if conv is not None and _is_fusing(conv, merge):
                name, path = f"subnetact_fused_{order[node]}", str(node.target)
                fused = _FusedConv(_fuse(graph, node, leaves, tensors, order, name, dtype, merge))
                modules[name] = fused
                self.paths[name] = path
                self._convs.append(fused.conv)
        if dtype in (None, torch.float32):
            self._linears = _pack_linears(graph, modules, self.paths)
        _erase_unused(graph)
        _overwrite(graph, modules)
        used = {node.target for node in graph.nodes if node.op in ("call_module", "get_attr")}
        modules = {path: module for path, module in {**tensors, **modules}.items() if path in used}
        if dtype is not None:
            for path, module in modules.items():
                if isinstance(module, Tensor):
                    modules[path] = module.to(dtype) if module.is_floating_point() else module
                    self._copied += modules[path].nbytes
                elif not isinstance(module, _FusedConv | PackedLinear | _Overwriting) and not is_packed(
                    module
                ):
                    modules[path] = owned(module).to(dtype)
                    self._copied += sum(p.numel() * p.element_size() for p in modules[path].parameters())
        graph.lint()
        made = fx.GraphModule(modules, graph)
        # Breaks a reference circle, so that the weights are freed without the garbage collector.
        made.graph.owning_module = None
        return made, modules

    def accepts(self, x: Any) -> bool:
        """Tell whether the program answers a batch as the view does; see `strange`. Empty ones are not."""
        if isinstance(x, Tensor) and not x.numel():
            return False
        if not self._swallows_nan or not x.is_floating_point():
            return True
        flat = (x.permute(0, 2, 3, 1) if x.dim() == 4 else x).reshape(-1)
        return bool(torch.dot(flat, flat) <= LIMIT**2)  # False for NaN.

    def strange(self, x: Tensor) -> Tensor:
        """Return the positions of the samples that `accepts` would refuse if each of them came alone."""
        squares = x.reshape(len(x), -1).double().square().sum(1)
        return (~(squares <= LIMIT**2)).nonzero()[:, 0]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that belong to this program alone. New input shapes can add to them."""
        return self._copied + sum(conv.nbytes for conv in self._convs) + sum(p.nbytes for p in self._linears)

    def limit(self, reserve: Callable[[int], bool]) -> None:
        """Bound the memory of further input shapes: `reserve` is asked whether it may take so many bytes."""
        for conv in self._convs:
            conv.limit(reserve)

    def __call__(self, x: Any) -> Any:
        """Run a batch, with images in channels_last, and return the network's output in the dtype of x."""
        if self.dtype is None:
            return call_with(self._forward, x)
        return self._forward(x.to(self.dtype)).to(x.dtype)


def _traced(view: nn.Module) -> tuple[fx.Graph, dict[str, nn.Module], dict[str, Tensor]]:
    """Trace a view. The inside of classes that are derived from BatchNorm is traced as well if possible."""
    tensors: dict[str, Tensor] = {}
    try:
        graph, leaves = trace_(view, looks_inside=_is_derived_norm, tensors=tensors)
    except Exception:
        tensors = {}
        graph, leaves = trace_(view, tensors=tensors)
    _erase_checks_of_shape(graph)
    for node in list(graph.nodes):
        called = node.op == "call_module" and len(node.args) == 1 and _is_identity(leaves[node.target])
        if called or _is_no_dropout(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    _erase_unused(graph)
    return graph, leaves, tensors


def _is_fusing(module: nn.Module, merge: bool) -> bool:
    """Tell whether a module becomes a fused convolution. What is none computes as in the view."""
    if isinstance(module, LowConv):
        return merge and runs_at_int8(module) and not has_hooks(module)
    return plain_conv(module) and not has_hooks(module)


def _is_derived_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module_class(module).forward is not _BatchNorm.forward


def _is_identity(module: nn.Module) -> bool:
    cls = module_class(module)
    nothing = cls is nn.Identity or (cls in (nn.Dropout, nn.Dropout2d) and not module.training)
    return nothing and not has_hooks(module)


def _is_no_dropout(node: fx.Node) -> bool:
    if node.target not in (F.dropout, F.dropout2d) or not node.args:
        return False
    given = inspect.signature(F.dropout).bind(*node.args, **node.kwargs).arguments
    return given.get("training") is False and given.get("inplace", False) is False


_SHAPE_CHECKS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


def _erase_checks_of_shape(graph: fx.Graph) -> None:
    """Erase assertions about the number of axes; they hold for the example, which has the batches' shape."""
    for node in list(graph.nodes):
        if node.target is torch._assert and isinstance(node.args[0], fx.Node):
            condition = node.args[0]
            read = condition.args[0] if condition.target in _SHAPE_CHECKS else None
            if isinstance(read, fx.Node) and read.target is getattr and read.args[1] == "ndim":
                graph.erase_node(node)


def _erase_unused(graph: fx.Graph) -> None:
    """Erase reads of tensors, of attributes, and comparisons that nothing uses."""
    for node in reversed(list(graph.nodes)):
        pure = node.op == "get_attr" or node.target is getattr or node.target in _SHAPE_CHECKS
        if pure and not node.users:
            graph.erase_node(node)


def _constant_norm(node: fx.Node, tensors: Mapping[str, Tensor]) -> Any:
    """Return the parameters of a `batch_norm` with running statistics, or None if the node is another."""
    if node.op != "call_function" or node.target is not F.batch_norm:
        return None
    given = inspect.signature(F.batch_norm).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    found: dict[str, Any] = {}
    for name in ("running_mean", "running_var", "weight", "bias"):
        read = given.arguments[name]
        if read is not None and (not isinstance(read, fx.Node) or read.op != "get_attr"):
            return None
        found[name] = None if read is None else tensors[str(read.target)]
    if given.arguments["training"] is not False or found["running_mean"] is None:
        return None
    return SimpleNamespace(**found, eps=given.arguments["eps"])


def _fuse(
    graph: fx.Graph,
    node: fx.Node,
    leaves: dict[str, nn.Module],
    tensors: dict[str, Tensor],
    order: dict[fx.Node, int],
    name: str,
    dtype: torch.dtype | None,
    merge: bool,
) -> PackedConv:
    """Replace a convolution, and the operations that alone use its output, by one node of the given name."""
    conv: Any = leaves[str(node.target)]
    norm: Any = None
    last, other = node, None
    follower = _only_user(last)
    if follower is not None and follower.op == "call_module" and _is_folding(leaves[str(follower.target)]):
        norm = leaves[str(follower.target)]
    elif follower is not None and follower.args and follower.args[0] is last:
        norm = _constant_norm(follower, tensors)
    if follower is not None and norm is not None:
        last = follower
        follower = _only_user(last)
    added = _added(follower, last, leaves)
    if follower is not None and added is not None and order[added] < order[node]:
        other, last = added, follower
        follower = _only_user(last)
    activation = _activation(follower, leaves)
    if other is not None and activation != _ONEDNN_NAMES["relu"]:
        activation = None  # After an addition, oneDNN supports only ReLU.
    if follower is not None and activation is not None:
        last = follower
    inputs = (node.args[0],) if other is None else (node.args[0], other)
    with graph.inserting_before(last):
        fused = graph.call_module(name, inputs)
    order[fused] = order[last]
    last.replace_all_uses_with(fused)
    while last is not node:
        before = next(n for n in last.all_input_nodes if n is not other and order[n] >= order[node])
        graph.erase_node(last)
        last = before
    graph.erase_node(node)
    bias = _bias(conv, norm)
    if isinstance(conv, LowConv):
        return Int8Conv(conv, None if norm is None else _scale(norm), bias, *(activation or ("none", ())))
    dtype = dtype or conv.weight.dtype
    return PackedConv(
        conv,
        lambda: _weight(conv, norm).to(dtype),
        None if bias is None else bias.to(dtype),
        dtype,
        *(activation or ("none", ())),
        merge,
    )


def _pack_linears(graph: fx.Graph, modules: dict[str, Any], paths: dict[str, str]) -> list[PackedLinear]:
    """Pack the linear layers of a graph. Layers that read the same value become one product."""
    products: list[PackedLinear] = []
    by_input: dict[fx.Node, list[fx.Node]] = {}
    calls = [n for n in graph.nodes if n.op == "call_module" and len(n.args) == 1 and not n.kwargs]
    calls = [node for node in calls if can_pack_linear(modules[node.target])]
    times = Counter(node.target for node in calls)
    for node in calls:
        reader = _only_user(node)
        alone = times[node.target] > 1 or (reader is not None and elementwise(reader, modules) is not None)
        by_input.setdefault(node if alone else node.args[0], []).append(node)
    for nodes in by_input.values():
        if len(nodes) > 1:
            name = f"subnetact_packed_{len(products)}"
            modules[name] = PackedLinear([modules[str(node.target)] for node in nodes])
            paths[name] = str(nodes[0].target)
            products.append(modules[name])
            _replace(graph, nodes, name, modules[name].sizes)
        else:
            layer = modules[str(nodes[0].target)]
            if not is_packed(layer):
                products.append(pack_linear_(layer))
            _overwrite_output(graph, nodes[0], modules, paths)
    return products


def _replace(graph: fx.Graph, nodes: list[fx.Node], name: str, sizes: list[int]) -> None:
    """Replace linear layers of one input by the parts of one product."""
    with graph.inserting_before(nodes[0]):
        whole = graph.call_module(name, nodes[0].args)
        parts = graph.call_method("split", (whole, sizes, -1))
        made = [graph.call_function(operator.getitem, (parts, i)) for i in range(len(nodes))]
    for node, part in zip(nodes, made, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _overwrite_output(graph: fx.Graph, node: fx.Node, modules: dict[str, Any], paths: dict[str, str]) -> None:
    """Let the elementwise operations that alone read a fresh output write their results over it."""
    path = str(node.target)
    while (reader := _only_user(node)) is not None:
        operation = elementwise(reader, modules)
        others = tuple(operand for operand in reader.args if operand is not node)
        if operation is None or len(others) != len(reader.args) - 1:
            return
        if others and reader.target not in (operator.add, torch.add, "add", operator.mul, torch.mul, "mul"):
            return  # It may overwrite the other operand, which others may read.
        name = f"subnetact_over_{node.name}"
        modules[name], paths[name] = _Overwriting(operation), path
        with graph.inserting_before(reader):
            over = graph.call_module(name, (node, *others))
        reader.replace_all_uses_with(over)
        graph.erase_node(reader)
        node = over


def _overwrite(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    """Let an addition write its result over its second operand, if nothing reads that operand later."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        fused = modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(fused, _FusedConv) and len(node.args) == 2:
            other = node.args[1]
            made = isinstance(modules.get(str(other.target)), _FusedConv) and other is not node.args[0]
            # Other readers must be fused convolutions: any other operation may have returned a view of it.
            readers = [u for u in other.users if u is not node]
            fused.overwrite = made and all(
                order[u] < order[node] and isinstance(modules.get(str(u.target)), _FusedConv) for u in readers
            )


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_folding(module: nn.Module) -> bool:
    if not isinstance(module, _BatchNorm) or _is_derived_norm(module) or has_hooks(module):
        return False
    return not module.training and module.running_mean is not None


def _scale(norm: Any) -> Tensor:
    scale = torch.rsqrt(norm.running_var + norm.eps)
    return scale if norm.weight is None else scale * norm.weight


def _weight(conv: Any, norm: nn.Module | None) -> Tensor:
    weight: Tensor = conv.weight.detach()
    return weight if norm is None else weight * _scale(norm).reshape(-1, 1, 1, 1)


def _bias(conv: nn.Conv2d, norm: Any) -> Tensor | None:
    bias = None if conv.bias is None else conv.bias.detach()
    if norm is None:
        return bias
    shift: Tensor = ((0.0 if bias is None else bias) - norm.running_mean) * _scale(norm)
    return shift if norm.bias is None else shift + norm.bias.detach()


def _added(node: fx.Node | None, to: fx.Node, leaves: dict[str, nn.Module]) -> fx.Node | None:
    operation = None if node is None else elementwise(node, leaves)
    if node is None or operation is None or operation.name != "add":
        return None
    other = node.args[1] if node.args[0] is to else node.args[0]
    return other if isinstance(other, fx.Node) and other is not to and other.op != "get_attr" else None


def _activation(node: fx.Node | None, leaves: dict[str, nn.Module]) -> _Activation | None:
    operation = None if node is None else elementwise(node, leaves)
    return None if operation is None else _ONEDNN_NAMES.get(operation.name)
