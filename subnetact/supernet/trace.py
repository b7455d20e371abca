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

from subnetact.operators.layer_traits import is_layer
from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.operators.view_module import mix_in_

_KNOWN = (
    *("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout"),
    *("dim", "size", "numel", "is_floating_point", "__len__"),
)
"""Attributes and methods that say the same of a tensor in a trace as in a call."""


class RecordedCall:
    """A mixin: the module passes its calls on to its `recorder`, a function of (args, kwargs)."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the recorder returns for a call."""
        return self.recorder(args, kwargs)


class TensorTracer(GraphAppendingTracer):
    """Records into a graph, which gets `tensors` by their names."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self.tensors: dict[str, Tensor] = {}
        self._nodes: dict[Any, fx.Node] = {}

    def create_arg(self, a: Any) -> Any:
        """Convert a value to an argument of a node; a tensor may be the weight of a leaf."""
        if not isinstance(a, Tensor):
            return super().create_arg(a)
        return self.named(f"subnetact_tensor_{len(self.tensors)}", a)

    def named(self, name: str, tensor: Tensor) -> fx.Node:
        """Return a node for a tensor, which has this name if it has none so far."""
        name = next((known for known, other in self.tensors.items() if other is tensor), name)
        self.tensors[name] = tensor
        return self.once(name, "get_attr", name)

    def once(self, key: Any, kind: str, target: str, *args: Any) -> fx.Node:
        """Return the one node of a key."""
        if key not in self._nodes:
            self._nodes[key] = self.create_node(kind, target, args, {})
        return self._nodes[key]


class _TensorProxy(fx.Proxy):
    """Stands for a parameter or buffer of the view in a trace. Its shape and dtype are known values."""

    def __init__(self, node: fx.Node, tracer: Any, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name) if name in _KNOWN else super().__getattr__(name)

    def __len__(self) -> int:
        return len(self.tensor)


def trace_(
    view: nn.Module, is_leaf: Callable[[nn.Module], bool] = is_layer
) -> tuple[fx.Graph, dict[str, Any]]:
    """Return the graph of a view, which nobody else may use meanwhile, and by name what it calls and reads.

    These are its leaves, and the tensors that other forwards read.
    """
    graph = fx.Graph()
    tracer = TensorTracer(graph)
    leaves: dict[str, nn.Module] = {}
    others: dict[str, nn.Module] = {}
    replaced: list[tuple[nn.Module, str, Any]] = []
    inside = ""
    for path, module in view.named_modules():
        if inside and path.startswith(inside):
            continue
        if path and is_leaf(module) and not isinstance(module, SkippedLayer):  # An identity leaves no call.
            leaves[path] = module
            inside = f"{path}."  # named_modules() yields a module, then the modules in it, then all others
        else:
            others[path] = module
    try:
        x = fx.Proxy(graph.placeholder("x"), tracer)
        for path, module in others.items():
            for registry in ("_parameters", "_buffers"):
                own = module.__dict__[registry]
                if own:
                    replaced.append((module, registry, own))
                    place = f"{path}." if path else ""
                    nodes = {n: tracer.named(place + n, t) for n, t in own.items() if t is not None}
                    proxies = {n: _TensorProxy(node, tracer, own[n]) for n, node in nodes.items()}
                    object.__setattr__(module, registry, {**own, **proxies})
        for path, leaf in leaves.items():
            object.__setattr__(leaf, "recorder", partial(tracer.create_proxy, "call_module", path))
            replaced.append((leaf, "__class__", type(leaf)))
            mix_in_(leaf, RecordedCall)
        output = view(x)
        if not isinstance(output, fx.Proxy):
            raise TypeError(f"the network returns {type(output).__name__}, not one tensor")
        graph.output(output.node)
    finally:
        for leaf in leaves.values():
            vars(leaf).pop("recorder", None)
        for module, name, former in replaced:
            object.__setattr__(module, name, former)
    return graph, {**tracer.tensors, **leaves}
