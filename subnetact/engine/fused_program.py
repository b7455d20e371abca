"""FusedProgram: one subnet with BatchNorms, activations and additions merged into its convolutions.

`promotion.py` decides which subnets get one; `cache.py` bounds their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from subnetact.engine.packed_conv import PackedConv, plain_conv
from subnetact.operators.view_module import owned
from subnetact.supernet.elementwise import elementwise
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


class FusedProgram:
    """One subnet whose BatchNorms, activations and residual additions are merged into its convolutions.

    The weights are copied and packed for the device. The outputs differ from those of the view by rounding.

    Args:
        view: a view that nobody else uses, of a network that maps one tensor to one tensor.
        dtype: what the program computes in. Inputs are converted to it and outputs are converted back. If
            None, nothing is converted.

    Attributes:
        module: the program as a torch.fx graph module.

    Raises:
        Exception: the network cannot be traced, so it cannot become a fused program.
    """

    def __init__(self, view: nn.Module, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        graph, leaves = trace_(view)
        modules: dict[str, nn.Module] = dict(leaves)
        order = {node: i for i, node in enumerate(graph.nodes)}
        self._convs: list[PackedConv] = []
        for node in list(graph.nodes):
            if node.op == "call_module" and plain_conv(leaves[node.target]) and len(node.args) == 1:
                name = f"fused_{order[node]}"
                fused = _FusedConv(_fuse(graph, node, leaves, order, name, dtype))
                modules[name] = fused
                self._convs.append(fused.conv)
        _overwrite(graph, modules)
        used = {node.target for node in graph.nodes if node.op == "call_module"}
        modules = {path: module for path, module in modules.items() if path in used}
        self._copied = 0
        if dtype is not None:
            for path, module in modules.items():
                if not isinstance(module, _FusedConv):
                    modules[path] = owned(module).to(dtype)
                    self._copied += sum(p.numel() * p.element_size() for p in modules[path].parameters())
        graph.lint()
        self.module = fx.GraphModule(modules, graph)
        # Breaks a reference circle, so that the weights are freed without the garbage collector.
        self.module.graph.owning_module = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that belong to this program alone. New input shapes can add to them."""
        return self._copied + sum(conv.nbytes for conv in self._convs)

    def limit(self, reserve: Callable[[int], bool]) -> None:
        """Bound the memory that further input shapes take.

        Args:
            reserve: called with the bytes that a further shape needs. If it returns False, the weights are
                packed in every call with that shape instead of being kept.
        """
        for conv in self._convs:
            conv.reserve = reserve

    def __call__(self, x: Tensor) -> Any:
        """Run a batch.

        Args:
            x: of shape (N, C, H, W), in channels_last.

        Returns:
            The output of the network, in the dtype of x.
        """
        if self.dtype is None:
            return self.module(x)
        return self.module(x.to(self.dtype)).to(x.dtype)


def _fuse(
    graph: fx.Graph,
    node: fx.Node,
    leaves: dict[str, nn.Module],
    order: dict[fx.Node, int],
    name: str,
    dtype: torch.dtype | None,
) -> PackedConv:
    """Replace a convolution, and the operations that alone use its output, by one node of the given name."""
    conv: Any = leaves[str(node.target)]
    norm, last, other = None, node, None
    follower = _only_user(last)
    if follower is not None and follower.op == "call_module" and _is_folding(leaves[str(follower.target)]):
        norm, last = leaves[str(follower.target)], follower
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
    dtype = dtype or conv.weight.dtype
    bias = _bias(conv, norm)
    return PackedConv(
        conv,
        lambda: _weight(conv, norm).to(dtype),
        None if bias is None else bias.to(dtype),
        dtype,
        *(activation or ()),
    )


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
    return isinstance(module, _BatchNorm) and not module.training and module.running_mean is not None


def _scale(norm: Any) -> Tensor:
    scale = torch.rsqrt(norm.running_var + norm.eps)
    return scale if norm.weight is None else scale * norm.weight


def _weight(conv: nn.Conv2d, norm: nn.Module | None) -> Tensor:
    weight = conv.weight.detach()
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
    return other if isinstance(other, fx.Node) and other is not to else None


def _activation(node: fx.Node | None, leaves: dict[str, nn.Module]) -> _Activation | None:
    operation = None if node is None else elementwise(node, leaves)
    return None if operation is None else _ONEDNN_NAMES.get(operation.name)
