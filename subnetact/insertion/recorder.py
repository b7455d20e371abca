"""The graph of what a model computes on an example: every call of a function of torch, in order.

The model runs, and a mode of torch sees its calls. Shapes, branches and loops are those of the example, so
that a forward may look at shapes and change with them. What the example does not reach is not in the graph.
"""

from __future__ import annotations

import operator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from subnetact.comparison import tensors_in
from subnetact.operators.layer_traits import CHANNEL_NORM, norm_features, traits_of
from subnetact.supernet.batches import call_with, map_tensors

MOST_KEPT_VALUES = 2**20
"""Whole numbers and truth values of tensors with at most so many elements are kept: they may be indices."""


class Recording(TorchFunctionMode):
    """A graph, which is made by seeing all calls of functions on tensors while a model runs.

    Nodes are calls of modules and functions, and of methods of tensors by name. `meta` has the modules around
    a node (`nn_module_stack`), shape and dtype of a tensor (`tensor_meta`) and, for tensors of whole numbers,
    the `value`. An operation that changes a tensor in place is a node of its own, which later ones read.

    Attributes:
        branches: whether the forward branches on values that it computes with its weights.
        entries: name of a module -> the node of the first tensor that it is given.
        tensors: by their names in the graph, those that are not computed: parameters, buffers and new ones.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.graph = fx.Graph()
        self.branches = False
        self.entries: dict[str, fx.Node] = {}
        self.tensors: dict[str, Tensor] = {}
        self._names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._nodes: Any = WeakTensorKeyDictionary()
        self._around: dict[str, tuple[str, type]] = {}
        self._leaf: str | None = None
        self._weighted: set[fx.Node] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function and record it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._leaf is not None:
            return func(*args, **kwargs)
        if name == "__bool__" and self._nodes.get(args[0]) in self._weighted:
            self.branches = True
        result = func(*args, **kwargs)
        if name == "__setitem__":
            self.add("call_function", assigned, args, kwargs, args[0])
        elif tree_any(_is_tensor, result):
            self.add(*target_of(func, args), kwargs, result)
        return result

    def watch(self, path: str, module: nn.Module, leaf: bool) -> tuple[RemovableHandle, RemovableHandle]:
        """Let hooks note the calls of a module; those of a leaf are nodes of the graph."""

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._around[path] = path, type(module)
            given = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
            if given is not None and given in self._nodes:
                self.entries.setdefault(path, self._nodes[given])
            if leaf and self._leaf is None:
                self._leaf = path

        def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._leaf == path:
                self._leaf = None
                self.add("call_module", path, args, kwargs, output)
            self._around.pop(path, None)

        before = module.register_forward_pre_hook(enter, with_kwargs=True)
        return before, module.register_forward_hook(leave, with_kwargs=True)

    def add(self, op: str, target: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add a node, and further ones for the parts of a result that is no tensor."""
        given = tree_map_only(Tensor, self.node, (tuple(args), dict(kwargs)))
        node = self.graph.create_node(op, target, *given)
        called = self.model.get_submodule(target) if op == "call_module" else nn.Module()
        if any(True for _ in called.parameters()) or not self._weighted.isdisjoint(node.all_input_nodes):
            self._weighted.add(node)
        self._note(node, result)

    def _note(self, node: fx.Node, result: Any) -> None:
        """Note what a node returns, and where; parts of a result that is no tensor are nodes of their own."""
        node.meta["nn_module_stack"] = dict(self._around)
        if isinstance(result, Tensor):
            node.meta["tensor_meta"] = SimpleNamespace(shape=result.shape, dtype=result.dtype)
            if not result.is_floating_point() and result.numel() <= MOST_KEPT_VALUES:
                node.meta["value"] = result.clone()
            self._nodes[result] = node
        elif isinstance(result, tuple | list):
            for i, part in enumerate(result):
                if tree_any(_is_tensor, part):
                    child = self.graph.call_function(operator.getitem, (node, i))
                    self._weighted |= {child} if node in self._weighted else set()
                    self._note(child, part)

    def node(self, tensor: Tensor) -> fx.Node:
        """Return the node that stands for a tensor, which reads it if nothing has computed it."""
        node: fx.Node | None = self._nodes.get(tensor)
        if node is None:
            name = self._names.get(id(tensor), f"constant{len(self.tensors)}")
            self.tensors[name] = tensor
            node = self.graph.create_node("get_attr", name)
            if isinstance(tensor, nn.Parameter):
                self._weighted.add(node)
            self._note(node, tensor)
        return node


def recorded(model: nn.Module, example: Any) -> Recording:
    """Run a model, which nobody else uses, on an example and return the graph of its calls."""
    recording, example = Recording(model), map_tensors(Tensor.clone, example)
    inputs = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    for i, tensor in enumerate(inputs):
        recording.add("placeholder", f"input{i}", (), {}, tensor)
    with ExitStack() as hooks, torch.no_grad():
        for path, module in model.named_modules():
            for hook in recording.watch(path, module, is_leaf(module)):
                hooks.enter_context(hook)
        with recording:
            output = call_with(model, example)
    recording.graph.output([recording.node(t) for t in tensors_in(output) if t.numel()])
    return recording


def assigned(x: Tensor, index: Any, value: Any) -> Tensor:
    """Return a tensor in which the entries of an index have other values."""
    found = x.clone()
    found[index] = value
    return found


def is_leaf(module: nn.Module) -> bool:
    """Tell whether a recording does not look into a module: a layer of torch, or a norm of any class.

    Functions of recurrent layers check no sizes, and would crash; other unknown layers are looked into.
    """
    traits = traits_of(module)
    own = type(module).__module__.startswith("torch.nn.modules.") and traits.kind != "container"
    closed = traits.mixes or not module._modules
    unknown = traits.kind == "unknown" and module._parameters
    norm = unknown and norm_features(module) > 0 and not module._modules
    return (
        norm
        or traits.kind == CHANNEL_NORM
        or isinstance(module, nn.RNNBase)
        or (own and closed and not unknown)
    )


def called_name(node: fx.Node) -> str:
    """Return the name of the function or module that a node calls."""
    return str(getattr(node.target, "__name__", node.target))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def target_of(func: Any, args: Any) -> tuple[str, Any, Any]:
    """Return the kind of a node, what it calls, and its arguments, as a traced graph states them."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return "call_function", getattr, (args[0], func.__self__.__name__)
    if name.startswith("__r") and hasattr(operator, f"__{name[3:]}"):
        return "call_function", getattr(operator, f"__{name[3:]}"), args[::-1]
    if name.startswith("__") and hasattr(operator, name):
        return "call_function", getattr(operator, name), args
    if getattr(torch.Tensor, name, None) is func:
        plain = name.removesuffix("_")
        return "call_method", plain if hasattr(torch.Tensor, plain) else name, args
    return "call_function", func, args
