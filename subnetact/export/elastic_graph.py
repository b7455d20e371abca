"""Records a supernet as one TorchScript module that runs every subnet: its size row is an argument.

The network's own forward runs on a view whose size row holds graph nodes in the place of integers, so that
views and files share one slicing rule, `Operator.tensors`. A layer that can be skipped becomes a submodule
that returns its first argument if the size row skips it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from subnetact.device import raise_if_explained
from subnetact.errors import ExportError
from subnetact.operators import LayerSelect, Operator, SubnetNorm
from subnetact.operators.layer_traits import is_layer
from subnetact.operators.view_module import mix_in_, view_module
from subnetact.supernet.bind import bind_module, operators_in
from subnetact.supernet.failure import culprit
from subnetact.supernet.trace import RecordedCall, TensorTracer


def record_network(network: nn.Module, inputs: Sequence[str], norms: Sequence[str], sizes: int) -> Any:
    """Return a module with `forward(*inputs, row, means, variances)`, as `ScriptedSubnets` calls it."""
    for operator in operators_in(network):
        operator.checks = False
    starts = {path: sizes + i for i, path in enumerate(norms)}
    registered = {id(tensor) for tensor in (*network.parameters(), *network.buffers())}
    unknown = fx.Proxy(fx.Graph().placeholder("input"))  # as the arguments of inner recordings are
    return _Recording("", starts, registered).script(network, (), dict.fromkeys(inputs, unknown), None)


class _Tracer(TensorTracer):
    """Records into a graph, whose tensors become attributes of its module."""

    def __init__(self, graph: fx.Graph, registered: set[int]) -> None:
        super().__init__(graph)
        self.registered = registered

    def create_arg(self, a: Any) -> Any:
        """Convert a value to an argument of a node; a forward may write into a tensor that it has made."""
        node = super().create_arg(a)
        made = isinstance(a, Tensor) and id(a) not in self.registered
        return self.once((node, "clone"), "call_method", "clone", node) if made else node


class _Recording:
    """One graph: that of the network, or that of a layer that can be skipped."""

    def __init__(self, path: str, starts: Mapping[str, int], registered: set[int]) -> None:
        self.path = path
        self.starts = starts  # where the statistics of BatchNorms are in the row
        self.graph = fx.Graph()
        self.tracer = _Tracer(self.graph, registered)
        self.modules: dict[str, Any] = {}
        self.done: dict[int, nn.Module] = {}

    def script(
        self, module: nn.Module, args: Any, kwargs: Any, gate: tuple[int, int] | None
    ) -> torch.jit.ScriptModule:
        """Record a module with these arguments, and compile it; where the gate is not met, it is skipped."""
        leaves, structure = tree_flatten((args, kwargs))
        names = [f"x{i}" for i in range(len(leaves))]
        given = [
            fx.Proxy(self.graph.placeholder(name), self.tracer) if isinstance(leaf, fx.Proxy) else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
        self.row: Any = fx.Proxy(self.graph.placeholder("row", type_expr=list[int]), self.tracer)
        self.means: Any = fx.Proxy(self.graph.placeholder("means"), self.tracer)
        self.variances: Any = fx.Proxy(self.graph.placeholder("variances"), self.tracer)
        bound: nn.Module = nn.Identity()
        try:
            bound = self.bind(module, self.path)
            args, kwargs = tree_unflatten(given, structure)
            self.graph.output(self.tracer.create_arg(bound(*args, **kwargs)))
        except Exception as error:
            raise_if_explained(error, ExportError)
            where = ".".join(filter(None, (self.path, culprit(bound, error)))) or "the network"
            raise ExportError(
                f"{where}: its forward cannot be traced ({error}); use "
                "subnetact.export.to_onnx or to_pt2, or put what depends on values into a function that "
                "opens as torch.nn.functional's do, with has_torch_function and handle_torch_function"
            ) from error
        if gate is not None:
            skip = f"if row[{gate[0]}] != {gate[1]}:\n    return {names[0]}\n"
            self.graph.on_generate_code(lambda _: lambda body: [skip, *body])
        tensors = {name: tensor.detach() for name, tensor in self.tracer.tensors.items()}
        recorded = fx.GraphModule({**self.modules, **tensors}, self.graph, type(module).__name__)
        return _scripted(recorded, self.path or "the network")

    def bind(self, module: nn.Module, path: str) -> nn.Module:
        """Return the view of a module for the symbolic size row; each module has one."""
        if id(module) not in self.done:
            self.done[id(module)] = self._bind(module, path)
        return self.done[id(module)]

    def _bind(self, module: nn.Module, path: str) -> nn.Module:
        def child(name: str, inner: nn.Module) -> nn.Module:
            place = f"{path}.{name}".lstrip(".")
            gate = module.gate(name) if isinstance(module, LayerSelect) else None
            return self.bind(inner, place) if gate is None else self._skippable(inner, place, gate)

        if isinstance(module, LayerSelect):
            return module.select({n: None if m is None else child(n, m) for n, m in module._modules.items()})
        if is_layer(module, derived=False) and not operators_in(module):
            name = f"module_{len(self.modules)}"
            self.modules[name] = _scripted(module, path)
            return _stand_in(module, partial(self.tracer.create_proxy, "call_module", name))
        own = {"_parameters": self._held(module._parameters), "_buffers": self._held(module._buffers)}
        held: Any = _with(module, own)
        if isinstance(module, Operator):
            held.__dict__["template"] = _with(module.template, own)
        return bind_module(held, self.row, child, self._norm, trainable=True)

    def _held(self, tensors: dict[str, Any]) -> dict[str, Any]:
        return {
            name: None if tensor is None else fx.Proxy(self.tracer.create_arg(tensor), self.tracer)
            for name, tensor in tensors.items()
        }

    def _norm(self, norm: SubnetNorm) -> nn.Module:
        start, channels = self.row[self.starts[norm.path]], norm.channels(self.row)
        mean, var = (flat[start : start + channels] for flat in (self.means, self.variances))
        bound = norm.bind_with(self.row, mean, var, trainable=True)
        for check in ("_check_input_dim", "_check_non_zero_input_channels"):
            object.__setattr__(bound, check, lambda _: None)
        return bound

    def _skippable(self, layer: nn.Module, path: str, gate: tuple[int, int]) -> nn.Module:
        """Return a stand-in for a layer of a stack; calling it records the layer into a graph of its own."""

        def record(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, fx.Proxy)]
            if not args or not isinstance(args[0], fx.Proxy):
                raise ExportError(
                    f"{path}: the tensor that it replaces must be its first argument, by position"
                )
            made = f"layer_{len(self.modules)}"
            inner = _Recording(path, self.starts, self.tracer.registered)
            self.modules[made] = inner.script(layer, args, kwargs, gate)
            inputs = (*tensors, self.row, self.means, self.variances)
            return self.tracer.create_proxy("call_module", made, inputs, {})

        return _stand_in(layer, record)


def _with(module: nn.Module, attributes: dict[str, Any]) -> nn.Module:
    other: nn.Module = object.__new__(type(module))
    other.__dict__.update(module.__dict__, **attributes)
    return other


def _stand_in(module: nn.Module, record: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> nn.Module:
    stand_in = view_module(module)
    object.__setattr__(stand_in, "recorder", record)
    return mix_in_(stand_in, RecordedCall)


def _scripted(module: nn.Module, path: str) -> torch.jit.ScriptModule:
    try:
        return torch.jit.script(module)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ExportError(
            f"{path} ({type(module).__name__}): TorchScript cannot compile it ({' '.join(lines[:3])}); "
            "rewrite it with what TorchScript knows, or use subnetact.export.to_onnx or to_pt2"
        ) from error
