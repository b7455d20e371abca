"""Tracing: the forward of a view as a `torch.fx` graph, while other threads run other views.

`torch.fx.symbolic_trace` replaces `nn.Module.__call__` for the whole process while it runs. Here only the
leaves of one private view are replaced, by modules that record their calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.proxy import GraphAppendingTracer

from subnetact.operators.layer_traits import traits_of
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.operators.view_module import mix_in_, module_class

_KNOWN = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")
_KNOWN_METHODS = ("dim", "size", "numel", "is_floating_point", "__len__")


class RecordedCall:
    """A mixin: the module passes its calls on to its `recorder`, a function of (args, kwargs)."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the recorder returns for a call."""
        return self.recorder(args, kwargs)


class _TensorProxy(fx.Proxy):
    """Stands for a parameter or buffer of the view in a trace. Its shape and dtype are known values."""

    def __init__(self, node: fx.Node, tracer: Any, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        if name in _KNOWN or name in _KNOWN_METHODS:
            return getattr(self.tensor, name)
        return super().__getattr__(name)

    def __len__(self) -> int:
        return len(self.tensor)


def is_layer(module: nn.Module) -> bool:
    """Tell whether a module is a layer of PyTorch, or of a class that is derived from one."""
    of_torch = (cls for cls in module_class(module).__mro__ if cls.__module__.startswith("torch.nn."))
    return any(traits_of(cls, derived=False).kind != "container" for cls in of_torch)


def trace_(
    view: nn.Module,
    is_leaf: Callable[[nn.Module], bool] = lambda _: False,
    looks_inside: Callable[[nn.Module], bool] = lambda _: False,
    tensors: dict[str, Tensor] | None = None,  # receives those that forwards read; else they are constants
) -> tuple[fx.Graph, dict[str, nn.Module]]:
    """Return the graph of a view, which nobody else may use meanwhile, and its leaves by name."""
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    leaves: dict[str, nn.Module] = {}
    others: dict[str, nn.Module] = {}
    replaced: list[tuple[nn.Module, str, Any]] = []
    inside = ""
    for path, module in view.named_modules():
        if inside and path.startswith(inside):
            continue
        wanted = is_leaf(module) or (is_layer(module) and not looks_inside(module))
        if path and wanted and not isinstance(module, SkippedLayer):  # An identity leaves no call.
            leaves[path] = module
            inside = f"{path}."  # named_modules() yields a module, then the modules in it, then all others
        else:
            others[path] = module
    try:
        x = fx.Proxy(graph.placeholder("x"), tracer)
        for path, module in others.items():
            for registry in ("_parameters", "_buffers"):
                own = module.__dict__[registry]
                if own and tensors is not None:
                    replaced.append((module, registry, own))
                    proxies = {n: _proxy(tracer, path, n, t, tensors) for n, t in own.items()}
                    object.__setattr__(module, registry, proxies)
        for path, leaf in leaves.items():
            object.__setattr__(leaf, "recorder", partial(tracer.create_proxy, "call_module", path))
            replaced.append((leaf, "__class__", type(leaf)))
            mix_in_(leaf, RecordedCall)
        output = view(x)
        if not isinstance(output, fx.Proxy):
            raise TypeError(f"the network returns {type(output).__name__}, not one tensor")
        graph.output(output.node)
        if tensors is not None:
            _name_tensors(graph, tensors)
    finally:
        for leaf in leaves.values():
            vars(leaf).pop("recorder", None)
        for module, name, former in replaced:
            object.__setattr__(module, name, former)
    return graph, leaves


def _name_tensors(graph: fx.Graph, tensors: dict[str, Tensor]) -> None:
    """Let the graph get tensors that are arguments of nodes, such as the weight of a leaf, by names."""
    names = {id(tensor): name for name, tensor in tensors.items()}

    def named(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        name = names.setdefault(id(value), f"subnetact_tensor_{len(names)}")
        tensors[name] = value
        return graph.get_attr(name)

    for node in list(graph.nodes):
        with graph.inserting_before(node):
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), named)


def _proxy(tracer: Any, path: str, name: str, tensor: Tensor | None, tensors: dict[str, Tensor]) -> Any:
    if tensor is None:
        return None
    target = f"{path}.{name}" if path else name
    tensors[target] = tensor
    node = tracer.graph.create_node("get_attr", target, (), {})
    return _TensorProxy(node, tracer, tensor)
