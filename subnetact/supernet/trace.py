"""Tracing: the forward of a view as a `torch.fx` graph, while other threads run other views.

`torch.fx.symbolic_trace` replaces `nn.Module.__call__` for the whole process while it runs. Here only the
leaves of one private view are replaced, by modules that record their calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx, nn
from torch.fx.proxy import GraphAppendingTracer

from subnetact.operators.skipped_layer import SkippedLayer
from subnetact.operators.view_module import mix_in_, mix_out_

__all__ = ["RecordedCall", "trace_"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class RecordedCall:
    """A mixin: the module passes its calls on to its `recorder`, a function of (args, kwargs)."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the recorder returns for a call."""
        return self.recorder(args, kwargs)


def _is_leaf(module: nn.Module) -> bool:
    library = type(module).__module__.startswith("torch.nn.")
    return isinstance(module, nn.Conv2d) or (library and not isinstance(module, _CONTAINERS))


def trace_(
    view: nn.Module, is_leaf: Callable[[nn.Module], bool] | None = None
) -> tuple[fx.Graph, dict[str, nn.Module]]:
    """Return the graph of a view's forward of one tensor, and the leaves of the graph.

    PyTorch's own layers are leaves: the graph has one call for each, and nothing of their inside.

    Args:
        view: a view that nobody else uses. It is unchanged afterwards.
        is_leaf: a function that tells which further modules are leaves. If None, there are no further ones.

    Returns:
        The graph, and the leaves by the names under which the graph calls them.

    Raises:
        Exception: whatever the forward raises if it cannot be traced, because it depends on values or
            reads parameters itself.
    """
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    leaves: dict[str, nn.Module] = {}
    recording: list[nn.Module] = []
    inside = ""
    for path, module in view.named_modules():
        wanted = _is_leaf(module) or (is_leaf is not None and is_leaf(module))
        wanted = wanted and not isinstance(module, SkippedLayer)  # The identity leaves no call in a graph.
        if path and wanted and not (inside and path.startswith(inside)):
            leaves[path] = module
            inside = f"{path}."  # named_modules() yields a module, then the modules in it, then all others
    try:
        for path, leaf in leaves.items():
            object.__setattr__(leaf, "recorder", partial(tracer.create_proxy, "call_module", path))
            recording.append(mix_in_(leaf, RecordedCall))
        graph.output(view(fx.Proxy(graph.placeholder("x"), tracer)).node)
    finally:
        for leaf in recording:
            mix_out_(leaf)
            object.__delattr__(leaf, "recorder")
    return graph, leaves
